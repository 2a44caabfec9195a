"""Slices: attention to single keys by the share of keys that stay, what finding them costs, and what their masks hold.

Every row-block has its own random keys. FG-Attn keeps them in an int32 list of full length a row-block; a line through
the times says how nearly time follows the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch

from dit_accel import kernels
from dit_accel.kernels.layout import TokenLayout, block_count
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.sparse.policies import fg_attn
from dit_accel.tools.bench.attention import attention_flops
from dit_accel.tools.bench.baselines import baseline, dense_baselines
from dit_accel.tools.bench.cases import Case, Inputs, make_inputs
from dit_accel.tools.bench.recorder import Recorder, measured, poisoned_first, shape_of
from dit_accel.tools.bench.sizes import Sizes
from dit_accel.tools.bench.verify import Verdict, judge, verify_attention

SAMPLED = ((0, 0), (0.5, 0.4), (1, 1))  # where the rows lie that are compared with float64, of all heads and row-blocks
KEY_THRESHOLD = 0.5  # of 1 / N, FG-Attn's
DIFFERING = 2e-3  # share of keys that may stay or go by rounding
PAPER_BYTES = 4  # of a list's entry, one a key and row-block
MEMORY_SHARE = 1 / 8  # of the paper's, that ours may take at most
STRAIGHT = 0.25  # largest deviation from the line that passes for one

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def bench_slices(recorder: Recorder, sizes: Sizes) -> None:
    """Whole tiles, single keys of every density, the two masks of FG-Attn and their memory."""
    for dense in sizes.slices:
        inputs = make_inputs(dense, recorder.device)
        qkv = inputs.features(), inputs.features(), inputs.features()
        verify = partial(_verify_dense, qkv=qkv, inputs=inputs)
        baselines = {
            name: recorder.baseline(name, f"slices {dense.name}", partial(baseline, name, *qkv, inputs), verify)
            for name in dense_baselines(recorder.device)[:1]
        }
        for backend in recorder.backends:
            call = partial(kernels.attention, *qkv, inputs.plan, backend=backend)
            own = recorder.time(
                "slices",
                backend,
                "no slices",
                shape_of(dense),
                call,
                partial(verify, call),
                baselines=measured(baselines),
            )
            _bench_attention(recorder, backend, qkv, dense, sizes.densities, measured(baselines | {"itself": own}))
        if "triton" in recorder.backends or recorder.device == "cpu":
            _bench_masks(recorder, qkv, dense, measured(baselines))


def _bench_attention(
    recorder: Recorder, backend: str, qkv: QKV, case: Case, densities: tuple[float, ...], baselines: dict[str, float]
) -> None:
    times = {}
    for kind, density in (("whole tiles", 1.0), *(("single keys", density) for density in densities)):
        symbols = random_slices(case, density, qkv[0].device, whole=kind == "whole tiles")
        plan = kernels.lower(symbols)
        call = partial(kernels.attention, *qkv, plan, backend=backend)
        times[kind, density] = recorder.time(
            "slices",
            backend,
            kind,
            shape_of(case),
            call,
            partial(_verify, call, qkv, symbols),
            sparsity=1 - density,
            ideal=1 / density,
            work=attention_flops(case) * density,
            baselines=baselines,
        )
    points = {density: ms for (kind, density), ms in times.items() if kind == "single keys" and ms is not None}
    if len(points) > 2:
        first, slope, deviation = straight_line(points)
        kind = f"line through single keys: {first:.3g} ms + {slope:.3g} ms x density"
        recorder.add(
            "slices line", backend, kind, shape_of(case), Verdict(deviation, STRAIGHT), first, 1.0, 1.0, 0.0, "", {}
        )


def straight_line(points: dict[float, float]) -> tuple[float, float, float]:
    """Least squares through ``density: ms``: ms at density 0, ms at 1 beyond those, and the largest relative miss."""
    density, ms = (torch.tensor(list(values), dtype=torch.float64) for values in (points.keys(), points.values()))
    columns = torch.stack([torch.ones_like(density), density], 1)
    line = torch.linalg.lstsq(columns, ms[:, None]).solution
    first, slope = line.flatten().tolist()
    return first, slope, ((columns @ line).flatten() / ms - 1).abs().max().item()


def random_slices(case: Case, density: float, device: torch.device, *, whole: bool = False) -> SparseSymbols:
    """Every row computes; each key of a row stays with probability ``density``, or all do as whole tiles."""
    generator = torch.Generator(device).manual_seed(0)
    blocks = block_count(case.tokens, case.block)
    tiles = torch.full((case.batch, case.heads, blocks, blocks), whole, device=device)
    rows = torch.ones(case.batch, blocks, case.heads, dtype=torch.bool, device=device)
    bits = []
    for _ in range(case.heads):  # one head's random numbers at a time: they take 32 times what the bits take
        keys = torch.rand(case.batch, 1, blocks, blocks * case.block, generator=generator, device=device)
        bits.append(kernels.pack_bits((keys < density) & (not whole)))
    return SparseSymbols(
        kernels.pack_bits(rows), kernels.pack_bits(tiles), case.heads, case.tokens, case.block,
        slice_bits=torch.cat(bits, 1),
    )  # fmt: skip


def _verify_dense(call: Callable[[], torch.Tensor], qkv: QKV, inputs: Inputs) -> Verdict:
    return verify_attention(poisoned_first(call, qkv[0].shape, like=qkv[0]), *qkv, inputs, samples=len(SAMPLED))


def _verify(call: Callable[[], torch.Tensor], qkv: QKV, symbols: SparseSymbols) -> Verdict:
    out = poisoned_first(call, qkv[0].shape, like=qkv[0])
    q, k, v = qkv
    parts = []
    for h, row in _sampled_rows(symbols):
        queries = slice(row * symbols.block, min((row + 1) * symbols.block, symbols.tokens))
        keys = _keys_of_row(symbols, h, row).nonzero().flatten()
        head = q[0, queries, h], k[0, keys, h], v[0, keys, h]
        exact, low = (_attend(*(x.to(dtype) for x in head)) for dtype in (torch.float64, q.dtype))
        parts.append((out[0, queries, h], exact, low))
    return judge(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _sampled_rows(symbols: SparseSymbols) -> list[tuple[int, int]]:
    return [(int(h * (symbols.heads - 1)), int(row * (symbols.blocks - 1))) for h, row in SAMPLED]


def _keys_of_row(symbols: SparseSymbols, head: int, row: int) -> torch.Tensor:
    """Which keys a row of the first sample attends to, in whole tiles or alone: bool ``[S]``."""
    tiles = kernels.unpack_bits(symbols.skip_bits[0, head, row], symbols.blocks).repeat_interleave(symbols.block)
    single = kernels.unpack_bits(symbols.slice_bits[0, head, row], symbols.blocks * symbols.block)
    return (tiles | single)[: symbols.tokens]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.T * q.shape[-1] ** -0.5).softmax(-1) @ v


def _bench_masks(recorder: Recorder, qkv: QKV, case: Case, baselines: dict[str, float]) -> None:
    """From q and k to symbols; queries of a block are alike but for noise, as neighbours in a clip are."""
    _, k, _ = qkv
    layout = TokenLayout(0, case.tokens, case.block)
    q = fg_attn.block_means(qkv[0], case.block).repeat_interleave(case.block, 1)[:, : case.tokens]
    q = q * 2 * case.block**0.5 + qkv[0]
    backend = "triton" if recorder.device == "cuda" else "reference"
    for mask in ("exact", "average_query"):
        config = SimpleNamespace(mask=mask, key_threshold=KEY_THRESHOLD)  # a preset's section, without its package
        call = partial(fg_attn.symbols, q, k, layout, config)
        symbols = call()
        judged = partial(_verify_mask, symbols, q, k, mask)
        recorder.time(
            "slices mask", backend, mask, shape_of(case), call, judged, sparsity=_sparsity(symbols), baselines=baselines
        )
        if recorder.device == "cuda":
            _note_memory(recorder, mask, call, (q, k, qkv[2]), case)


def _sparsity(symbols: SparseSymbols) -> float:
    keys = kernels.lower(symbols)
    pairs = symbols.heads * symbols.blocks * symbols.tokens * keys.batch
    return 1 - keys.kv_count.float().mean().item() / symbols.blocks - keys.slices.count.sum().item() / pairs


def _verify_mask(symbols: SparseSymbols, q: torch.Tensor, k: torch.Tensor, mask: str) -> Verdict:
    """The share of keys, in rows here and there, that stay or go unlike in float64."""
    wrong = []
    for h, row in _sampled_rows(symbols):
        query = q[0, row * symbols.block : (row + 1) * symbols.block, h].double()
        query = query if mask == "exact" else query.mean(0, keepdim=True)
        probability = (query @ k[0, :, h].double().T * q.shape[-1] ** -0.5).softmax(-1)
        expected = (probability > KEY_THRESHOLD / symbols.tokens).any(0)
        wrong.append((expected != _keys_of_row(symbols, h, row)).double().mean().item())
    return Verdict(max(wrong), DIFFERING if mask == "exact" else 10 * DIFFERING)


def _note_memory(recorder: Recorder, mask: str, call: Callable[[], SparseSymbols], qkv: QKV, case: Case) -> None:
    """Most bytes at a time of masks and what is made of them, from q and k to the output, as the row's error."""
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
    recorder.add(
        "slices memory", "triton", kind, shape_of(case), verdict, start.elapsed_time(end), 0.0, 1.0, 0.0, "", {}
    )
