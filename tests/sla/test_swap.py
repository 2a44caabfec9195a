"""SLA swapped into tiny pipelines: its outputs, complete removal, and complete saving."""

import warnings

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dit_accel import accelerate_pipeline, load_preset
from dit_accel.errors import UnsupportedError
from dit_accel.models.hooks import find_hook
from dit_accel.sla.swap import load_swapped, restore_attention, save_swapped, swap_attention, swapped_attention
from dit_accel.sparse import projections
from dit_accel.tools.measure.capture import AttentionTap
from tests.tiny import tiny_output, tiny_pipeline

FAMILIES = pytest.mark.parametrize("name", ["wan", "flux", "hunyuan"])
SETTINGS = {"critical": 0.3, "negligible": 0.2, "feature_map": "elu", "block": 64}


def paint(pipe, name):
    """Latents of two steps; several row-blocks of 64 tokens, the last of them ragged."""
    return tiny_output(pipe, name, steps=2, height=96, width=80)


def swapped(name, settings=SETTINGS):
    """A pipeline with SLA and projections that are not zero."""
    pipe, generator = tiny_pipeline(name), torch.Generator().manual_seed(0)
    for attention in swap_attention(pipe, **settings).values():
        attention.projection.weight.data.normal_(0, 0.2, generator=generator)
    return pipe


@FAMILIES
def test_a_swap_attends_with_sla_in_every_block(name):
    """The pipeline equals one with the same attention set by a tap, layouts and padding included."""
    pipe = swapped(name)
    attentions = swapped_attention(pipe)
    painted = paint(pipe, name)
    restore_attention(pipe)
    visited = set()

    def visit(site, q, k, v):
        visited.add(site.block)
        return attentions[site.block](q, k, v, layout=site.layout, kv_len=site.kv_len)

    with AttentionTap(pipe, visit, block=64), torch.no_grad():
        expected = paint(pipe, name)
    assert visited == attentions.keys() and torch.equal(painted, expected)
    assert (painted - paint(pipe, name)).abs().max() > 0.01


@FAMILIES
def test_restoring_leaves_nothing_behind(name):
    """The pipeline, its weights and its processors are as before, after one swap or two."""
    pipe = tiny_pipeline(name)
    plain, processors, weights = paint(pipe, name), pipe.transformer.attn_processors, pipe.transformer.state_dict()
    for settings in (SETTINGS, {}):
        swap_attention(pipe, **settings)
    added = pipe.transformer.state_dict().keys() - weights.keys()
    assert len(added) == len(swapped_attention(pipe)) > 0
    assert all(key.endswith("projection.weight") for key in added)
    restore_attention(pipe)
    restore_attention(pipe)
    assert pipe.transformer.attn_processors == processors
    assert pipe.transformer.state_dict().keys() == weights.keys()
    assert not pipe.transformer._forward_pre_hooks
    assert swapped_attention(pipe) == {} and torch.equal(paint(pipe, name), plain)


@FAMILIES
def test_what_is_saved_comes_back(name, tmp_path):
    """Another pipeline that loads the files gives the same output; the transformer's own file has no projection."""
    pipe = swapped(name)
    painted = paint(pipe, name)
    save_swapped(pipe, tmp_path)
    assert torch.equal(paint(pipe, name), painted)

    other = tiny_pipeline(name)  # text encoders and autoencoder are the same
    for weight in other.transformer.parameters():
        weight.data.zero_()
    loaded = load_swapped(other, tmp_path)
    found, wanted = ({name: at.settings for name, at in each.items()} for each in (loaded, swapped_attention(pipe)))
    assert found == wanted
    for key, weight in pipe.transformer.state_dict().items():
        assert torch.equal(other.transformer.state_dict()[key], weight), key
    torch.testing.assert_close(paint(other, name), painted)  # products may differ by where in memory weights lie
    assert load_file(tmp_path / "sla.safetensors").keys() == loaded.keys()
    assert not any("processor" in key for key in load_file(next(tmp_path.glob("transformer/*.safetensors"))))


