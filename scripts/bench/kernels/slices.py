"""Time attention to single keys by the share of kept keys, the overhead of choosing keys, and the memory of the masks.

Every row-block has its own random keys. FG-Attn stores them in an int32 list of full length for each row-block. A line
fitted to the times shows how close they are to proportional to the number of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch

from dit_accel import kernels
from dit_accel.kernels.layout import TokenLayout, block_count
from dit_accel.kernels.pooling import block_means
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.sparse.policies import fg_attn
from scripts.bench.kernels.attention import time_attention, time_baselines
from scripts.bench.kernels.baselines import DENSE
from scripts.bench.kernels.cases import QKV, Case, Inputs, inputs_of, make_inputs
from scripts.bench.kernels.recorder import Recorder
from scripts.bench.kernels.sizes import Sizes
from scripts.bench.kernels.verify import Verdict

SAMPLED = ((0, 0), (0.5, 0.4), (1, 1))  # relative positions of the compared rows among all heads and row-blocks
KEY_THRESHOLD = 0.5  # of 1 / N, FG-Attn's
DIFFERING = 2e-3  # share of keys that rounding may decide differently
PAPER_BYTES = 4  # of a list entry, one per key and row-block
MEMORY_SHARE = 1 / 8  # maximum of our memory as a share of the paper's
STRAIGHT = 0.25  # largest deviation from the line


def bench_slices(recorder: Recorder, dense: Case, sizes: Sizes) -> None:
    """Time whole tiles, single keys at every density, the two masks of FG-Attn, and measure their memory."""
    inputs = make_inputs(dense, recorder.device)
    qkv = inputs.qkv()
    baselines = time_baselines(recorder, DENSE[recorder.device][:1], f"slices {dense.name}", qkv, inputs)
    for backend in recorder.backends:
        own = time_attention(recorder, "slices", backend, "no slices", qkv, inputs, baselines)
        itself = {} if own is None else {"itself": own}
        _bench_attention(recorder, backend, qkv, dense, sizes.densities, baselines | itself)
    if "triton" in recorder.backends or recorder.device == "cpu":
        _bench_masks(recorder, qkv, dense, baselines)


def _bench_attention(
    recorder: Recorder, backend: str, qkv: QKV, case: Case, densities: tuple[float, ...], baselines: dict[str, float]
) -> None:
    points = {}
    for kind, density in (("whole tiles", 1.0), *(("single keys", density) for density in densities)):
        inputs = inputs_of(case, random_slices(case, density, qkv[0].device, whole=kind == "whole tiles"))
        ms = time_attention(recorder, "slices", backend, kind, qkv, inputs, baselines, density=density)
        if kind == "single keys" and ms is not None:
            points[density] = ms
    if len(points) > 2:
        first, slope, deviation = straight_line(points)
        kind = f"line through single keys: {first:.3g} ms + {slope:.3g} ms x density"
        figures = {"density": 0.0, "ideal": 1.0, "unit": ""}
        recorder.add("slices line", backend, kind, case, Verdict(deviation, STRAIGHT), first, **figures)


def straight_line(points: dict[float, float]) -> tuple[float, float, float]:
    """Fit a line to ``density: ms``: ms at density 0, extra ms at density 1, and the largest relative error."""
    density, ms = (torch.tensor(list(values), dtype=torch.float64) for values in (points.keys(), points.values()))
    columns = torch.stack([torch.ones_like(density), density], 1)
    line = torch.linalg.lstsq(columns, ms[:, None]).solution
    first, slope = line.flatten().tolist()
    return first, slope, ((columns @ line).flatten() / ms - 1).abs().max().item()


def random_slices(case: Case, density: float, device: torch.device, *, whole: bool = False) -> SparseSymbols:
    """Compute every row; keep each key of a row with probability ``density``, or all keys as whole tiles."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = block_count(case.tokens, case.block)
    tiles = torch.full((case.batch, case.heads, blocks, blocks), whole, device=device)
    rows = torch.ones(case.batch, blocks, case.heads, dtype=torch.bool, device=device)
    bits = []
    for _ in range(case.heads):  # one head's random numbers at a time: they take 32 times the memory of the bits
        keys = torch.rand(case.batch, 1, blocks, blocks * case.block, generator=generator, device=device)
        bits.append(kernels.pack_bits((keys < density) & (not whole)))
    return SparseSymbols(
        kernels.pack_bits(rows), kernels.pack_bits(tiles), case.heads, case.tokens, case.block,
        slice_bits=torch.cat(bits, 1),
    )  # fmt: skip


def _bench_masks(recorder: Recorder, qkv: QKV, case: Case, baselines: dict[str, float]) -> None:
    """Time q and k to symbols; queries of a block differ only by noise, like neighbouring tokens of a video."""
    _, k, v = qkv
    layout = TokenLayout(0, case.tokens, case.block)
    q = block_means(qkv[0], case.block).repeat_interleave(case.block, 1)[:, : case.tokens]
    q = q * 2 * case.block**0.5 + qkv[0]
    backend = "triton" if recorder.device == "cuda" else "reference"
    for mask in ("exact", "average_query"):
        config = SimpleNamespace(mask=mask, key_threshold=KEY_THRESHOLD)  # a preset's section without its package
        call = partial(fg_attn.FgAttn().draw, q, k, layout, config)
        inputs = inputs_of(case, call())
        pairs = case.heads * inputs.plan.blocks * case.tokens * case.batch
        density = inputs.plan.kv_count.float().mean().item() / inputs.plan.blocks
        density += inputs.plan.slices.count.sum().item() / pairs
        verdict = _judge_mask(inputs, q, k, mask)
        figures = {"density": density, "ideal": 1.0, "baselines": baselines}
        recorder.time("slices mask", backend, mask, case, call, verdict, **figures)
        if recorder.device == "cuda":
            _note_memory(recorder, mask, call, (q, k, v), case)


def _judge_mask(inputs: Inputs, q: torch.Tensor, k: torch.Tensor, mask: str) -> Verdict:
    """Share of keys, in sampled rows, that float64 decides differently."""
    wrong, tokens = [], inputs.case.tokens
    for place in SAMPLED:
        h, row = (int(share * (length - 1)) for share, length in zip(place, inputs.rows.shape[1:], strict=True))
        query = q[0, inputs.tokens_of(row), h].double()
        query = query if mask == "exact" else query.mean(0, keepdim=True)
        probability = (query @ k[0, :, h].double().T * q.shape[-1] ** -0.5).softmax(-1)
        expected = (probability > KEY_THRESHOLD / tokens).any(0)
        actual = torch.zeros_like(expected)
        actual[inputs.keys_of(0, h, row)] = True
        wrong.append((expected != actual).double().mean().item())
    return Verdict(max(wrong), DIFFERING if mask == "exact" else 10 * DIFFERING)


def _note_memory(recorder: Recorder, mask: str, call: Callable[[], SparseSymbols], qkv: QKV, case: Case) -> None:
    """Record peak bytes of masks and the tensors made from them, from q and k to the output, as the row's error."""
    paper = case.batch * case.heads * block_count(case.tokens, case.block) * case.tokens * PAPER_BYTES
    out = torch.empty_like(qkv[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    kernels.attention(*qkv, kernels.lower(call()), out=out)
    end.record()
    torch.cuda.synchronize()
    verdict = Verdict(torch.cuda.max_memory_allocated() - before, paper * MEMORY_SHARE)
    kind = f"bytes, {mask} mask and attention; int32 lists take {paper / 1e6:.0f} MB"
    recorder.add("slices memory", "triton", kind, case, verdict, start.elapsed_time(end), unit="")
