"""Wan under FlashOmni's and TaylorSeer's rules the slow, obvious way: everything is computed, then overwritten.

An independent specification for the adapter without symbols, plans, GEMM-Q or cached biases. Forecasts replace
attention outputs of reused rows before the output projection, cross-attention's output at tokens that no head computes
after it, whole layers at the outputs of their modules, and the whole stack at the transformer's output. Records are
kept by transformer and by branch, which is identified by the transformer's prompt.
"""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, _get_qkv_projections
from torch.nn import functional

from dit_accel.kernels import pooled_map, unpack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.presets import Preset
from dit_accel.sparse.policies import flashomni, sparge
from tests.models.naive_flux import Remembered, Schedule


class BranchSchedule(Schedule):
    """The fixed schedule as the branch of the call in progress sees it: the first it could forecast, it computes."""

    def __init__(self, pipe, preset: Preset, steps: int) -> None:
        super().__init__(pipe, preset, steps)
        self.branch: object = None
        self._recorded: set[object] = set()

    def hooks(self, name: str, transformer) -> list:
        def enter(module, args, kwargs):
            self.branch = name, kwargs["encoder_hidden_states"].data_ptr()

        def leave(module, args, kwargs, output):
            if self.mode == "update" or (self.records and self.preset.forecast.level != "head"):
                self._recorded.add(self.branch)

        return [
            transformer.register_forward_pre_hook(enter, with_kwargs=True),
            transformer.register_forward_hook(leave, with_kwargs=True),
        ]

    @property
    def mode(self) -> str:
        mode = super().mode
        return "update" if mode == "dispatch" and self.branch not in self._recorded else mode

    @property
    def skips(self) -> bool:
        """Return True if the call computes but still skips tiles."""
        after_warmup = self.step >= self.preset.schedule.warmup
        return self.preset.skip.steps == "all" and after_warmup and self.mode != "dispatch"


class ByBranch(dict):
    """A value for each branch, made when it is first asked for."""

    def __init__(self, schedule: BranchSchedule, make) -> None:
        self.schedule, self.make = schedule, make

    @property
    def now(self):
        return self.setdefault(self.schedule.branch, self.make())


class Rows:
    """Computed parts of one block: ``[B, S, H]`` tokens of heads, and ``[B, H, S, S]`` attended pairs."""

    def __init__(self) -> None:
        self.kept = self.pairs = None


class NaiveSelfAttention(WanAttnProcessor):
    """Dense attention whose reused rows are overwritten with their forecast, and skipped tiles masked out."""

    def __init__(self, schedule: BranchSchedule) -> None:
        super().__init__()
        self.schedule = schedule
        self.history = ByBranch(schedule, lambda: Remembered(schedule))
        self.rows = ByBranch(schedule, Rows)

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        q, k, v = _get_qkv_projections(attn, hidden_states, None)
        q, k, v = (x.unflatten(-1, (attn.heads, -1)) for x in (attn.norm_q(q), attn.norm_k(k), v))
        q, k = (_rotate(x, *rotary_emb) for x in (q, k))
        dispatch, rows = self.schedule.mode == "dispatch", self.rows.now
        if not dispatch:
            self.choose(rows, q, k)
        o = _attention(q, k, v, rows.pairs if dispatch or self.schedule.skips else None)
        if self.schedule.records:
            self.history.now.record(o)
        if dispatch:
            o = torch.where(rows.kept.unsqueeze(-1), o, self.history.now.forecast())
        return attn.to_out[0](o.flatten(2))

    def choose(self, rows: Rows, q: torch.Tensor, k: torch.Tensor) -> None:
        preset, size = self.schedule.preset, self.schedule.preset.blocks.size
        layout = TokenLayout(0, q.shape[1], size)
        probabilities = pooled_map(q, k, size, backend="reference").probabilities
        growth = (self.schedule.step / self.schedule.steps) ** preset.reuse.ramp
        tau_kv = getattr(preset.skip, "tau_kv", 0.0) * (growth if preset.forecast.level == "head" else 1)
        kept = unpack_bits(flashomni.row_bits(probabilities, layout, preset.reuse.tau_q * growth), q.shape[2])
        tiles = unpack_bits(sparge.tile_bits(probabilities, layout, tau_kv), layout.blocks)
        if preset.skip.policy == "none":
            tiles = torch.ones_like(tiles)

        def to_tokens(mask: torch.Tensor, dim: int) -> torch.Tensor:
            return mask.repeat_interleave(size, dim=dim).narrow(dim, 0, layout.tokens)

        rows.kept = to_tokens(kept, 1)
        rows.pairs = to_tokens(to_tokens(tiles, 2), 3)


