"""Models under FlashOmni's and TaylorSeer's rules the slow, obvious way: everything is computed, then overwritten.

An independent specification: it knows nothing of symbols, plans, GEMM-Q or cached biases. Attention outputs of reused
rows are replaced by their forecast *before* the output projection, which by linearity must equal the engine's cached
bias. Skipped tiles are masked. Whole features are replaced at the outputs of their modules, or of the transformer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from dit_accel.kernels import pooled_map, unpack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.plans.selection import select_tiles
from dit_accel.loop.forecast import forecast_weights
from dit_accel.models import denoisers
from dit_accel.models.families import require_family
from dit_accel.presets import Preset
from dit_accel.sparse.policies import flashomni

PARTS = {  # whose outputs hand-written blocks forecast at level layer; other families have them in their facts
    "flux": ("attn", "ff", "ff_context", "proj_out"),
    "hunyuan_video": ("attn", "ff", "ff_context", "proj_out"),
    "wan": ("attn1", "attn2", "ffn"),
    "qwen_image": ("attn", "img_mlp", "txt_mlp"),
    "flux2": ("attn", "ff", "ff_context"),
}


class Sequence(NamedTuple):
    """Sequence of a model's attention."""

    attentions: str  # names of the attention modules, a regular expression
    vision: int  # image or video tokens; the rest is text
    text_first: bool = True  # text comes before them
    pads_end: bool = False  # padding follows all tokens, and not the text
    cuts: bool = False  # the padding of one prompt is taken out
    gate: str = ""  # name of the layer in an attention whose sigmoid multiplies the attention's output
    crossed: str = ""  # a block's attention to its prompt, which is forecast where no head of the attention computes

    def modules(self, transformer: torch.nn.Module) -> dict[str, torch.nn.Module]:
        return {name: item for name, item in transformer.named_modules() if re.fullmatch(self.attentions, name)}


class Schedule:
    """The fixed schedule, from the scheduler's own step index, as the branch of the call in progress sees it.

    Calls of a transformer in one step are branches, in order. The first step that a branch could forecast, it computes.
    """

    def __init__(self, pipe: Any, preset: Preset, steps: int) -> None:
        self.pipe, self.preset, self.steps = pipe, preset, steps
        self.mode, self.branch = "full", None
        self._calls: Counter = Counter()
        self._recorded: set = set()

    @property
    def step(self) -> int:
        return self.pipe.scheduler.step_index or 0

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

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the calls of the pipeline's transformers."""
        with ExitStack() as undo:
            for transformer in denoisers(self.pipe).values():
                undo.callback(transformer.register_forward_pre_hook(self._begin).remove)
            yield

    def _begin(self, transformer: torch.nn.Module, _: Any) -> None:
        schedule, call = self.preset.schedule, (id(transformer), self.step)
        self.branch = id(transformer), self._calls[call]
        self._calls[call] += 1
        if self.step < schedule.warmup or self.step >= self.steps - schedule.cooldown:
            self.mode = "full"
        else:
            is_due = (self.step - schedule.warmup) % schedule.interval == 0
            self.mode = "update" if is_due or self.branch not in self._recorded else "dispatch"
        if self.mode == "update" or (self.records and self.preset.forecast.level != "head"):
            self._recorded.add(self.branch)


