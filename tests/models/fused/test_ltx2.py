"""LTX-2's blocks: both streams, kinds of guidance, released variants, prompts of a batch, and what runs as before."""

import copy

import pytest
import torch

from dit_accel import accelerate_pipeline, load_preset, restore_pipeline
from dit_accel.models import drive
from dit_accel.models.fused import ltx2
from tests.models import tiny
from tests.models.fused.test_flux_relatives import distance
from tests.models.tiny.parts import TOKENS, WIDTH, text

STEPS = 3
MODULATED = {"cross_attn_mod": True, "audio_cross_attn_mod": True}
GATED = {"gated_attn": True, "audio_gated_attn": True}
VARIANTS = {  # settings of the transformer
    "2.3": {**MODULATED, **GATED},
    "2.5": {**MODULATED, **GATED, "ff_bias": False, "use_prompt_adaln_single": False},
    "video modulated alone": {"cross_attn_mod": True},
    "without perturbed guidance": {"perturbed_attn": False},
    "RoPE of adjacent features": {"rope_type": "interleaved"},
    "norms with weights": {"norm_elementwise_affine": True},
}
OWN = {"norms with weights": "a norm is no RMSNorm without weights"}  # variants whose blocks run as before


def prompts(count, padded=0):
    mask = torch.ones(count, TOKENS, dtype=torch.long)
    mask[0, :padded] = 0
    kinds = {"": 2, "negative_": 3}
    embeddings = {f"{kind}prompt_embeds": text(count, TOKENS, WIDTH, seed=seed) for kind, seed in kinds.items()}
    return embeddings | {f"{kind}prompt_attention_mask": mask for kind in kinds}


CASES = {
    "guidance": {},
    "no guidance": {"guidance_scale": 1.0, "audio_guidance_scale": 1.0},
    "perturbed guidance": {"stg_scale": 1.0, "audio_stg_scale": 1.0},
    "guidance without the other stream": {"modality_scale": 3.0, "audio_modality_scale": 3.0},
    "two prompts": prompts(2),
    "unequal prompts": prompts(2, padded=2),
}


@pytest.fixture
def pipe():
    return copy.deepcopy(tiny.pipeline("ltx2"))


def made(pipe, steps=STEPS, **given):
    """Video and audio in one vector."""
    arguments = tiny.built("ltx2")[1] | {"num_inference_steps": steps} | given
    return torch.cat([output.flatten() for output in tiny.outputs(pipe, arguments)])


def accelerated(pipe, preset, **given):
    """Video and audio, and the report; the pipeline is plain again afterwards."""
    accelerate_pipeline(pipe, preset)
    try:
        return made(pipe, **given), pipe.dit_accel.report()
    finally:
        restore_pipeline(pipe)


@pytest.fixture
def computed(monkeypatch):
    """Names of the attentions that the hooks have run, by True where the processor stood aside."""
    found, attend = [], ltx2.LTX2BlockHook.attend

    def noting(self, block, given, runs_here, name, *streams):
        found.append((name, runs_here))
        return attend(self, block, given, runs_here, name, *streams)

    monkeypatch.setattr(ltx2.LTX2BlockHook, "attend", noting)
    return found


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_fused_blocks_compute_what_diffusers_does(given, pipe, as_on_a_gpu, computed):
    """Only guidance by values leaves attention to its processor, in the block that it perturbs."""
    plain = made(pipe, **given)
    fused, report = accelerated(pipe, "exact", **given)
    assert report.fallbacks == [] and 0 < distance(fused, plain) < 1e-5
    assert {name for name, _ in computed} == set(ltx2.ATTENTIONS)
    assert all(runs_here for _, runs_here in computed) == ("stg_scale" not in given)
    assert torch.equal(made(pipe, **given), plain), "restored"


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_model(name, pipe, as_on_a_gpu, computed):
    torch.manual_seed(0)
    settings = {key: value for key, value in pipe.transformer.config.items() if not key.startswith("_")}
    pipe.transformer = type(pipe.transformer)(**settings | VARIANTS[name]).eval()
    for parameter in pipe.transformer.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    plain, (fused, report) = made(pipe), accelerated(pipe, "exact")
    assert distance(fused, plain) < 1e-5
    assert {each["reason"] for each in report.fallbacks} == ({OWN[name]} if name in OWN else set())
    assert any(runs_here for _, runs_here in computed) == ("rope_type" not in VARIANTS[name] and name not in OWN)


def test_timesteps_of_tokens(pipe, as_on_a_gpu):
    """In image-to-video given frames have timestep 0, so each token has its own modulation."""
    given = {}
    handle = pipe.transformer.register_forward_pre_hook(lambda *call: given.update(call[2]), with_kwargs=True)
    made(pipe, steps=1)
    handle.remove()
    timestep = given["timestep"].reshape(-1, 1).expand(given["hidden_states"].shape[:2]).clone()
    timestep[:, :48] = 0
    given |= {"timestep": timestep, "audio_timestep": given["timestep"]}
    with torch.no_grad():
        plain = pipe.transformer(**given)
        accelerate_pipeline(pipe, "exact")
        fused = pipe.transformer(**given)
    assert all(distance(*both) < 1e-5 for both in zip(fused, plain, strict=True))
    assert not torch.equal(fused[0], plain[0])