def test_projections_of_other_blocks_are_not_loaded(tmp_path):
    """A folder is refused if its projections do not fit its transformer."""
    pipe = swapped("wan")
    save_swapped(pipe, tmp_path)
    file = tmp_path / "sla.safetensors"
    with safe_open(file, "pt") as held:
        metadata = held.metadata()
    save_file({"transformer.blocks.0": torch.zeros(32, 32)}, file, metadata=metadata)
    with pytest.raises(UnsupportedError, match=r"must hold blocks .*blocks\.1, got transformer\.blocks\.0$"):
        load_swapped(pipe, tmp_path)


@FAMILIES
def test_a_lora_is_saved_alone_and_comes_back(name, tmp_path):
    """The folder holds the projections and a LoRA, but no transformer; diffusers loads it, and so does a swap."""
    pipe = swapped(name)
    layers = [key for key, layer in pipe.transformer.named_modules() if key.endswith("to_q")]
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=layers, init_lora_weights=False))
    painted = paint(pipe, name)
    save_swapped(pipe, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"sla.safetensors", "pytorch_lora_weights.safetensors"}
    for load in (lambda other: other.load_lora_weights(tmp_path), lambda other: load_swapped(other, tmp_path)):
        other = tiny_pipeline(name)
        load(other)
        if swapped_attention(other):
            torch.testing.assert_close(paint(other, name), painted, rtol=1e-4, atol=1e-4)
        assert any("lora_A" in key for key in other.transformer.state_dict())


def test_one_lora_of_two_transformers_is_refused(tmp_path):
    pipe = swapped("wan22")
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(UnsupportedError, match=r"got default of transformer, and transformer, transformer_2$"):
        save_swapped(pipe, tmp_path)
    assert swapped_attention(pipe)


def test_training():
    """Blocks that are run again in the backward pass attend by SLA again, and autocast gives half precision."""
    pipe = swapped("wan")
    transformer = pipe.transformer.train()
    torch.manual_seed(0)
    call = {
        "hidden_states": torch.randn(1, 16, 3, 12, 10),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 7, transformer.config.text_dim),
        "return_dict": False,
    }

    def step():
        transformer.zero_grad()
        (velocity,) = transformer(**call)
        velocity.float().square().mean().backward()
        return velocity.detach(), [weight.grad.clone() for weight in transformer.parameters()]

    with torch.autocast("cpu", torch.bfloat16):
        half, gradients = step()
    assert all(gradient.isfinite().all() for gradient in gradients)
    velocity, plain = step()
    assert 0 < (half - velocity).norm() / velocity.norm() < 0.05
    transformer.enable_gradient_checkpointing()
    torch.testing.assert_close(step()[1], plain)
    assert all(item.projection.weight.grad.abs().max() > 0 for item in swapped_attention(pipe).values())


def test_only_plain_pipelines_are_swapped():
    """Accelerated ones are refused, and so are attentions that torch does not compute."""
    pipe = accelerate_pipeline(tiny_pipeline("wan"), "exact")
    with pytest.raises(UnsupportedError, match="plain pipeline for SLA, got an accelerated one: restore it first"):
        swap_attention(pipe)
    with pytest.raises(UnsupportedError, match="call swap_attention first"):
        save_swapped(tiny_pipeline("wan"), None)
    with pytest.raises(UnsupportedError, match="are not known"):
        swap_attention(tiny_pipeline("framepack"))

    pipe = swapped("wan")
    attn = pipe.transformer.blocks[1].attn1
    attn.processor.base = lambda attn, hidden_states, *_: hidden_states
    with pytest.raises(UnsupportedError, match="attends without calling torch's scaled_dot_product_attention"):
        paint(pipe, "wan")