class Remembered:
    """Values with the steps they were recorded at, newest first, of each branch."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._records: dict[Any, list[tuple[int, torch.Tensor]]] = defaultdict(list)

    def record(self, value: torch.Tensor) -> None:
        schedule, records = self._schedule, self._records[self._schedule.branch]
        records.insert(0, (schedule.step, value.clone()))
        del records[schedule.preset.forecast.order + 1 :]

    def forecast(self) -> torch.Tensor:
        records = self._records[self._schedule.branch]
        weights = self._schedule.weights([step for step, _ in records])
        return sum(weight * value for weight, (_, value) in zip(weights, records, strict=True))


class Chosen(NamedTuple):
    """Tokens of heads that compute, ``[B, S, H]``, pairs that attend, ``[B, H, S, S]``, and their shares in blocks."""

    rows: torch.Tensor | None
    pairs: torch.Tensor
    tiles: float
    density: float = 1.0  # of the scores of rows without text


class Site:
    """One attention: what each branch has chosen and recorded."""

    def __init__(self, schedule: Schedule) -> None:
        self.history = Remembered(schedule)
        self.chosen: dict[Any, Chosen] = {}  # by branch
        self.gate: Any = 1.0


class NaiveAttention:
    """Dense attention with masks for skipped tiles, whose reused rows are overwritten with their forecast."""

    def __init__(self, schedule: Schedule, sequence: Sequence) -> None:
        self.schedule, self.sequence = schedule, sequence
        self.kept: list[float] = []  # share of the tiles that each call with skipped tiles computes
        self.sites: dict[torch.nn.Module, Site] = {}
        self._at_head = schedule.preset.forecast.level == "head"
        self._running: list[Site] = []
        self._attend = functional.scaled_dot_product_attention

    @contextmanager
    def within(self, transformer: torch.nn.Module) -> Iterator[list[float]]:
        """Replace attention in the model's modules."""

        def keep_gate(site: Site, heads: int) -> Callable:
            return lambda *call: setattr(site, "gate", call[-1].sigmoid().unflatten(2, (heads, -1)))

        with ExitStack() as undo:
            for module in self.sequence.modules(transformer).values():
                site = self.sites[module] = Site(self.schedule)
                enter, leave = (lambda *_, site=site: self._running.append(site)), (lambda *_: self._running.clear())
                undo.callback(module.register_forward_pre_hook(enter).remove)
                undo.callback(module.register_forward_hook(leave).remove)
                if self.sequence.gate:
                    gate = module.get_submodule(self.sequence.gate)
                    undo.callback(gate.register_forward_hook(keep_gate(site, module.num_heads)).remove)
            functional.scaled_dot_product_attention = self
            undo.callback(setattr, functional, "scaled_dot_product_attention", self._attend)
            yield self.kept

    def __call__(self, query, key, value, attn_mask=None, **settings):
        """Inputs ``[B, H, S, D]``."""
        vision, missing = self.sequence.vision, key.shape[2] - query.shape[2]  # missing: queries of text
        is_own = (query.shape[2] == vision or not missing) and key.shape[2] >= vision
        if not (self._running and is_own and (self.schedule.skips or self._at_head)):
            return self._attend(query, key, value, attn_mask=attn_mask, **settings)
        if missing and attn_mask is None:
            attn_mask = torch.ones(len(key), 1, 1, key.shape[2], dtype=torch.bool)
        places, text_first, kv_len = self._arrangement(key, attn_mask)
        query = functional.pad(query, (0, 0, missing, 0))
        q, k, v = (x.take_along_dim(places[:, None, :, None], 2).transpose(1, 2) for x in (query, key, value))
        layout = TokenLayout(q.shape[1] - vision, vision, self.schedule.preset.blocks.size, text_first=text_first)
        o = self._overwritten(self._running[-1], q, k, v, layout, kv_len).transpose(1, 2)
        return torch.zeros_like(query).scatter(2, places[:, None, :, None].expand_as(o), o)[:, :, missing:]

    def _arrangement(self, key, attn_mask) -> tuple[torch.Tensor, bool, torch.Tensor | None]:
        """Places of tokens when those that count come first, as kernels want them; text_first, and kv_len."""
        tokens, (_, vision, text_first, pads_end, cuts, *_) = key.shape[2], self.sequence
        places = torch.arange(tokens).expand(len(key), -1)
        if attn_mask is None:
            return places, text_first, None
        valid = attn_mask[:, 0, -1 if text_first and not pads_end else 0]
        if cuts:
            return valid.nonzero()[None, :, 1], text_first, None
        if text_first and not pads_end:  # the image, text that counts, and padding
            text_first, kinds = False, torch.where(places >= tokens - vision, 0, torch.where(valid, 1, 2))
            places = kinds.argsort(dim=1, stable=True)
        return places, text_first, valid.sum(1).to(torch.int32)

    def _overwritten(self, site: Site, q, k, v, layout: TokenLayout, kv_len):
        schedule = self.schedule
        forecasts = self._at_head and schedule.mode == "dispatch"
        if schedule.skips or (self._at_head and schedule.mode == "update"):
            site.chosen[schedule.branch] = self._choose(q, k, layout, kv_len)
        mask = None if kv_len is None else (torch.arange(layout.tokens) < kv_len[:, None])[:, None, None]
        if schedule.skips or forecasts:
            chosen = site.chosen[schedule.branch]
            self.kept.append(chosen.tiles)
            mask = chosen.pairs if mask is None else chosen.pairs & mask
        o = self._attend(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(1, 2) * site.gate
        if self._at_head and schedule.records:
            site.history.record(o)
        if forecasts:
            o = torch.where(chosen.rows.unsqueeze(-1), o, site.history.forecast())
        return o / site.gate

    def _choose(self, q, k, layout: TokenLayout, kv_len) -> Chosen:
        def to_tokens(mask: torch.Tensor, dim: int) -> torch.Tensor:
            return mask.repeat_interleave(layout.block, dim=dim).narrow(dim, 0, layout.tokens)

        tiles = self.tiles(q, k, layout, kv_len)
        pairs, share = to_tokens(to_tokens(tiles, 2), 3), tiles.float().mean().item()
        if not self._at_head:
            return Chosen(None, pairs, share)
        probabilities = pooled_map(q, k, layout.block, kv_len=kv_len, backend="reference").probabilities
        row_bits = flashomni.row_bits(probabilities, layout, self.schedule.preset.reuse.tau_q * self._growth())
        rows = unpack_bits(row_bits, q.shape[2])  # [B, T, H]
        computed = (rows.transpose(1, 2)[..., None] & tiles)[:, :, layout.vision_blocks]
        return Chosen(to_tokens(rows, 1), pairs, share, computed.float().mean().item())

    def tiles(self, q, k, layout: TokenLayout, kv_len) -> torch.Tensor:
        """Tiles ``[B, H, T, T]`` that are kept of q and k ``[B, S, H, D]``."""
        skip = self.schedule.preset.skip
        if skip.policy == "none":
            return torch.ones(len(q), q.shape[2], layout.blocks, layout.blocks, dtype=torch.bool)
        probabilities = pooled_map(q, k, layout.block, kv_len=kv_len, backend="reference").probabilities
        bits = select_tiles(probabilities, skip.tau_kv * self._growth(), always=layout.text_blocks)
        return unpack_bits(bits, layout.blocks)

    def _growth(self) -> float:
        """Growth of the thresholds over a run of level head."""
        schedule = self.schedule
        return (schedule.step / schedule.steps) ** schedule.preset.reuse.ramp if self._at_head else 1.0


@contextmanager
def overwritten(
    modules: Iterable[torch.nn.Module],
    schedule: Schedule,
    whole: Callable[[], bool] = lambda: True,
    rows: Callable[[], torch.Tensor | None] = lambda: None,
) -> Iterator[None]:
    """Record the outputs of modules, and overwrite them with their forecasts in DISPATCH steps if ``whole()``.

    The tokens ``rows()`` ``[B, S, 1]`` keep their output; None = no token does.
    """

    def hook_for() -> Callable:
        histories: dict[int, list[Remembered]] = defaultdict(list)  # by the number of the call in its step and branch
        calls: Counter = Counter()

        def forecast(history: Remembered, leaf: torch.Tensor) -> torch.Tensor:
            kept, found = rows(), history.forecast()
            return found if kept is None else torch.where(kept, leaf, found)

        def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
            leaves, spec = pytree.tree_flatten(output)
            of_call = histories[calls[schedule.branch, schedule.step]]
            calls[schedule.branch, schedule.step] += 1
            of_call.extend(Remembered(schedule) for _ in leaves[len(of_call) :])
            if schedule.records:
                for history, leaf in zip(of_call, leaves, strict=True):
                    history.record(leaf)
            if schedule.mode == "dispatch" and whole():
                leaves = [*map(forecast, of_call, leaves)]
            return pytree.tree_unflatten(leaves, spec)

        return hook

    handles = [module.register_forward_hook(hook_for()) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def overwriting(pipe: Any, preset: Preset, steps: int, sequence: Sequence) -> Iterator[NaiveAttention]:
    """Context in which a pipeline computes everything, and overwrites what the preset reuses, skips and forecasts."""
    schedule = Schedule(pipe, preset, steps)
    naive, level = NaiveAttention(schedule, sequence), preset.forecast.level
    with ExitStack() as undo:
        undo.enter_context(schedule.followed())
        for transformer in denoisers(pipe).values():
            undo.enter_context(naive.within(transformer))
            if level == "output":
                undo.enter_context(overwritten([transformer], schedule))
                continue
            for block, parts in parts_of_blocks(transformer):
                sites = [naive.sites[module] for module in block.modules() if module in naive.sites]
                if level == "layer":
                    undo.enter_context(overwritten(parts, schedule))
                elif level == "head" and preset.reuse.degrade_below:
                    undo.enter_context(overwritten(parts, schedule, partial(_is_degraded, schedule, *sites)))
                if level == "head" and sequence.crossed:
                    crossed = [block.get_submodule(sequence.crossed)]
                    undo.enter_context(
                        overwritten(crossed, schedule, rows=partial(_rows_of_any_head, schedule, *sites))
                    )
        yield naive


def _is_degraded(schedule: Schedule, site: Site) -> bool:
    return site.chosen[schedule.branch].density < schedule.preset.reuse.degrade_below


def _rows_of_any_head(schedule: Schedule, site: Site) -> torch.Tensor:
    return site.chosen[schedule.branch].rows.any(-1, keepdim=True)


def parts_of_blocks(transformer: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, list[torch.nn.Module]]]:
    """Yield each block with the modules whose outputs level layer forecasts."""
    family = require_family(transformer)
    names = family.parts or PARTS[family.name]
    for block in family.blocks(transformer, "transformer").values():
        modules = dict(block.named_modules())
        yield block, [modules[name] for name in names if name in modules]