def test_a_mask_between_video_tokens_is_left_to_the_processor(pipe, as_on_a_gpu, computed, monkeypatch):
    """In-context LoRAs weigh attention to their references."""
    without, forward, mask = made(pipe, steps=2), pipe.transformer.forward, torch.rand(1, 144, 144)

    def masked(*args, **call):
        return forward(*args, **call, video_self_attention_mask=mask.expand(len(call["hidden_states"]), -1, -1))

    monkeypatch.setattr(pipe.transformer, "forward", masked)
    plain = made(pipe, steps=2)
    assert distance(plain, without) > 1e-4
    assert distance(accelerated(pipe, "exact", steps=2)[0], plain) < 1e-5
    assert computed and not any(runs_here for _, runs_here in computed)


@pytest.mark.parametrize(
    ("part", "reasons"),
    [
        *(
            ("audio_norm2", {"its audio_norm2 carries hooks"}),
            ("audio_to_video_norm", {"its audio_to_video_norm carries hooks"}),
        ),
        *(
            (part, set())
            for part in ("attn1", "audio_attn2", "video_to_audio_attn", "attn1.norm_k", "ff", "audio_ff.net.0")
        ),
    ],
)
def test_parts_that_carry_hooks_are_called(part, reasons, pipe, as_on_a_gpu):
    """A norm's hook leaves the block to diffusers; a hook of the MLP, or in an attention, leaves that part to it."""
    plain, calls = made(pipe, steps=2), []
    pipe.transformer.transformer_blocks[1].get_submodule(part).register_forward_hook(lambda *_: calls.append(1))
    fused, report = accelerated(pipe, "exact", steps=2)
    assert distance(fused, plain) < 1e-5 and len(calls) == 2
    assert {each["reason"] for each in report.fallbacks} == reasons


@pytest.mark.parametrize("target", ["attn1.to_q", "audio_to_video_attn.to_k", "ff.net.0.proj", "audio_attn2.to_out.0"])
def test_lora_keeps_its_effect(target, pipe, as_on_a_gpu):
    peft = pytest.importorskip("peft")
    plain = made(pipe, steps=2)
    pipe.transformer.add_adapter(peft.LoraConfig(r=4, target_modules=[target], init_lora_weights=False))
    adapted = made(pipe, steps=2)
    assert distance(adapted, plain) > 1e-4
    assert distance(accelerated(pipe, "exact", steps=2)[0], adapted) < 1e-5


def test_layers_in_8_bits(pipe, as_on_a_gpu, monkeypatch):
    """Fused blocks run the same rounded layers as diffusers' own."""
    preset = load_preset("exact", linear={"dtype": "int8"})
    fused, report = accelerated(pipe, preset)
    monkeypatch.setattr(drive, "_hand_written", lambda family: None)
    expected, _ = accelerated(pipe, preset)
    assert report.fallbacks == [] and distance(expected, made(pipe)) > 0.01
    assert 0 < distance(fused, expected) < 0.01


SCHEDULE = {"control": "interval", "warmup": 2, "interval": 2, "cooldown": 1}


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_whole_features_are_forecast(given, pipe, as_on_a_gpu, monkeypatch):
    """Level layer gives what it gives where each part is remembered by itself."""
    preset = load_preset("exact", forecast={"level": "layer"}, schedule=SCHEDULE)
    result, report = accelerated(pipe, preset, steps=8, **given)
    assert report.fallbacks == [] and report.steps_by_mode["dispatch"] > 1
    monkeypatch.setattr(drive, "_hand_written", lambda family: None)
    assert 0 < distance(result, accelerated(pipe, preset, steps=8, **given)[0]) < 1e-5


def test_outputs_are_forecast(pipe, as_on_a_gpu, monkeypatch):
    preset = load_preset("exact", schedule=SCHEDULE)
    result, report = accelerated(pipe, preset, steps=8)
    assert report.steps_by_mode["dispatch"] > 1
    monkeypatch.setattr(drive, "_hand_written", lambda family: None)
    assert 0 < distance(result, accelerated(pipe, preset, steps=8)[0]) < 1e-5


def test_autocast_at_level_layer(pipe):
    """Outputs of parts have another dtype than the streams."""
    with torch.autocast("cpu", torch.bfloat16):
        result, report = accelerated(pipe, load_preset("exact", forecast={"level": "layer"}))
    assert result.isfinite().all() and report.fallbacks == []


def test_gradients_are_diffusers(pipe):
    """Kernels have none, so blocks run as before."""
    given, parameter = {}, pipe.transformer.transformer_blocks[0].attn1.to_q.weight
    handle = pipe.transformer.register_forward_pre_hook(lambda *call: given.update(call[2]), with_kwargs=True)
    made(pipe, steps=1)
    handle.remove()
    expected = torch.autograd.grad(pipe.transformer(**given)[0].sum(), parameter)
    accelerate_pipeline(pipe, "exact")
    assert torch.equal(torch.autograd.grad(pipe.transformer(**given)[0].sum(), parameter)[0], expected[0])
