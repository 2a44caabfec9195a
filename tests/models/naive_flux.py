"""FLUX under FlashOmni's and TaylorSeer's rules the slow, obvious way: everything is computed, then overwritten.

An independent specification for the adapter (its parts serve other families too): it knows nothing of symbols, plans,
GEMM-Q or cached biases. Attention outputs of reused rows are replaced by their forecast *before* the output projection,
which by linearity must equal the engine's bias stack; whole layers are replaced at the outputs of their modules, and
the whole stack at the transformer's.
"""

from __future__ import annotations

import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, _get_qkv_projections
from torch.nn import functional

from dit_accel.kernels import pooled_map, unpack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.loop.forecast import forecast_weights
from dit_accel.presets import Preset
from dit_accel.sparse.policies import flashomni, sparge


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
        if step < schedule.warmup or step >= self.steps - schedule.cooldown:
            return "full"
        return "update" if (step - schedule.warmup) % schedule.interval == 0 else "dispatch"

    @property
    def records(self) -> bool:
        return self.mode == "update" or self.step < self.preset.schedule.warmup

    @property
    def skips(self) -> bool:
        """Return True if a computed step skips tiles."""
        after_warmup = self.step >= self.preset.schedule.warmup
        return self.preset.skip.steps == "all" and after_warmup and self.mode != "dispatch"

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


class NaiveAttention:
    """Dense joint attention whose reused rows are overwritten with their forecast, and skipped tiles masked out."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule, self.history = schedule, Remembered(schedule)
        self.at_head = schedule.preset.forecast.level == "head"
        self.vision_density = 1.0  # share of the scores of rows without text that compute
        self.kept: list[float] = []  # share of the tiles, call by call

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        mode, skips = self.schedule.mode, self.schedule.skips
        forecasts = self.at_head and mode == "dispatch"
        if skips or (self.at_head and mode == "update"):
            self._choose(q, k, layout)
        sparse = skips or forecasts
        o = self._attention(q, k, v, self.tokens_kept if sparse else None)
        self.kept.append(self.tile_density if sparse else 1.0)
        if self.at_head and self.schedule.records:
            self.history.record(o)
        return torch.where(self.rows_kept.unsqueeze(-1), o, self.history.forecast()) if forecasts else o

    def _attention(self, q, k, v, kept):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=kept).transpose(1, 2)

    def _choose(self, q, k, layout):
        preset, size = self.schedule.preset, self.schedule.preset.blocks.size
        probabilities = pooled_map(q, k, size, backend="reference").probabilities
        growth = (self.schedule.step / self.schedule.steps) ** preset.reuse.ramp
        row_bits = flashomni.row_bits(probabilities, layout, preset.reuse.tau_q * growth)
        rows = unpack_bits(row_bits, q.shape[2]).transpose(1, 2)
        tau_kv = 0.0 if preset.skip.policy == "none" else preset.skip.tau_kv * (growth if self.at_head else 1)
        tiles = unpack_bits(sparge.tile_bits(probabilities, layout, tau_kv), layout.blocks)
        if preset.skip.policy == "none":
            tiles = torch.ones_like(tiles)
        computed = (rows[..., None] & tiles)[:, :, layout.vision_blocks]
        self.vision_density, self.tile_density = computed.float().mean().item(), tiles.float().mean().item()

        def to_tokens(mask: torch.Tensor, dim: int) -> torch.Tensor:
            return mask.repeat_interleave(size, dim=dim).narrow(dim, 0, layout.tokens)

        self.rows_kept = to_tokens(rows, 2).transpose(1, 2)
        self.tokens_kept = to_tokens(to_tokens(tiles, 2), 3)


class NaiveProcessor(NaiveAttention, FluxAttnProcessor):
    def __init__(self, schedule: Schedule, text: int) -> None:
        super().__init__(schedule)
        self.text = text

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        q, k, v, *context = _get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        q, k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in (q, k, v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        if attn.added_kv_proj_dim is not None:
            cq, ck, cv = (x.unflatten(-1, (-1, attn.head_dim)) for x in context)
            q, k = torch.cat([attn.norm_added_q(cq), q], 1), torch.cat([attn.norm_added_k(ck), k], 1)
            v = torch.cat([cv, v], 1)
        q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        layout = TokenLayout(self.text, q.shape[1] - self.text, self.schedule.preset.blocks.size)
        o = self.attend(q, k, v, layout).flatten(2)
        if encoder_hidden_states is None:
            return o
        return attn.to_out[0](o[:, self.text :]), attn.to_add_out(o[:, : self.text])


def run_sites(pipe, preset: Preset, inputs: dict, make_processor):
    """The pipeline's result with naive attention in every block; returns it with the processors, for their densities.

    A text refiner's attention is left alone.
    """
    schedule = Schedule(pipe, preset, inputs["num_inference_steps"])
    transformer = pipe.transformer
    before = transformer.attn_processors
    naive = {name: make_processor(schedule) for name in before if "refiner" not in name}
    transformer.set_attn_processor({**before, **naive})
    if preset.forecast.level == "head":
        handles = _overwrite(
            _layers(transformer),
            schedule,
            lambda block: block.attn.processor.vision_density < preset.reuse.degrade_below,
        )
    else:
        layers = [(None, transformer)] if preset.forecast.level == "output" else _layers(transformer)
        handles = _overwrite(layers, schedule, lambda block: True)
    try:
        return pipe(**inputs)[0], list(naive.values())
    finally:
        transformer.set_attn_processor(before)
        for handle in handles:
            handle.remove()


def run_heads(pipe, preset: Preset, inputs: dict, text: int):
    """FLUX's result and processors, for ``text`` tokens of text."""
    return run_sites(pipe, preset, inputs, lambda schedule: NaiveProcessor(schedule, text))


def run_layers(pipe, preset: Preset, inputs: dict):
    """The pipeline's result at level layer."""
    schedule = Schedule(pipe, preset, inputs["num_inference_steps"])
    handles = _overwrite(_layers(pipe.transformer), schedule, lambda block: True)
    try:
        return pipe(**inputs)[0]
    finally:
        for handle in handles:
            handle.remove()


def _layers(transformer) -> list[tuple]:
    """Modules whose outputs are whole features, each with its block."""
    doubles = [
        (block, module)
        for block in transformer.transformer_blocks
        for module in (block.attn, block.ff, block.ff_context)
    ]
    return doubles + [(block, block.proj_out) for block in transformer.single_transformer_blocks]


def _overwrite(layers: list[tuple], schedule: Schedule, whole):
    """Hooks that record the modules' outputs, and overwrite them where ``whole(block)`` is forecast."""

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

    return [module.register_forward_hook(hook_for(block)) for block, module in layers]
