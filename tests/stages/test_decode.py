"""Choice between fused kernels and the decoder's own code; ``test_autoencoders`` compares their outputs."""

import copy
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig
from torch import nn

from dit_accel.kernels.kept import capturing
from dit_accel.models.free_memory import FreeMemory
from dit_accel.models.graphs.step_graphs import StepGraphs
from dit_accel.stages import decode
from dit_accel.stages.decode import BOUNDS, FUSED, FusedDecode
from dit_accel.stages.vae import autoencoder_kl, causal
from tests.stages import ROUNDING
from tests.stages.autoencoders import autoencoder, decoded, enable_tiling, latents


class Fused:
    """An autoencoder with fused kernels, latents, and the output of its own decoder."""

    def __init__(self, monkeypatch, name="flux", shape=(2, 4, 8, 12), change=lambda vae: None):
        self.vae, self.latents = autoencoder(name), latents(*shape)
        change(self.vae)
        self.output = decoded(self.vae, self.latents)
        self.stage = FusedDecode(self.vae, "reference")
        self._monkeypatch = monkeypatch

    def replace(self, decode, page=autoencoder_kl):
        """Let ``decode``, which gets the page's function and its arguments, run in its place."""
        original = page.decode
        self._monkeypatch.setattr(page, "decode", lambda *args, **kwargs: decode(original, *args, **kwargs))

    def decode(self):
        return decoded(self.vae, self.latents)

    @property
    def remark(self):
        return self.stage.remark


@pytest.fixture
def fused(monkeypatch):
    return Fused(monkeypatch)


OUTPUTS = {  # function of the fused output, remark
    "errs": (lambda output: 1.01 * output, "differ from the decoder by 0.01, more than 0.003"),
    "second image errs": (lambda output: torch.tensor([[[[1.0]]], [[[1.015]]]]) * output, "differ from the decoder"),
    "of another dtype": (torch.Tensor.double, "of torch.float64, the decoder"),
}