class NaiveCrossAttention(WanAttnProcessor):
    """diffusers' own, overwritten with its forecast at tokens where no head of the block's self-attention computes."""

    def __init__(self, schedule: BranchSchedule, rows: ByBranch) -> None:
        super().__init__()
        self.schedule, self.rows = schedule, rows
        self.history = ByBranch(schedule, lambda: Remembered(schedule))

    def __call__(self, *args, **kwargs):
        out = super().__call__(*args, **kwargs)
        if self.schedule.records:
            self.history.now.record(out)
        if self.schedule.mode == "dispatch":
            out = torch.where(self.rows.now.kept.any(-1, keepdim=True), out, self.history.now.forecast())
        return out


def run(pipe, preset: Preset, inputs: dict) -> torch.Tensor:
    """The pipeline's result under a preset with a fixed schedule, at any level."""
    schedule = BranchSchedule(pipe, preset, inputs["num_inference_steps"])
    level, degrades = preset.forecast.level, preset.reuse.degrade_below > 0
    handles, before = [], []
    for name in ("transformer", "transformer_2"):
        transformer = getattr(pipe, name, None)
        if transformer is None:
            continue
        for block in transformer.blocks:
            before.append((block, block.attn1.processor, block.attn2.processor))
            block.attn1.set_processor(NaiveSelfAttention(schedule))
            if level == "head":
                block.attn2.set_processor(NaiveCrossAttention(schedule, block.attn1.processor.rows))
            whole = _is_degraded(block, schedule) if degrades else lambda: True
            if level == "layer" or degrades:
                handles += [_overwrite(part, schedule, whole) for part in (block.attn1, block.attn2, block.ffn)]
        if level == "output":
            handles.append(_overwrite(transformer, schedule, lambda: True))
        handles += schedule.hooks(name, transformer)
    try:
        return pipe(**inputs)[0]
    finally:
        for block, attention, cross_attention in before:
            block.attn1.set_processor(attention)
            block.attn2.set_processor(cross_attention)
        for handle in handles:
            handle.remove()


def _is_degraded(block, schedule: BranchSchedule):
    rows, size = block.attn1.processor.rows, schedule.preset.blocks.size

    def computed() -> torch.Tensor:
        kept = rows.now.kept[:, ::size].transpose(1, 2)  # [B, H, T]
        return (kept[..., None] & rows.now.pairs[:, :, ::size, ::size]).float().mean()

    return lambda: computed() < schedule.preset.reuse.degrade_below


def _overwrite(module, schedule: BranchSchedule, whole):
    """A hook that records the module's output, and overwrites it where it is forecast whole."""
    history = ByBranch(schedule, lambda: Remembered(schedule))

    def hook(module, args, output):
        value = output[0] if isinstance(output, tuple) else output
        if schedule.records:
            history.now.record(value)
        if schedule.mode == "dispatch" and whole():
            value = history.now.forecast()
        return (value,) if isinstance(output, tuple) else value

    return module.register_forward_hook(hook)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: torch.Tensor | None) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=pairs).transpose(1, 2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbouring features as complex numbers, turned."""
    turn = torch.complex(cos[..., ::2], sin[..., 1::2])
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)
