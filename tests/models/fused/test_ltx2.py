"""LTX-2's blocks: both streams, kinds of guidance, released variants, prompts of a batch, and masks."""

from functools import partial

import pytest
import torch

from dit_accel import accelerate_pipeline
from dit_accel.models.fused import ltx2
from tests.models.fused import test_videos_with_sound as shared
from tests.models.fused.test_flux_relatives import distance
from tests.models.tiny.parts import TOKENS, WIDTH, text

made, accelerated = partial(shared.made, "ltx2"), partial(shared.accelerated, "ltx2")
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
    return shared.pipeline("ltx2")


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
    assert report.fallbacks == [] and distance(fused, plain) < 1e-5
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


def test_timesteps_of_tokens(pipe, as_on_a_gpu, by_hand):
    """In image-to-video given frames have timestep 0, so each token has its own modulation."""
    given = shared.call_of("ltx2", pipe)
    timestep = given["timestep"].reshape(-1, 1).expand(given["hidden_states"].shape[:2]).clone()
    timestep[:, :48] = 0
    given |= {"timestep": timestep, "audio_timestep": given["timestep"]}
    with torch.no_grad():
        plain = pipe.transformer(**given)
        accelerate_pipeline(pipe, "exact")
        fused = pipe.transformer(**given)
    assert all(distance(*both) < 1e-5 for both in zip(fused, plain, strict=True)) and by_hand


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


@pytest.mark.parametrize("given", [given for given in CASES.values() if given], ids=[*CASES][1:])
def test_whole_features_are_forecast(given, pipe, as_on_a_gpu, by_hand, monkeypatch):
    shared.forecasts_equal(by_hand, monkeypatch, "ltx2", pipe, "layer", **given)
