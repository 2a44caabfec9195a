"""VSA: attention inside and between cubes; and checkpoints that were trained with VSA or SLA, found by their keys."""

import math

import pytest
import torch
from safetensors.torch import save_file

from dit_accel import accelerate_pipeline, accelerated, load_preset
from dit_accel.cli.options import RunOptions, with_projections
from dit_accel.errors import PresetError, UnsupportedError
from dit_accel.sla.checkpoints import checkpoint_preset, trained_preset
from dit_accel.tools.measure.capture import AttentionTap
from tests.tiny import tiny_output, tiny_pipeline

SIZE = {"steps": 2, "height": 64, "width": 48, "num_frames": 13}  # 7 × 8 × 6 tokens, in whole and smaller cubes
HEAD_DIM, WIDTH, BLOCKS = 32, 96, 2  # of the tiny Wan


def cubes_of(grid):
    """The cube of each token, in raster order."""
    frame, row, column = (places.flatten() // 4 for places in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
    return torch.stack([frame, row, column], 1).unique(dim=0, return_inverse=True)[1]


def attended(q, k, v, scores, share, cube):
    """Attention of tokens [S, H, D] in the ``share`` of tiles with the highest scores [H, T, T]."""
    count = math.ceil(round(share * scores.shape[-1], 6))
    kept = torch.zeros_like(scores).scatter_(2, scores.topk(count).indices, 1.0).bool()[:, cube][:, :, cube]
    tokens = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hij,jhd->ihd", tokens.masked_fill(~kept, -torch.inf).softmax(-1), v)


def vsa(q, k, v, gate, grid, share):
    """VSA by its definition, for one sample; q, k, v and gate are float64 [S, H, D]."""
    cube = cubes_of(grid)
    members = torch.nn.functional.one_hot(cube).double()  # [S, T]
    means = [torch.einsum("st,shd->htd", members / members.sum(0), x) for x in (q, k, v)]
    scores = means[0] @ means[1].transpose(1, 2) / q.shape[-1] ** 0.5  # [H, T, T]
    coarse = torch.einsum("hij,hjd->ihd", scores.softmax(-1), means[2])[cube]
    return attended(q, k, v, scores, share, cube) + gate * coarse


def turbowan(q, k, v, weight, bias, critical):
    """SLA as TurboWan has it: blocks of 64 tokens attend, and linear attention runs over all tokens."""
    means = [torch.stack([block.mean(0) for block in x.split(64)], 1) for x in (q, k)]  # [H, T, D]
    inside = attended(q, k, v, means[0] @ means[1].transpose(1, 2), critical, torch.arange(len(q)) // 64)
    weights = torch.einsum("ihd,jhd->hij", q.softmax(-1), k.softmax(-1))
    linear = torch.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdim=True), v)
    return inside + linear @ weight.T + bias


def checkpoint(folder, key, side):
    """Save learned weights and biases of both blocks, in a file each, among other keys; return them in float64."""
    generator, learned = torch.Generator().manual_seed(0), []
    (folder / "transformer").mkdir()
    for block in range(BLOCKS):
        weight, bias = (0.3 * torch.randn(*shape, generator=generator) for shape in ((side, side), (side,)))
        learned.append((weight.double(), bias.double()))
        prefix, other = key.format(block), {f"blocks.{block}.attn1.to_q.weight": torch.zeros(2)}
        file = folder / f"transformer/diffusion_pytorch_model-0000{block + 1}-of-00002.safetensors"
        save_file({f"{prefix}.weight": weight, f"{prefix}.bias": bias, **other}, file)
    return learned


def expected(pipe, attend):
    """The output with ``attend(block index, features, q, k, v)`` in place of each self-attention."""
    features = {}
    hooks = [
        block.attn1.register_forward_pre_hook(lambda _, args, i=index: features.update({i: args[0]}))
        for index, block in enumerate(pipe.transformer.blocks)
    ]

    def visit(site, q, k, v):
        index = int(site.block.rpartition(".")[2])
        samples = zip(*(x.double() for x in (features[index], q, k, v)), strict=True)
        return torch.stack([attend(index, *sample) for sample in samples]).to(q)

    with AttentionTap(pipe, visit, block=64), torch.no_grad():
        painted = tiny_output(pipe, "wan", **SIZE)
    for hook in hooks:
        hook.remove()
    return painted


