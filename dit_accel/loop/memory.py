"""Estimate the memory of a run's caches, and choose their storage so that they fit into a budget.

The plan depends on sizes alone, so it is made before a branch's first block runs, and needs no model:

    layout = TokenLayout(text=0, vision=75_600)
    wan_14b = ModelSize(
        batch=1, layout=layout, heads=40, width=5120, output=16 * 21 * 90 * 160, itemsize=2,
        sites=(SiteSize(stream=layout.tokens, features=3 * layout.tokens, sparse_features=layout.tokens),) * 40,
    )
    plan = plan_memory(preset, [wan_14b, wan_14b])  # one entry a branch
    plan.device_bytes, plan.host_bytes, plan.measures

Only values that will be read are kept. A forecast of degree D reads D + 1 values. Of attention outputs D are kept: an
UPDATE reads them, and its own output is the newest value. It computes new symbols first, so the rows that it will read
are unknown when an output is recorded. But rows of blocks that hold text are never reused and can be left out. The bias
stack needs the rows of every row-block in which any head is reused: nearly all rows but the rows with text.

The figures count the memory between calls. While a block runs, its decoded histories take memory in addition.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dit_accel.errors import MemoryBudgetError
from dit_accel.kernels.layout import TokenLayout
from dit_accel.loop.storage import Storage
from dit_accel.presets import Preset

GIB = 2**30


@dataclass(frozen=True)
class SiteSize:
    """Sizes of one block's records, in tokens of the model's width."""

    stream: int  # tokens whose output projection the bias stack holds: the joint sequence, or one stream of it
    features: int  # tokens of all whole features together, which level layer and degraded layers forecast
    sparse_features: int = 0  # tokens of the whole features that level head always records


@dataclass(frozen=True)
class ModelSize:
    """Sizes that determine the memory of one branch of a transformer."""

    output: int = 0  # numbers in the transformer's output
    itemsize: int = 2  # bytes of a number
    batch: int = 1  # samples in the branch
    layout: TokenLayout | None = None  # layout of the joint sequence; None = blocks record nothing
    heads: int = 1  # attention heads
    width: int = 0  # features of a token, ``heads * head_dim``
    sites: tuple[SiteSize, ...] = ()  # one entry a block
    symbols: int = 0  # bytes of one block's symbols and plans


class Bytes(NamedTuple):
    """Bytes on the device, and bytes offloaded to the host."""

    device: int
    host: int


@dataclass(frozen=True)
class MemoryPlan:
    """Storage of a run's caches, and their largest size."""

    order: int  # degree of all forecasts
    rows: bool = False  # leave the rows of text blocks, which are never reused, out of attention outputs
    float8: bool = False  # keep histories of blocks, and cached biases, as float8
    offload: bool = False  # keep attention outputs in host memory
    device_bytes: int = field(default=0, compare=False)  # bytes of all branches together, once histories are full
    host_bytes: int = field(default=0, compare=False)
    measures: tuple[str, ...] = field(default=(), compare=False)  # the measures that save memory, in words

    @property
    def features(self) -> Storage:
        """Storage form of whole features, which every DISPATCH step reads: they stay on the device."""
        return Storage(self.float8)

    @property
    def biases(self) -> Storage:
        """Storage form of the bias stack, which every DISPATCH step reads too."""
        return Storage(self.float8, stacked=True)

    def attention(self, layout: TokenLayout | None) -> Storage:
        """Return the storage form of attention outputs, which only UPDATE steps read."""
        return Storage(self.float8, self.offload, _reusable(layout) if self.rows and layout is not None else None)


def plan_memory(preset: Preset, branches: Sequence[ModelSize]) -> MemoryPlan:
    """Return the first plan that fits ``memory.budget_gib``: the preset's own, then with one more measure at a time.

    The measures, in this order, if they save memory: no rows that are never reused, float8, host memory, lower degrees.

    Raises:
        MemoryBudgetError: no plan fits; the message lists the memory of each plan.
    """
    budget = preset.memory.budget_gib
    plans = list(dict.fromkeys(_without_idle(plan, preset, branches) for plan in _plans(preset)))
    for plan in plans:
        if budget is None or plan.device_bytes <= budget * GIB:
            return plan
    pairs = ((plan.device_bytes / GIB, ", ".join(plan.measures) or "no measures") for plan in plans)
    tried = "; ".join(f"{gib:.2f} GiB with {measures}" for gib, measures in pairs)
    smaller_level = "" if preset.forecast.level == "output" else "set forecast.level to output, "
    needs = f"the caches of {len(branches)} branch{'es' * (len(branches) > 1)} need more: {tried}"
    fix = f"Raise the budget, {smaller_level}or use a smaller image, fewer frames or a smaller batch"
    raise MemoryBudgetError(f"memory.budget_gib is {budget:g}, and {needs}. {fix}")


