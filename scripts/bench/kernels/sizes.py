"""Sizes to time: FLUX at 1K and 2K, HunyuanVideo at 33K and 118K tokens, Wan 14B at 75K; and small ones."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from scripts.bench.kernels.cases import Case, Projection


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run: dense cases or projections of each benchmark, and their skipped shares.

    `window_lengths`, `orders`: N and D of GEMM-O's windows. `further`: attention cases `tokens: (kind, sparsity)` that
    were published.
    """

    cases: dict[str, tuple[Case, ...]]
    sparsities: tuple[float, ...]
    window_lengths: tuple[int, ...]
    orders: tuple[int, ...]
    further: dict[int, tuple[tuple[str, float], ...]]


_MODELS = (Case(4608), Case(16896), Case(33024), Case(75600, heads=40), Case(118800))
_PROJECTIONS = (
    Projection(4608),
    Projection(16896),
    Projection(33024),
    Projection(16896, width=1536, is_slice=True, windows=False),
    Projection(32760, heads=12, width=1536, windows=False),
    Projection(32760, heads=40, width=5120, windows=False),
)
FULL = Sizes(
    cases={
        "attention": _MODELS,
        "quantised": (Case(33024),),
        "gemm_q": _PROJECTIONS,
        "gemm_o": _PROJECTIONS,
        "linear": _PROJECTIONS,
        "lowering": _MODELS,
        "pooling": (Case(4608), Case(8192), Case(33024)),
        "symbols": (Case(8192), Case(33024)),
        "forecast": (Case(4608), Case(33024)),
        "sla": (Case(32760, heads=12, block=64), Case(32760, heads=12)),  # Wan 1.3B, 480p; the paper's block is 64
    },
    sparsities=(0.0, 0.5, 0.8, 0.9),
    window_lengths=(4, 6, 8),
    orders=(0, 1, 2),
    further={4608: (("tiles", 0.78), ("rows", 0.77)), 16896: (("tiles", 0.79),)},
)
QUICK = Sizes(
    cases={
        **dict.fromkeys(FULL.cases, (Case(4608),)),
        **dict.fromkeys(("gemm_q", "gemm_o", "linear"), (Projection(4608),)),
        "sla": (Case(4608, heads=12, block=64),),
    },
    sparsities=(0.0, 0.8),
    window_lengths=(6,),
    orders=(0, 1),
    further={},
)
_TINY = {"heads": 2, "head_dim": 32, "block": 64, "dtype": torch.float32}
TINY = Sizes(
    cases={
        **dict.fromkeys(FULL.cases, (Case(300, **_TINY),)),
        **dict.fromkeys(("gemm_q", "gemm_o", "linear"), (Projection(300, width=64, **_TINY),)),
    },
    sparsities=(0.0, 0.5),
    window_lengths=(4,),
    orders=(0, 1),
    further={},
)


def sparse_cases(dense: Case, sizes: Sizes) -> Iterator[tuple[str, Case]]:
    """Yield ``(kind, case)``: "dense" first, then "rows", "tiles" and "both" by rising sparsity."""
    yield "dense", dense
    wanted = [(kind, s) for kind in ("rows", "tiles", "both") for s in sizes.sparsities if s > 0]
    for kind, sparsity in sorted(wanted + list(sizes.further.get(dense.tokens, ())), key=lambda pair: pair[1]):
        density = (1 - sparsity) ** 0.5 if kind == "both" else 1 - sparsity
        yield kind, replace(dense, **dict.fromkeys(("rows", "tiles") if kind == "both" else (kind,), density))