@pytest.mark.parametrize(("change", "remark"), OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_that_differs_is_not_taken(change, remark, fused):
    fused.replace(lambda decode, *args, **kwargs: change(decode(*args, **kwargs)))
    for _ in range(2):
        assert torch.equal(fused.decode(), fused.output) and remark in fused.remark


def test_each_dtype_is_compared(fused):
    """After a form that fits, the same latents in half precision are compared with the decoder's own images again."""
    errors = {torch.float32: 1.0, torch.float16: 1.1}
    fused.replace(lambda decode, *args, **kwargs: errors[args[1].dtype] * decode(*args, **kwargs))
    fused.decode()
    assert fused.remark == FUSED
    decoded(fused.vae.half(), fused.latents.half())
    assert "differ from the decoder by 0.1" in fused.remark


def _replace_the_decoder(vae):
    vae.decoder.__class__ = type("Decoder", (type(vae.decoder),), {"__module__": "mine"})


def _add_a_lora(vae):
    vae.add_adapter(LoraConfig(r=2, target_modules=["conv1", "conv2"], init_lora_weights=False))


CHANGES = {
    "hooked": (lambda vae: vae.decoder.mid_block.register_forward_hook(lambda *_: None), "mid_block has hooks"),
    "wrapped": (
        lambda vae: setattr(vae.decoder, "conv_in", type("Wrapped", (nn.Sequential,), {})(vae.decoder.conv_in)),
        "conv_in is not the code of torch or diffusers",
    ),
    "another class": (_replace_the_decoder, "the decoder is not the code of torch or diffusers"),
    "lora": (_add_a_lora, "is not the code of torch or diffusers"),
    "compiled": (lambda vae: vae.decoder.mid_block.compile(backend="eager"), "mid_block is compiled"),
    "training": (lambda vae: vae.train(), "training mode"),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_a_decoder_that_is_not_known_runs_itself(change, reason, monkeypatch):
    fused = Fused(monkeypatch, change=change)
    assert torch.equal(fused.decode(), fused.output) and reason in fused.remark


def test_a_weight_of_another_dtype_is_named(fused):
    fused.vae.decoder.conv_norm_out.weight.data = fused.vae.decoder.conv_norm_out.weight.data.double()
    with pytest.raises(RuntimeError):  # torch's own norm takes no float64 weight
        fused.decode()
    assert "conv_norm_out has its weight in torch.float64" in fused.remark


LACKS = {  # calls of the kernels that have no memory, number of calls, and if each of four decodes is fused
    "first": ([0], 4, [False, True, True, True]),
    "later": ([1], 4, [True, False, True, True]),
    "lasting": (range(9), 2, [False] * 4),
}


@pytest.mark.parametrize(("lacks", "count", "are_fused"), LACKS.values(), ids=LACKS)
def test_a_lack_of_memory_costs_no_image(lacks, count, are_fused, fused):
    """The decoder's own image is returned, and the next call is fused again; a lasting lack is met twice."""
    calls = []

    def fails(decode, *args, **kwargs):
        calls.append(None)
        if len(calls) - 1 in lacks:
            raise torch.OutOfMemoryError("no memory")
        return decode(*args, **kwargs)

    fused.replace(fails)
    for is_fused in are_fused:
        assert (fused.decode() - fused.output).abs().max() < ROUNDING
        assert (FUSED if is_fused else "fused kernels raised OutOfMemoryError: no memory") in fused.remark
    assert len(calls) == count


def test_a_decoder_that_lacks_memory_begins_anew_without_graphs(fused, monkeypatch):
    """Graphs of steps may take the memory."""
    monkeypatch.setattr(StepGraphs, "lend_all", lend_all := Mock())
    fused.vae.decoder.register_forward_pre_hook(Mock(side_effect=[torch.OutOfMemoryError("no memory"), None]))
    assert torch.equal(fused.decode(), fused.output) and "memory did not suffice" in fused.remark
    lend_all.assert_called_once()


SHARES = {  # free shares of the decoder's own peak, before and after graphs are freed; size of what is compared first
    "both fit": (1.01, 1.01, (8, 12)),
    "a corner": (0.6, 0.6, (4, 6)),
    "graphs give way": (0.5, 0.6, (4, 6)),
    "in tiles": (0.5, 0.5, (8, 8)),
}


@pytest.mark.parametrize(("before", "after", "compared"), SHARES.values(), ids=SHARES)
def test_decoding_takes_the_memory_that_is_left(before, after, compared, fused, monkeypatch):
    """The memory is counted before; only tiles have seams, and tiling is off again afterwards."""
    own = autoencoder_kl.PEAKS[0][0] * fused.latents[:, 0].nbytes
    free, seen, tried, tiled = [before, after], [], FusedDecode._tried, autoencoder()
    monkeypatch.setattr(decode, "COUNTED", ("cpu",))
    monkeypatch.setattr(decode, "read_memory", lambda *_, **options: FreeMemory(free[0] * own, 0))
    monkeypatch.setattr(StepGraphs, "lend_all", lend_all := Mock(side_effect=lambda: free.pop(0)))
    monkeypatch.setattr(FusedDecode, "_tried", lambda *args: seen.append(args[3][0].shape[2:]) or tried(*args))
    for vae in (tiled, fused.vae):
        enable_tiling(vae)
    expected, fused.vae.use_tiling = decoded(tiled, fused.latents) if after == 0.5 else fused.output, False
    assert (fused.decode() - expected).abs().max() < ROUNDING and seen[0] == compared
    assert ("in tiles: decoding takes" in fused.remark) == (after == 0.5) and FUSED in fused.remark
    assert lend_all.called == (before < 0.57) and not fused.vae.use_tiling


@pytest.mark.parametrize("failing", [None, 4], ids=["whole", "a-kernel-fails"])
def test_tiles_for_want_of_memory_are_all_decoded(failing, monkeypatch):
    """The decoder's own tiles follow on a kernel that fails; threads turn tiling on and off again one by one."""
    fused, calls, tiled = Fused(monkeypatch, shape=(2, 4, 8, 28)), [], autoencoder()

    def fails(decode, *args, **kwargs):
        calls.append(None)
        if len(calls) == failing:
            raise torch.OutOfMemoryError("no memory")
        return decode(*args, **kwargs)

    fused.replace(fails)
    monkeypatch.setattr(decode, "COUNTED", ("cpu",))
    monkeypatch.setattr(decode, "read_memory", lambda *_, **options: FreeMemory(0, 0))
    for vae in (tiled, fused.vae):
        enable_tiling(vae)
    expected, fused.vae.use_tiling = decoded(tiled, fused.latents), False
    with ThreadPoolExecutor(3, initializer=torch.set_grad_enabled, initargs=(False,)) as pool:
        outputs = [item.result() for item in [pool.submit(fused.decode) for _ in range(1 if failing else 6)]]
    assert max((output - expected).abs().max() for output in outputs) < ROUNDING and not fused.vae.use_tiling
    assert ("no memory, in tiles: decoding takes" in fused.remark) == (failing is not None)


def test_a_decode_that_begins_anew_has_freed_its_weights(fused):
    """Converted weights are a copy of all weights, and memory is short where a kernel failed for want of it."""
    converted, freed = [], []
    fused.decode()

    def fails(decode, *args, layers, **kwargs):
        converted.append(weakref.ref(layers))
        decode(*args, layers=layers, **kwargs)
        raise torch.OutOfMemoryError("no memory")

    fused.vae.decoder.register_forward_pre_hook(lambda *_: freed.extend(layers() is None for layers in converted))
    fused.replace(fails)
    fused.decode()
    assert freed == [True] and "no memory" in fused.remark


def test_latents_that_are_no_numbers_decide_nothing(fused):
    decoded(fused.vae, fused.latents * float("nan"))
    assert "is no image" in fused.remark
    fused.decode()
    assert fused.remark == FUSED


@pytest.mark.parametrize("way", [copy.deepcopy, lambda vae: pickle.loads(pickle.dumps(vae))], ids=["copy", "pickle"])
def test_a_copy_decodes_by_itself(way, fused):
    """With its own weights and its class's code."""
    copied = way(fused.vae)
    for weight in fused.vae.decoder.parameters():
        weight.zero_()
    assert torch.equal(decoded(copied, fused.latents), fused.output) and fused.remark is None


@pytest.mark.parametrize("place", [1, 3], ids=["compared", "known"])
def test_an_interrupted_decode_leaves_no_state(place, monkeypatch):
    """Neither of the decode nor of its frames, in a call that is compared or not; the next decode is fused."""
    fused, calls = Fused(monkeypatch, "wan 2.1", (1, 4, 4, 5, 6)), []

    def interrupted(decode, *args, **kwargs):
        calls.append(None)
        if len(calls) == place:
            raise KeyboardInterrupt
        return decode(*args, **kwargs)

    fused.replace(interrupted, causal)
    with pytest.raises(KeyboardInterrupt):
        fused.decode()
    assert fused.stage._current.decode is None
    assert (fused.decode() - fused.output).abs().max() < ROUNDING and fused.remark == FUSED


def test_threads_may_decode_with_one_autoencoder(fused):
    """Each decode converts its own weights and knows its own frames."""
    plain, inputs = autoencoder(), [latents(1, 4, side, 8) for side in (4, 6, 8, 10)]
    outputs = [decoded(plain, values) for values in inputs]
    with ThreadPoolExecutor(4, initializer=torch.set_grad_enabled, initargs=(False,)) as pool:
        found = [item for _ in range(3) for item in pool.map(lambda values: decoded(fused.vae, values), inputs)]
    assert max((a - b).abs().max() for a, b in zip(found, 3 * outputs, strict=True)) < ROUNDING
    assert fused.remark == FUSED


MODES = {
    "inference": (torch.inference_mode, FUSED),
    "gradients": (torch.enable_grad, "gradients are on"),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
    "capture": (capturing, "a graph is being captured"),
}


@pytest.mark.parametrize(("mode", "remark"), MODES.values(), ids=MODES)
def test_modes_of_torch(mode, remark, fused):
    """Nothing that one decode makes is kept for a later one in another mode."""
    with mode():
        output = decoded(autoencoder(), fused.latents)
    for _ in range(2):
        with mode():
            assert (fused.decode() - output).abs().max() < ROUNDING and remark in fused.remark
    fused.decode()
    assert fused.remark == FUSED


@pytest.mark.filterwarnings("ignore")
def test_a_trace_is_of_the_decoders_own_code(fused):
    traced = torch.jit.trace(fused.vae.decoder, fused.latents, check_trace=False)
    assert "captured or traced" in fused.remark and (traced(fused.latents) - fused.output).abs().max() < ROUNDING


def test_changes_between_decodes_take_effect(fused):
    """Tiling, another dtype, new weights, and arguments by name."""
    vae = fused.vae

    def check(change, dtype=torch.float32):
        change()
        values = fused.latents.to(dtype)
        output = decoded(copy.deepcopy(vae), values)  # by its own code
        for _ in range(2):
            assert (decoded(vae, values) - output).norm() / output.norm() < BOUNDS[dtype] and fused.remark == FUSED

    check(lambda: enable_tiling(vae))
    check(vae.disable_tiling)
    check(vae.half, torch.float16)
    check(vae.float)
    check(lambda: vae.load_state_dict({name: weight + 0.01 for name, weight in vae.state_dict().items()}))
    assert vae._decode(z=fused.latents, return_dict=False)[0].shape == (2, 3, 16, 24) and fused.remark == FUSED