@pytest.mark.parametrize("by_caught_attention", [False, True], ids=["block", "caught"])
def test_a_fastwan_runs_as_it_was_trained(tmp_path, by_caught_attention):
    """The preset that the keys name gives VSA's definition, in hand-written blocks and where attention is caught."""
    gates = checkpoint(tmp_path, "blocks.{}.to_gate_compress", WIDTH)
    pipe = tiny_pipeline("wan")
    if by_caught_attention:
        pipe.transformer.set_attn_processor(type("Other", (type(pipe.transformer.blocks[0].attn1.processor),), {})())
    plain = tiny_output(pipe, "wan", **SIZE)

    def attend(index, x, q, k, v):
        weight, bias = gates[index]
        return vsa(q, k, v, (x @ weight.T + bias).view_as(q), (7, 8, 6), 0.3)

    painted, preset = expected(pipe, attend), trained_preset(tmp_path, **{"skip.sparsity": 0.7})
    assert preset.name == "wan21-fastwan"
    with accelerated(pipe, preset):
        torch.testing.assert_close(tiny_output(pipe, "wan", **SIZE), painted, rtol=1e-4, atol=1e-4)
        assert pipe.dit_accel.report().left_out > 0.3
    assert (painted - plain).norm() > 0.1 * plain.norm()


@pytest.mark.parametrize(
    "key", ["blocks.{}.attn1.attn_impl.proj_l", "net.blocks.{}.self_attn.attn_op.local_attn.proj_l"]
)
def test_a_turbowan_runs_as_it_was_trained(tmp_path, key):
    """Linear attention over all tiles and its bias are added, by either name of the projections."""
    learned, pipe = checkpoint(tmp_path, key, HEAD_DIM), tiny_pipeline("wan")
    painted = expected(pipe, lambda index, _, q, k, v: turbowan(q, k, v, *learned[index], 0.5))
    with accelerated(pipe, trained_preset(tmp_path, **{"skip.critical": 0.5})):
        torch.testing.assert_close(tiny_output(pipe, "wan", **SIZE), painted, rtol=1e-4, atol=1e-4)


def test_weights_and_models_that_do_not_fit_are_refused(tmp_path):
    """Gates under SLA, weights without either, cubes with text in attention: an error, and the pipeline stays plain."""
    checkpoint(tmp_path, "blocks.{}.to_gate_compress", WIDTH)
    with pytest.raises(UnsupportedError, match=rf"matrix \[32, 32\] .* it holds \[{WIDTH}, {WIDTH}\]"):
        accelerate_pipeline(tiny_pipeline("wan"), "wan21-turbowan", **{"skip.projection": str(tmp_path)})
    with pytest.raises(UnsupportedError, match=r"needs a video's tokens alone in attention.*HunyuanVideo"):
        accelerate_pipeline(tiny_pipeline("hunyuan"), load_preset("wan21-fastwan", model="any"))
    with pytest.raises(PresetError, match="'vsa' has masks inside of tiles"):
        load_preset("wan21-fastwan", **{"kernels.qk_dtype": "int8"})
    with pytest.raises(PresetError, match="cuts cubes of 64 tokens below level head"):
        load_preset("wan21-fastwan", **{"blocks.size": 128})
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({"blocks.0.attn1.to_q.weight": torch.zeros(2)}, plain / "model.safetensors")
    with pytest.raises(UnsupportedError, match="must hold keys proj_l"):
        trained_preset(plain)


def test_the_command_line_takes_a_checkpoint_by_its_keys(tmp_path):
    """The model's folder chooses the preset and its projections; another preset, or a file of one's own, goes first."""
    checkpoint(tmp_path, "blocks.{}.to_gate_compress", WIDTH)
    folder = str(tmp_path)
    name, overrides, _ = RunOptions(model=folder).preset_and_loading()
    assert (name, overrides) == ("wan21-fastwan", {"skip.projection": folder})
    assert with_projections("wan21-turbowan", {}, [folder]) == with_projections("none", {}, [folder]) == {}
    own = {"skip.projection": "mine.safetensors"}
    assert with_projections("wan21-fastwan", own, [folder]) == own
    (tmp_path / "original.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert checkpoint_preset(folder) is None