def estimate(preset: Preset, plan: MemoryPlan, size: ModelSize) -> Bytes:
    """Return the most memory that one branch takes, with all histories full."""
    level, layout = preset.forecast.level, size.layout
    values = plan.order + 1
    keeps_outputs = level == "output" or preset.schedule.measures
    device = values * size.output * size.itemsize * keeps_outputs
    host = 0
    if layout is None:
        return Bytes(device, host)

    def kept(tokens: int, storage: Storage) -> int:
        return storage.bytes(size.batch * tokens * size.width, size.itemsize)

    for site, count in Counter(size.sites).items():
        if level == "layer" or (level == "head" and preset.reuse.degrade_below > 0):
            device += count * values * kept(site.features, plan.features)
        elif level == "head":
            device += count * values * kept(site.sparse_features, plan.features)
        if level == "head":
            device += count * kept(values * site.stream, plan.biases)
        if level == "head" or preset.skip.steps == "all":
            device += count * size.symbols
        if preset.skip.keeps_residuals:
            device += count * kept(layout.tokens, plan.features)
    if level == "head":
        start, stop = _reusable(layout) if plan.rows else (0, layout.tokens)
        attention = len(size.sites) * plan.order * kept(stop - start, plan.attention(layout))
        device, host = device + attention * (not plan.offload), attention * plan.offload
    return Bytes(device, host)


def _plans(preset: Preset) -> Iterator[MemoryPlan]:
    """Yield the preset's own plan, then plans with one more measure each."""
    memory, level = preset.memory, preset.forecast.level
    plan = MemoryPlan(preset.forecast.order, float8=memory.history_dtype == "float8", offload=memory.offload)
    yield plan
    whole = ("float8",) if preset.skip.keeps_residuals else ()
    measures = {"output": whole, "layer": ("float8",), "head": ("rows", "float8", "offload")}[level]
    for measure in measures:
        if not getattr(plan, measure):
            plan = _with(plan, measure, True)
            yield plan
    for order in reversed(range(preset.forecast.order)):
        yield replace(plan, order=order)


def _measured(plan: MemoryPlan, preset: Preset, branches: Sequence[ModelSize]) -> MemoryPlan:
    """Return the plan with its bytes and its measures in words."""
    device, host = (sum(amounts) for amounts in zip(*(estimate(preset, plan, size) for size in branches), strict=True))
    in_words = {
        "no attention history of text blocks": plan.rows,
        "float8 histories": plan.float8,
        "attention history in host memory": plan.offload,
        f"order {plan.order} instead of {preset.forecast.order}": plan.order < preset.forecast.order,
    }
    measures = tuple(words for words, taken in in_words.items() if taken)
    return replace(plan, device_bytes=device, host_bytes=host, measures=measures)


def _without_idle(plan: MemoryPlan, preset: Preset, branches: Sequence[ModelSize]) -> MemoryPlan:
    """Return the plan with its bytes, without measures that save no memory on the device or the host."""
    plan = _measured(plan, preset, branches)
    for measure in ("rows", "offload"):
        without = _measured(_with(plan, measure, False), preset, branches)
        if (without.device_bytes, without.host_bytes) == (plan.device_bytes, plan.host_bytes):
            plan = without
    return plan


def _reusable(layout: TokenLayout) -> tuple[int, int]:
    """Return the tokens ``start, stop`` of the blocks without text; only these blocks may be reused."""
    blocks = layout.vision_blocks
    return min(blocks.start * layout.block, layout.tokens), min(blocks.stop * layout.block, layout.tokens)


def _with(plan: MemoryPlan, measure: str, taken: bool) -> MemoryPlan:
    change: dict[str, Any] = {measure: taken}
    return replace(plan, **change)
