"""Hand-written blocks of single models: padding, given images, variants of a model, and what an UPDATE computes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dit_accel import accelerate_transformer, load_preset
from dit_accel.models.driver import FamilyDriver
from dit_accel.models.families import krea2, ltx2
from dit_accel.models.fused import block_hook, flux2, hunyuan_video
from dit_accel.models.fused.ltx2 import LTX2BlockHook
from dit_accel.models.samples import TextMasks
from dit_accel.sparse import head_site
from tests.models import tiny
from tests.models.fused.test_blocks import ONE, TWO_PROMPTS, own_processor
from tests.models.fused.test_overwriting import EVERY_STEP, MODELS, preset_of
from tests.models.naive import overwriting
from tests.models.tiny.parts import TOKENS, WIDTH
from tests.rounding import distance

ATTENTION = 457 / (457 + 6 * 96)  # its share of the FLOPs of a block of FLUX, of 457 tokens and 96 features


@pytest.mark.parametrize("history_dtype", [None, "float8"], ids=["plain", "float8"])
def test_update_projects_heads_whose_symbol_changed(history_dtype, monkeypatch):
    """The second UPDATE starts from the first one's biases, and its cost shows it; from float8 it recomputes them."""
    updates = {}

    def spy(o, weight, *arguments, previous, **options):
        out, stack = kernel(o, weight, *arguments, previous=previous, **options)
        updates.setdefault(weight.data_ptr(), []).append((previous, stack, arguments[1].mask64))
        return out, stack

    kernel = head_site.gemm_o_update
    monkeypatch.setattr(head_site, "gemm_o_update", spy)
    preset = preset_of("flux", "head", **{"memory.history_dtype": history_dtype, "schedule.interval": 4})
    _, report = tiny.accelerated_output("flux", preset, 9, **MODELS["flux"][1])
    assert report.fallbacks == []
    second = [step.index for step in report.steps if step.mode == "update"][1]
    for layer, ((no_previous, first_stack, before), (previous, stack, after)) in zip(
        report.density, updates.values(), strict=True
    ):
        assert no_previous is None and len(first_stack) == len(stack) == 2
        heads = torch.arange(3)
        changed, reused = ((words[..., None] >> heads & 1).double().mean() for words in (before ^ after, ~after))
        assert 0 < changed < reused
        if history_dtype == "float8":
            assert previous is None
        else:
            assert previous[0].data_ptr() == first_stack.data_ptr() and torch.equal(previous[1], before)
        projected = reused if history_dtype == "float8" else changed
        assert layer[second] == pytest.approx(1 + (1 - ATTENTION) / 12 * projected)


def test_half_precision_stays_close_to_naive():
    """In bfloat16 the difference to the naive run is less than that run's own rounding."""
    half, preset = tiny.copy_of("wan").to(torch.bfloat16), preset_of("wan", "head")
    sequence, arguments = MODELS["wan"]
    half.transformer.rope.float()  # as diffusers loads it
    expected = []
    for pipe in (half, tiny.pipeline("wan")):
        with overwriting(pipe, preset, 8, sequence):
            expected.append(tiny.output("wan", 8, pipe, **arguments))
    result, report = tiny.accelerated_output("wan", preset, 8, half, **arguments)
    assert report.fallbacks == [] and distance(result, expected[0]) < distance(*expected)


# HunyuanVideo: padding, and processors of the user's.


@pytest.mark.parametrize(
    ("name", "level", "changes", "count"), [("hunyuan", "layer", {}, 35), ("hunyuan-i2v", "head", EVERY_STEP, 44)]
)
def test_fused_projections_are_projections(name, level, changes, count, monkeypatch, as_on_a_gpu):
    """GEMM-Q of every row, with norm and RoPE inside, gives what the layers give.

    A computed step has eight of them, one of which carries a hook and is called; a DISPATCH step has the four of keys.
    """
    preset, arguments = preset_of(name, level, **changes), {"prompt": TWO_PROMPTS}
    pipe, fused, called, gemm_q = tiny.copy_of(name), [], [], hunyuan_video.gemm_q
    with monkeypatch.context() as patch:
        patch.setattr(FamilyDriver, "fuses_kernels", lambda driver, x: False)
        apart, _ = tiny.accelerated_output(name, preset, 8, pipe, **arguments)
    monkeypatch.setattr(hunyuan_video, "gemm_q", lambda *args, **options: fused.append(1) or gemm_q(*args, **options))
    pipe.transformer.transformer_blocks[1].attn.to_k.register_forward_hook(lambda *_: called.append(1))
    result, report = tiny.accelerated_output(name, preset, 8, pipe, **arguments)
    assert distance(result, apart) < 1e-5
    assert report.fallbacks == [] and len(fused) == count and called


