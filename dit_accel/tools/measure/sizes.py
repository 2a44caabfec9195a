"""Measure sizes of Triton's kernels on this GPU, starting from those of ``kernels/_triton/configs.py``.

Each kernel climbs: of sizes that differ in one value, the first that is faster and right is the next start. The last
one is kept if it is 3% faster than the shipped sizes in two comparisons. Kernels of SLA and FG-Attn are left out.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import le
from statistics import fmean

import torch

from dit_accel import kernels
from dit_accel.kernels._triton import configs
from dit_accel.kernels.backends import hopper_limit
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.symbols import SparseSymbols

FASTER = 0.97  # ratio of times below which sizes are faster
REPEATS = 2  # comparisons with the shipped sizes that must agree
LIMITS = {"STAGES": (1, 5), "num_warps": (2, 16), "K_TILE": (16, 128)}  # of other sizes 16 and 256
KINDS = "linear layers", "attention", "GEMM"  # beginnings of the kernels' names, in this order
TIMED = (4608, 24), (8192, 12)  # tokens and heads of an image and of a video
CHECKED = (3500, 3), (3500, 3, 3400)  # and valid keys; of as many pairs as the variants for large calls take
Sizes = dict[str, int]
Call = Callable[..., torch.Tensor]  # of an op; takes ``backend``


def call_of(kernel: str, device: torch.device, tokens: int, heads: int, valid: int | None = None) -> Call:
    """Return a call of the op that launches a kernel, over half of the tiles, in bfloat16 (float16 on a CPU)."""
    generator, dtype = torch.Generator(device).manual_seed(0), torch.bfloat16 if device.type == "cuda" else torch.half
    block, head_dim = 64 if "blocks of 64" in kernel else 128, 64 if "heads of 64" in kernel else 128
    blocks, width, pack = block_count(tokens, block), heads * head_dim, kernels.pack_bits

    def normal(*sides: int) -> torch.Tensor:
        return torch.randn(sides, generator=generator, device=device).to(dtype)

    if kernel == "linear layers":
        rows, weights = (kernels.quantize_rows(normal(side, width), dtype="int8") for side in (tokens, 3 * width))
        return partial(kernels.quantized_linear, *rows, *weights, normal(3 * width), out_dtype="float16")
    computed = pack(torch.ones(1, blocks, heads, dtype=torch.bool, device=device))
    symbols = SparseSymbols(computed, pack(normal(1, heads, blocks, blocks) > 0), heads, tokens, block)
    if "masks" in kernel:
        causal = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device).tril()
        symbols = kernels.symbols_from_mask(causal, block=block, batch=1, heads=heads)
    plan, x = kernels.lower(symbols), normal(1, tokens, width)
    q, k, v = (normal(1, tokens, heads, head_dim) for _ in range(3))
    if kernel == "GEMM-O":
        return partial(kernels.gemm_o_dispatch, q, normal(width, width), plan, x[None], (1.0,))
    if kernel.startswith("GEMM-Q"):
        angle = normal(tokens, head_dim).float()
        fused = {"norm_weight": normal(head_dim), "rope": (angle.cos(), angle.sin())} if "norm" in kernel else {}
        return partial(kernels.gemm_q, x, normal(width, width), normal(width), plan, **fused)
    kv_len = None if valid is None else torch.tensor([valid], dtype=torch.int32, device=device)
    options = {"qk_dtype": "int8" if "int8" in kernel else None, "kv_len": kv_len}
    return partial(kernels.attention, q, k, v, plan, **options, **{"pv_threshold": -9.0} if "pv_" in kernel else {})


def median_ms(call: Call) -> float:
    from triton.testing import do_bench

    return do_bench(call, warmup=10, rep=50, return_mode="median")


def names(device: torch.device) -> list[str]:
    """Return the kernels to measure, by their names in ``CONFIGS``, and the variant that large calls launch here."""
    found = [name for kind in KINDS for name in configs.CONFIGS if name.startswith(kind) and "backward" not in name]
    is_hopper = hopper_limit(torch.empty(0, device=device)) is None
    return [name + configs.BY_TMA * (is_hopper and "attention" in name and "int8" not in name) for name in found]


def neighbours(kernel: str, sizes: Sizes) -> Iterator[Sizes]:
    """Yield sizes that differ in one value, or in a tile and the warps that share it."""
    for name, value in sizes.items():
        least, most = LIMITS.get(name, (16, 64 if "blocks of 64" in kernel else 128 if "attention" in kernel else 256))
        if name == "maxnreg":
            yield {other: sizes[other] for other in sizes if other != name}
        elif not (name == "KEY_TILE" and "pv_threshold" in kernel):  # there a step is a whole tile
            for other in (value - 1, value + 1) if name == "STAGES" else (value // 2, value * 2):
                warps = sizes["num_warps"] * other // value
                yield from [sizes | {name: other}] * (least <= other <= most)
                if name not in LIMITS and least <= other <= most and 2 <= warps <= 16:
                    yield sizes | {name: other, "num_warps": warps}


class SizedKernel:
    """A kernel's calls, which are timed and compared with the reference at any sizes."""

    def __init__(self, name: str, device: torch.device, timer: Callable[[Call], float] = median_ms) -> None:
        self._launch_with, self._name, self._timer = partial(configs.launch_with, device, name), name, timer
        self._launch_with(None)
        self._shipped = configs._config(name, device, is_float32=False)
        self._timed, checked = ([call_of(name, device, *shape) for shape in shapes] for shapes in (TIMED, CHECKED))
        self._checked = [(call, call(backend="reference").float()) for call in checked]
        self._bounds = [min(2 * error + 1e-4, 0.1) for error in self._errors(self._shipped)]

    def climb(self, is_over: Callable[[], bool]) -> tuple[Sizes, float]:
        """Return the fastest sizes found, and the ratio of their time to that of the shipped ones."""
        best, tried = self._shipped, [self._shipped]
        while not is_over() and (untried := [one for one in neighbours(self._name, best) if one not in tried]):
            tried.append(sizes := untried[0])
            with suppress(Exception):  # too many registers, or not enough shared memory
                if self._ratio(sizes, best) < FASTER and all(map(le, self._errors(sizes), self._bounds)):
                    best = sizes
        repeats = REPEATS if best is not self._shipped else 0
        return best, max((self._ratio(best, self._shipped) for _ in range(repeats)), default=1.0)

    def _ratio(self, sizes: Sizes, others: Sizes) -> float:
        """Mean ratio of the times of two sizes; infinite if the first are slower in a call."""
        times = []
        for some in (sizes, others):
            self._launch_with(some)
            times.append([self._timer(partial(call, backend="triton")) for call in self._timed])
        ratios = [mine / other for mine, other in zip(*times, strict=True)]
        return fmean(ratios) if max(ratios) <= 1 else math.inf

    def _errors(self, sizes: Sizes | None) -> list[float]:
        """Mean error of each checked call, relative to the mean value."""
        self._launch_with(sizes)
        pairs = [(call(backend="triton").float() - right, right) for call, right in self._checked]
        return [(error.abs().mean() / right.abs().mean()).item() for error, right in pairs]
