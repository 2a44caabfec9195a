"""FLUX under FlashOmni's and TaylorSeer's rules the slow, obvious way: everything is computed, then overwritten.

An independent specification for the adapter: it knows nothing of symbols, plans, GEMM-Q or cached biases. Attention
outputs of reused rows are replaced by their forecast *before* the output projection, which by linearity must equal the
engine's bias stack; whole layers are replaced at the outputs of their modules.
"""

from __future__ import annotations

import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, _get_qkv_projections
from torch.nn import functional

from dit_accel.forecast import forecast_weights
from dit_accel.kernels import pooled_map, unpack_bits
from dit_accel.layout import TokenLayout
from dit_accel.policies import flashomni, sparge
from dit_accel.presets import Preset


class Schedule:
    """The fixed schedule, from the scheduler's own step index."""

    def __init__(self, pipe, preset: Preset, steps: int) -> None:
        self.pipe, self.preset, self.steps = pipe, preset, steps

    @property
    def step(self) -> int:
        return self.pipe.scheduler.step_index or 0

    @property
    def mode(self) -> str:
        schedule, step = self.preset.schedule, self.step
        if step < schedule.warmup or step >= self.steps - schedule.final_full:
            return "full"
        return "update" if (step - schedule.warmup) % schedule.interval == 0 else "dispatch"

    @property
    def records(self) -> bool:
        return self.mode == "update" or self.step < self.preset.schedule.warmup

    def weights(self, coordinates: list[int]) -> list[float]:
        return forecast_weights(self.preset.forecast.method, coordinates, self.step, self.preset.forecast.order)


class Remembered:
    """Values with the steps they were recorded at, newest first."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.records = schedule, []

    def record(self, value: torch.Tensor) -> None:
        self.records = [(self.schedule.step, value.clone()), *self.records][: self.schedule.preset.forecast.order + 1]

    def forecast(self) -> torch.Tensor:
        weights = self.schedule.weights([step for step, _ in self.records])
        return sum(weight * value for weight, (_, value) in zip(weights, self.records, strict=True))


class NaiveProcessor(FluxAttnProcessor):
    """Dense joint attention whose reused rows are overwritten with their forecast, and skipped tiles masked out."""

    def __init__(self, schedule: Schedule, text: int) -> None:
        super().__init__()
        self.schedule, self.text, self.history = schedule, text, Remembered(schedule)
        self.row_density = 1.0

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        q, k, v, *context = _get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        q, k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in (q, k, v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        if attn.added_kv_proj_dim is not None:
            cq, ck, cv = (x.unflatten(-1, (-1, attn.head_dim)) for x in context)
            q, k = torch.cat([attn.norm_added_q(cq), q], 1), torch.cat([attn.norm_added_k(ck), k], 1)
            v = torch.cat([cv, v], 1)
        q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        dispatch = self.schedule.mode == "dispatch"
        o = self._attention(q, k, v, self.tokens_kept if dispatch else None)
        if self.schedule.records:
            self.history.record(o)
        if self.schedule.mode == "update":
            self._choose(q, k)
        if dispatch:
            o = torch.where(self.rows_kept.unsqueeze(-1), o, self.history.forecast())
        o = o.flatten(2)
        if encoder_hidden_states is None:
            return o
        return attn.to_out[0](o[:, self.text :]), attn.to_add_out(o[:, : self.text])

    def _attention(self, q, k, v, kept):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=kept).transpose(1, 2)

    def _choose(self, q, k):
        preset, size = self.schedule.preset, self.schedule.preset.blocks.size
        layout = TokenLayout(self.text, q.shape[1] - self.text, size)
        probabilities = pooled_map(q, k, size, backend="reference").probabilities
        growth = (self.schedule.step / self.schedule.steps) ** preset.reuse.ramp
        row_bits = flashomni.row_bits(probabilities, layout, preset.reuse.tau_q * growth)
        rows = unpack_bits(row_bits, q.shape[2]).transpose(1, 2)
        tiles = unpack_bits(sparge.tile_bits(probabilities, layout, preset.skip.tau_kv * growth), layout.blocks)
        if preset.skip.policy == "none":
            tiles = torch.ones_like(tiles)
        self.row_density = rows.float().mean().item()

        def to_tokens(mask: torch.Tensor, dim: int) -> torch.Tensor:
            return mask.repeat_interleave(size, dim=dim).narrow(dim, 0, layout.tokens)

        self.rows_kept = to_tokens(rows, 2).transpose(1, 2)
        self.tokens_kept = to_tokens(to_tokens(tiles, 2), 3)


def run_heads(pipe, preset: Preset, inputs: dict, text: int):
    """The pipeline's result at scope head; returns it with the processors, for their densities."""
    schedule = Schedule(pipe, preset, inputs["num_inference_steps"])
    transformer = pipe.transformer
    before = transformer.attn_processors
    transformer.set_attn_processor({name: NaiveProcessor(schedule, text) for name in before})
    processors = list(transformer.attn_processors.values())
    handles = []
    if preset.reuse.degrade_below > 0:
        handles = _overwrite_layers(
            transformer, schedule, lambda block: block.attn.processor.row_density < preset.reuse.degrade_below
        )
    try:
        return pipe(**inputs)[0], processors
    finally:
        transformer.set_attn_processor(before)
        for handle in handles:
            handle.remove()


def run_layers(pipe, preset: Preset, inputs: dict):
    """The pipeline's result at scope layer."""
    schedule = Schedule(pipe, preset, inputs["num_inference_steps"])
    handles = _overwrite_layers(pipe.transformer, schedule, lambda block: True)
    try:
        return pipe(**inputs)[0]
    finally:
        for handle in handles:
            handle.remove()


def _overwrite_layers(transformer, schedule: Schedule, whole):
    """Hooks that record blocks' attention and MLP outputs, and overwrite them where a block is forecast whole."""

    def hook_for(block):
        parts: list[Remembered] = []

        def hook(module, args, output):
            outputs = output if isinstance(output, tuple) else (output,)
            if not parts:
                parts.extend(Remembered(schedule) for _ in outputs)
            if schedule.records:
                for part, value in zip(parts, outputs, strict=True):
                    part.record(value)
            if schedule.mode == "dispatch" and whole(block):
                outputs = tuple(part.forecast() for part in parts)
            return outputs if isinstance(output, tuple) else outputs[0]

        return hook

    doubles = [
        (block, module)
        for block in transformer.transformer_blocks
        for module in (block.attn, block.ff, block.ff_context)
    ]
    singles = [(block, block.proj_out) for block in transformer.single_transformer_blocks]
    return [module.register_forward_hook(hook_for(block)) for block, module in doubles + singles]