@pytest.mark.parametrize("prompt", [TWO_PROMPTS[0], TWO_PROMPTS], ids=["one-prompt", "unequal-prompts"])
def test_dense_attention_by_the_kernel_changes_nothing(as_on_a_gpu, monkeypatch, prompt):
    """The op over every tile, which takes each prompt's length, is dense attention without its padding."""
    plain, attended, attention = tiny.output("hunyuan", 2, prompt=prompt), [], block_hook.attention

    def counted(*args, **options):
        attended.append(options["kv_len"] is not None)
        return attention(*args, **options)

    monkeypatch.setattr(block_hook, "attention", counted)
    monkeypatch.setattr(FamilyDriver, "attends_by_kernel", lambda driver, q: True)
    result, report = tiny.accelerated_output("hunyuan", "exact", 2, prompt=prompt)
    assert distance(result, plain) < 1e-5 and report.fallbacks == []
    assert attended == [prompt == TWO_PROMPTS] * 4 * 2


@pytest.mark.parametrize("prompt", [TWO_PROMPTS[0], [TWO_PROMPTS[0]] * 2, TWO_PROMPTS], ids=["one", "equal", "unequal"])
def test_cut_padding_equals_masked_padding(monkeypatch, prompt):
    """Without padding, attention has no mask and no token beyond the longest prompt, and the result is the same."""
    monkeypatch.setattr(FamilyDriver, "cuts_padding", lambda *_: True)
    pipe, seen = tiny.copy_of("hunyuan-i2v"), []
    plain = tiny.output("hunyuan-i2v", 3, pipe, prompt=prompt)
    for block in [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]:
        block.attn.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    result, report = tiny.accelerated_output("hunyuan-i2v", "exact", 3, pipe, prompt=prompt)
    assert distance(result, plain) < 1e-6 and report.fallbacks == []
    assert len(seen) >= 3 * 4 and all(kwargs.get("attention_mask") is None for kwargs in seen)
    lengths = {kwargs["encoder_hidden_states"].shape[1] for kwargs in seen}
    assert len(lengths) == (2 if prompt == TWO_PROMPTS else 1) and max(lengths) < 37


