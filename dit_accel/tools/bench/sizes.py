"""The sizes that are timed: FLUX at 1K and 2K, HunyuanVideo at 33K and 118K tokens, Wan 14B at 75K; and small ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch

from dit_accel.tools.bench.cases import Case

# The fields of Sizes that hold cases or projections.
GROUPS = (
    "attention",
    "masked",
    "quantised",
    "projections",
    "lowering",
    "pooling",
    "symbols",
    "sparge",
    "forecast",
    "slices",
    "sla",
)


@dataclass(frozen=True)
class Projection:
    """GEMM-Q from ``width`` to the heads, and GEMM-O from the heads to ``width``.

    ``is_slice``: GEMM-O's weight is the attention slice of a wider, fused matrix. ``windows``: time whole windows too.
    """

    tokens: int
    heads: int = 24
    head_dim: int = 128
    width: int = 3072
    is_slice: bool = False
    windows: bool = True
    block: int = 128
    dtype: torch.dtype = torch.bfloat16

    def case(self, sparsity: float) -> Case:
        """The case whose rows compute with probability 1 − sparsity."""
        return Case(self.tokens, self.heads, self.head_dim, self.block, rows=1 - sparsity, dtype=self.dtype)


@dataclass(frozen=True)
class Sizes:
    """Everything that a run times.

    Args:
        attention: dense cases, one a panel of the plot.
        sparsities: shares left out, of rows, of tiles, and of both together.
        further: further ``tokens: (kind, sparsity)``, those of published figures.
        masked, quantised: dense cases of the groups of those names.
        projections: of GEMM-Q and GEMM-O.
        window_lengths, orders: N and D of GEMM-O's windows.
        lowering, pooling: cases of single ops of the symbol path; ``symbols`` of the whole path.
        sparge: cases of SpargeAttn's prediction, and of its attention where that is short.
        forecast: cases of the weighted sum.
        slices: dense cases of attention to single keys, and ``densities``: shares of the keys that stay.
        sla: cases of SLA, forward and backward.
    """

    attention: tuple[Case, ...]
    sparsities: tuple[float, ...]
    further: dict[int, tuple[tuple[str, float], ...]]
    masked: tuple[Case, ...]
    quantised: tuple[Case, ...]
    projections: tuple[Projection, ...]
    window_lengths: tuple[int, ...]
    orders: tuple[int, ...]
    lowering: tuple[Case, ...]
    pooling: tuple[Case, ...]
    symbols: tuple[Case, ...]
    sparge: tuple[Case, ...]
    forecast: tuple[Case, ...]
    slices: tuple[Case, ...]
    densities: tuple[float, ...]
    sla: tuple[Case, ...]

    def tokens(self) -> list[int]:
        """Every sequence length, ascending."""
        return sorted({case.tokens for group in GROUPS for case in getattr(self, group)})

    def only(self, tokens: Collection[int]) -> Sizes:
        """The sizes of those sequence lengths."""
        kept = {group: tuple(case for case in getattr(self, group) if case.tokens in tokens) for group in GROUPS}
        return replace(self, **kept)


FULL = Sizes(
    attention=(Case(4608), Case(16896), Case(33024), Case(75600, heads=40), Case(118800)),
    sparsities=(0.0, 0.5, 0.8, 0.9),
    further={4608: (("tiles", 0.78), ("rows", 0.77)), 16896: (("tiles", 0.79),)},
    masked=(
        *(Case(tokens, 8, 64, block, dtype=torch.float16) for tokens in (512, 1024, 2048) for block in (64, 128)),
        Case(8192),
        Case(32768, heads=8),
    ),  # the paper's lengths and heads, and longer ones
    quantised=(Case(33024),),
    projections=(
        Projection(4608),
        Projection(16896),
        Projection(33024),
        Projection(16896, width=1536, is_slice=True, windows=False),
        Projection(32760, heads=12, width=1536, windows=False),
        Projection(32760, heads=40, width=5120, windows=False),
    ),
    window_lengths=(4, 6, 8),
    orders=(0, 1, 2),
    lowering=(Case(4608), Case(16896), Case(33024), Case(75600, heads=40), Case(118800)),
    pooling=(Case(4608), Case(8192), Case(33024)),
    symbols=(Case(8192), Case(33024)),
    sparge=tuple(Case(tokens) for tokens in (8192, 16384, 32768, 65536, 131072)),  # those of the paper's table 3
    forecast=(Case(4608), Case(33024)),
    slices=(Case(32760, heads=12), Case(33024)),
    densities=(1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1),
    sla=(Case(32760, heads=12, block=64), Case(32760, heads=12)),  # Wan 1.3B, 480p; the paper's block is 64
)
QUICK = Sizes(
    attention=(Case(4608),),
    sparsities=(0.0, 0.8),
    further={},
    masked=(Case(512, 8, 64, 64, dtype=torch.float16), Case(512, 8, 64, dtype=torch.float16)),
    quantised=(Case(4608),),
    projections=(Projection(4608),),
    window_lengths=(6,),
    orders=(0, 1),
    lowering=(Case(4608),),
    pooling=(Case(4608),),
    symbols=(Case(4608),),
    sparge=(Case(4608),),
    forecast=(Case(4608),),
    slices=(Case(4608),),
    densities=(1.0, 0.5, 0.1),
    sla=(Case(4608, heads=12, block=64),),
)
_SMALL = Case(300, heads=2, head_dim=32, block=64, dtype=torch.float32)
TINY = Sizes(
    attention=(_SMALL,),
    sparsities=(0.0, 0.5),
    further={},
    masked=(_SMALL,),
    quantised=(_SMALL,),
    projections=(Projection(300, heads=2, head_dim=32, width=64, block=64, dtype=torch.float32),),
    window_lengths=(4,),
    orders=(0, 1),
    lowering=(_SMALL,),
    pooling=(_SMALL,),
    symbols=(_SMALL,),
    sparge=(_SMALL,),
    forecast=(_SMALL,),
    slices=(_SMALL,),
    densities=(0.5,),
    sla=(_SMALL,),
)


def sparse_cases(dense: Case, sizes: Sizes) -> Iterator[tuple[str, Case]]:
    """``(kind, case)``: "dense" first, then "rows", "tiles" and "both" by rising sparsity."""
    yield "dense", dense
    wanted = [(kind, s) for kind in ("rows", "tiles", "both") for s in sizes.sparsities if s > 0]
    for kind, sparsity in sorted(wanted + list(sizes.further.get(dense.tokens, ())), key=lambda pair: pair[1]):
        density = (1 - sparsity) ** 0.5 if kind == "both" else 1 - sparsity
        changes = {"rows": ("rows",), "tiles": ("tiles",), "both": ("rows", "tiles")}[kind]
        yield kind, replace(dense, **dict.fromkeys(changes, density))