MODELS = {"wan": "wan", "flux": "flux", "hunyuan": "hunyuan_video", "wan22": "wan", "sd35": "sd3"}


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_runs_what_was_trained(name, tmp_path):
    """With the saved projections a preset gives the swapped pipeline's output, and without them another one."""
    pipe = swapped(name)
    painted = paint(pipe, name)
    save_swapped(pipe, tmp_path)
    restore_attention(pipe)
    skip = {"policy": "sla", "steps": "all"} | {key: value for key, value in SETTINGS.items() if key != "block"}
    errors = []
    for projection in (str(tmp_path / "sla.safetensors"), None):
        sections = {"blocks": {"size": 64}, "skip": {**skip, "projection": projection}}
        accelerate_pipeline(pipe, "exact", model=MODELS[name], **sections)
        errors.append((paint(pipe, name) - painted).abs().max())
    assert errors[0] < 1e-4 < 0.1 < errors[1]


def test_a_preset_with_other_settings_than_the_training_is_noticed(tmp_path):
    """It runs, and the warning names the differences."""
    pipe = swapped("wan", {"critical": 0.3})
    save_swapped(pipe, tmp_path)
    restore_attention(pipe)
    file = {"skip.projection": str(tmp_path / "sla.safetensors")}
    with pytest.warns(UserWarning, match=r"trained with critical 0\.3 \(the preset: 0\.05\), and works best so"):
        accelerate_pipeline(pipe, "wan21-sla", **file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerate_pipeline(pipe, "wan21-sla", **file, **{"skip.critical": 0.3})


def test_a_projection_has_the_dtype_of_its_queries(tmp_path):
    """A pipeline that moves from half precision to float32 gets all digits of the file again."""
    name, matrix, file = "transformer.blocks.0", torch.randn(32, 32), tmp_path / "sla.safetensors"
    save_file({name: matrix}, file)
    skip = {"policy": "sla", "steps": "all", "projection": str(file)}
    preset = load_preset("exact", model="wan", blocks={"size": 64}, skip=skip)
    held = projections.Projections(preset, "transformer", (), {name: name}, (3, 32))
    for dtype in (torch.float16, torch.float32):
        assert torch.equal(held.of(name, torch.empty(0, dtype=dtype)).weight, matrix.to(dtype))


MATRIX = torch.zeros(32, 32)
WRONG = {  # matrices of a file by block, None = there is no file, and the error
    "missing": (None, r"sla\.safetensors is not: No such file"),
    "no matrices": ("nothing", r"sla\.safetensors is not: "),
    "too few": ((MATRIX,), r"for transformer\.blocks\.1 it holds none, and no block in addition"),
    "too many": ((MATRIX,) * 3, r"it holds \[32, 32\], and transformer\.blocks\.2 in addition"),
    "no square": ((MATRIX, MATRIX[:, 1:]), r"floating matrices \[D, D\], got torch.float32 \[32, 31\] for"),
    "too large": ((MATRIX, torch.zeros(64, 64)), r"matrix \[32, 32\] for each block .* it holds \[64, 64\]"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_projections_must_fit_the_blocks(content, message, tmp_path):
    """The pipeline stays as it was."""
    file, pipe = tmp_path / "sla.safetensors", tiny_pipeline("wan")
    if isinstance(content, str):
        file.write_text(content)
    elif content is not None:
        save_file({f"transformer.blocks.{block}": item.clone() for block, item in enumerate(content)}, file)
    skip = {"policy": "sla", "steps": "all", "projection": str(file)}
    with pytest.raises(UnsupportedError, match=message):
        accelerate_pipeline(pipe, "exact", model="wan", blocks={"size": 64}, skip=skip)
    assert find_hook(pipe.transformer) is None and not hasattr(pipe, "dit_accel")


def test_a_compiled_transformer_attends_with_sla():
    """Compiled after the swap it gives the same result; its attention layers run outside the graphs."""
    pipe = swapped("wan")
    expected = paint(pipe, "wan")
    torch._dynamo.reset()
    pipe.transformer.compile(backend="aot_eager")
    assert torch.equal(paint(pipe, "wan"), expected)