def by_products(transformer):
    """A processor whose attention does not call torch's."""

    def attend(query, key, value, **_):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return ((q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2)

    attn = transformer.transformer_blocks[0].attn
    call = type(attn.processor).__call__

    def attending(self, *args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(call.__globals__, "dispatch_attention_fn", attend)
            return call(self, *args, **kwargs)

    attn.set_processor(type("ByProducts", (type(attn.processor),), {"__call__": attending})())


@pytest.mark.parametrize(("change", "sites"), [(own_processor, []), (by_products, ["transformer_blocks.0"])])
def test_processors_of_the_user_are_intercepted_where_they_call_torch(change, sites):
    """A block whose attention can't be intercepted keeps it, and the report says so; the others are sparse."""
    preset, pipe = preset_of("hunyuan", "layer", **EVERY_STEP), tiny.copy_of("hunyuan")
    everywhere, _ = tiny.accelerated_output("hunyuan", preset, 8, pipe)
    change(pipe.transformer)
    result, report = tiny.accelerated_output("hunyuan", preset, 8, pipe)
    assert [entry["site"] for entry in report.fallbacks] == sites
    assert all("attends without calling torch's" in entry["reason"] for entry in report.fallbacks)
    steps = {step.index for step in report.steps if step.index >= 2 and step.mode != "dispatch"}
    assert {report.density[0][step] == 1 for step in steps} == {bool(sites)}
    assert all(report.density[1][step] != 1 for step in steps)
    assert (1e-4 < distance(result, everywhere) < 0.5) if sites else distance(result, everywhere) < 1e-5


# FLUX.1 and its relatives.


def test_images_to_edit_may_have_a_timestep_of_their_own(as_on_a_gpu):
    """Like Qwen-Image-Edit-2511: tokens of the given image have their own modulation."""
    pipe, alike = tiny.copy_of("qwen-image-edit"), tiny.output("qwen-image-edit", 2)
    for module in (pipe.transformer, *pipe.transformer.transformer_blocks):
        module.zero_cond_t = True
    apart = tiny.output("qwen-image-edit", 2, pipe)
    assert distance(apart, alike) > 1e-3
    assert distance(tiny.accelerated_output("qwen-image-edit", "exact", 2, pipe)[0], apart) < 1e-5


def test_versions_of_diffusers_that_pass_other_arguments_run_their_own_blocks():
    """diffusers 0.36 gave FLUX.2's blocks their modulations in another form."""
    hook = flux2.Flux2DoubleBlockHook("transformer_blocks.0", SimpleNamespace(preset=None))
    hook.initialize_hook(type("Older", (nn.Module,), {"forward": lambda self, hidden_states, temb: None})())
    assert hook._why_other == "in this version of diffusers the block takes no temb_mod_img"


# Krea 2 and Z-Image.


@pytest.mark.parametrize(("rows", "tokens", "keeps_mask"), [([1], 5, False), ([0, 1], 12, True), ([2], 1, True)])
def test_padding_is_taken_out(rows, tokens, keeps_mask):
    """Valid tokens come first; a mask stays if it hides something, as of a prompt without any token."""
    mask = torch.stack([torch.ones(12), torch.arange(12) % 3 == 1, torch.zeros(12)]).bool()[rows]
    mask[..., -1] |= rows == [1]
    text = torch.arange(12.0)[None, :, None, None].expand(len(rows), -1, 2, 3)
    places = torch.arange(20)[:, None].expand(-1, 3)
    arguments = {"encoder_hidden_states": text, krea2.MASK: mask, "position_ids": places}
    found, lengths = krea2.cut(arguments, TextMasks().lengths(mask))
    for place, valid in enumerate(mask):
        assert torch.equal(found["encoder_hidden_states"][place, : valid.sum(), 0, 0], text[place, valid, 0, 0])
    assert found["encoder_hidden_states"].shape == (len(rows), tokens, 2, 3) and lengths.end == tokens
    assert (found[krea2.MASK] is not None) is keeps_mask
    assert torch.equal(found["position_ids"][tokens:, 0], torch.arange(12, 20))


def test_padding_stays_where_several_devices_share_the_tokens(monkeypatch):
    """The caller's own plan splits text and image as one sequence, whose length must divide evenly."""
    transformer = tiny.pipeline("krea2").transformer
    driver = FamilyDriver(transformer, load_preset("exact"), "transformer", lambda: transformer, krea2.FAMILY)
    assert driver.cuts_padding(torch.device("cuda"))
    monkeypatch.setattr(transformer, "_parallel_config", SimpleNamespace(context_parallel_config=object()))
    assert not driver.cuts_padding(torch.device("cuda"))


def equal_calls(transformer, arguments, timesteps=(0.9, 0.8)):
    """Require that fused blocks give all outputs of the plain transformer, and return these."""
    with torch.no_grad():
        plain = transformer(**arguments, return_dict=False)
        acceleration = accelerate_transformer(transformer, "exact", timesteps)
        fused = transformer(**arguments, return_dict=False)
        acceleration.restore()
    leaves = zip(*map(torch.utils._pytree.tree_leaves, (fused, plain)), strict=True)
    assert all(distance(*both) < 1e-5 for both in leaves)
    return plain


def test_given_images_have_modulations_of_their_own(as_on_a_gpu, by_hand):
    """Z-Image Omni takes a given image and one to make, each after its part of the prompt."""
    generator = torch.Generator().manual_seed(4)
    pictures = [[torch.randn(4, 1, side, 8, generator=generator) for side in (8, 12)]]
    prompts = [[torch.randn(5, 32, generator=generator) for _ in range(2)]]
    arguments = {"x": pictures, "t": torch.tensor([0.5]), "cap_feats": prompts, "siglip_feats": [None]}
    equal_calls(tiny.pipeline("z-image").transformer, arguments | {"image_noise_mask": [[0, 1]]}, [0.5, 0.4])
    assert by_hand


def test_a_mask_of_one_sample_hides_nothing(as_on_a_gpu, monkeypatch):
    """Older versions of diffusers always pass one."""
    transformer = tiny.pipeline("z-image").transformer
    build = type(transformer)._build_unified_sequence

    def masked(*args, **kwargs):
        unified, turns, _mask, noisy = build(transformer, *args, **kwargs)
        return unified, turns, torch.ones(unified.shape[:2], dtype=torch.bool), noisy

    plain = tiny.output("z-image", 4, **ONE["z-image"])
    monkeypatch.setattr(transformer, "_build_unified_sequence", masked)
    assert tiny.accelerated_output("z-image", preset_of("z-image", "head"), 8, **ONE["z-image"])[1].fallbacks == []
    assert distance(tiny.accelerated_output("z-image", "exact", 4, **ONE["z-image"])[0], plain) < 1e-5


# Models of videos with sound.

MODULATED = {"cross_attn_mod": True, "audio_cross_attn_mod": True}
GATED = {"gated_attn": True, "audio_gated_attn": True}
VARIANTS = {  # of LTX-2: settings of the transformer, why its blocks run as before, whether attention runs by hand
    "2.3": ({**MODULATED, **GATED}, [], True),
    "2.5": ({**MODULATED, **GATED, "ff_bias": False, "use_prompt_adaln_single": False}, [], True),
    "video modulated alone": ({"cross_attn_mod": True}, [], True),
    "without perturbed guidance": ({"perturbed_attn": False}, [], True),
    "RoPE of adjacent features": ({"rope_type": "interleaved"}, [], False),
    "norms with weights": ({"norm_elementwise_affine": True}, ["a norm is no RMSNorm without weights"], False),
}


@pytest.mark.parametrize(("settings", "reasons", "attends"), VARIANTS.values(), ids=VARIANTS)
def test_variants_of_ltx2(settings, reasons, attends, as_on_a_gpu, by_hand):
    pipe = tiny.copy_of("ltx2")
    config = {key: value for key, value in pipe.transformer.config.items() if not key.startswith("_")}
    torch.manual_seed(0)
    pipe.transformer = type(pipe.transformer)(**config | settings).eval()
    for parameter in pipe.transformer.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    fused, report = tiny.accelerated_output("ltx2", "exact", 2, pipe)
    assert distance(fused, tiny.output("ltx2", 2, pipe)) < 1e-5
    assert sorted({item["reason"] for item in report.fallbacks}) == reasons and any(by_hand) == attends


def test_timesteps_of_tokens(as_on_a_gpu, by_hand):
    """In image-to-video given frames have timestep 0, so each token has its own modulation."""
    pipe, arguments = tiny.copy_of("ltx2"), {}
    handle = pipe.transformer.register_forward_pre_hook(lambda *call: arguments.update(call[2]), with_kwargs=True)
    tiny.output("ltx2", 1, pipe)
    handle.remove()
    timestep = arguments["timestep"].reshape(-1, 1).expand(arguments["hidden_states"].shape[:2]).clone()
    timestep[:, :48] = 0
    arguments |= {"timestep": timestep, "audio_timestep": arguments["timestep"]}
    arguments.pop("return_dict")
    equal_calls(pipe.transformer, arguments, [float(timestep.max()), 0.0])
    assert by_hand


def test_a_mask_between_video_tokens_is_left_to_the_processor(as_on_a_gpu, by_hand):
    """In-context LoRAs weigh attention to their references."""
    pipe, mask = tiny.copy_of("ltx2"), torch.rand(1, 144, 144)
    forward = pipe.transformer.forward

    def masked(*args, **call):
        return forward(*args, **call, video_self_attention_mask=mask.expand(len(call["hidden_states"]), -1, -1))

    pipe.transformer.forward = masked
    plain = tiny.output("ltx2", 2, pipe)
    assert distance(plain, tiny.output("ltx2", 2)) > 1e-4
    assert distance(tiny.accelerated_output("ltx2", "exact", 2, pipe)[0], plain) < 1e-5
    assert by_hand and not any(by_hand)


def test_tokens_are_shared_by_diffusers_where_that_is_not_tested_here():
    """Under context parallelism attention needs the tokens of all devices, in the places that the family knows."""
    shared = SimpleNamespace(tensor_parallel_config=None, context_parallel_config=object())
    driver = SimpleNamespace(transformer=SimpleNamespace(_parallel_config=shared), family=ltx2.FAMILY, preset=None)
    reason = LTX2BlockHook("transformer_blocks.0", driver)._why_not_shared()
    assert reason == "several devices share tokens, which is not tested with its blocks"


def minimax_call(batch):
    """Arguments of MiniMax-H3: text, a given image at a timestep of its own, audio and video."""
    tags = torch.tensor([1] * TOKENS + [0] * 6 + [2] * 10 + [0] * 24)
    torch.manual_seed(0)
    return {
        "hidden_states": torch.randn(batch, 30, 96),
        "audio_hidden_states": torch.randn(batch, 10, 32),
        "encoder_hidden_states": torch.randn(batch, TOKENS, WIDTH),
        "timestep": torch.tensor([0.3, 0.9, 0.5]),
        "timestep_indices": torch.tensor([0] * TOKENS + [1] * 6 + [2] * 10 + [0] * 24),
        "token_tags": tags,
        "position_ids": torch.arange(len(tags))[:, None].expand(-1, 3),
        **{f"{kind}_indices": (tags == tag).nonzero()[:, 0] for tag, kind in enumerate(("video", "text", "audio"))},
    }


@pytest.mark.parametrize(("batch", "masks"), [(1, False), (2, False), (1, True)])
def test_outputs_with_a_given_image(batch, masks, as_on_a_gpu, by_hand):
    """Rows of five of the nine pairs of timestep and modality are in use; a mask by a hook is the processor's."""
    transformer, mask = tiny.copy_of("minimax-h3").transformer, torch.rand(1, 1, 52, 52)
    add = lambda _, args, kwargs: (args, kwargs | {"attention_mask": mask})  # noqa: E731
    with torch.no_grad():
        plain = transformer(**minimax_call(batch))
    for block in transformer.transformer_blocks if masks else ():
        block.register_forward_pre_hook(add, with_kwargs=True)
    video, _ = equal_calls(transformer, minimax_call(batch))
    assert by_hand == [not masks] * 2 and (distance(video, plain[0]) > 1e-4) == masks


def test_the_text_decides_the_dtype_of_blocks(monkeypatch):
    """Latents are float32 before a model of another dtype; kernels run in half precision."""
    seen = []
    monkeypatch.setattr(FamilyDriver, "fuses_kernels", lambda _, x: seen.append(x.shape[1:]))
    tiny.accelerated_output("minimax-h3", "exact", 1)
    assert seen == [(TOKENS, WIDTH)]


@torch.no_grad()
def test_the_report_says_why_blocks_run_without_fused_kernels():
    """On a GPU, where they would be expected."""
    notes = []
    run = SimpleNamespace(report=SimpleNamespace(note=notes.append))
    driver = SimpleNamespace(
        family=SimpleNamespace(heads=lambda _: (2, 96)), transformer=None, session=SimpleNamespace(run=run)
    )
    for dtype, on_gpu in ((torch.float32, True), (torch.bfloat16, True), (torch.float32, False)):
        assert not FamilyDriver.fuses_kernels(driver, SimpleNamespace(dtype=dtype, is_cuda=on_gpu))
    assert [note.partition(": ")[2][:12] for note in notes] == ["they compute", "heads have 9"]
