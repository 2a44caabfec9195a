"""Masks inside tiles: OmniAttention's five families of patterns, at its lengths and at longer ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from dit_accel import kernels
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.kernels.tile_masks import mask_from_plan
from dit_accel.sparse.policies import static
from dit_accel.tools.bench.attention import QKV, attention_flops, verify_samples
from dit_accel.tools.bench.baselines import FLEX_TILE, baseline, dense_baselines, masked_baselines, sparse_baselines
from dit_accel.tools.bench.cases import Attends, Case, Inputs, causal, make_masked_inputs
from dit_accel.tools.bench.clock import called_ms, median_ms, replayed_ms
from dit_accel.tools.bench.recorder import Recorder, Timer, case_sparsity, measured, shape_of
from dit_accel.tools.bench.sizes import Sizes

DOCUMENTS, INTERLEAVED = (256, 68, 188), (133, 309, 70)  # the paper's segments of 512 tokens; the second has an image
LAUNCH_BOUND = 2048  # tokens up to which a call takes about as long as its launch
LONG_GROUPS = 8  # times that longer sequences hold the paper's segments
RANDOM = {"full/partial": ("full", "partial"), "full/causal/partial": ("full", "causal", "partial")}


def bench_masked(recorder: Recorder, sizes: Sizes) -> None:
    """Every family beside FlexAttention and masked SDPA; short sequences in a CUDA graph and called from Python."""
    for case in sizes.masked:
        timers: dict[str, Timer] = {"": median_ms}
        if case.tokens <= LAUNCH_BOUND:
            timers = {", graph": replayed_ms, ", called": called_ms}
        for family in ("causal", "documents", "interleaved", *RANDOM):
            symbols, attends = pattern(family, case, recorder.device)
            inputs = make_masked_inputs(case, attends, recorder.device, symbols)
            for_flex = inputs
            if case.block < FLEX_TILE <= case.tokens:
                coarse = None if family in RANDOM else pattern(family, case, recorder.device, FLEX_TILE)[0]
                for_flex = make_masked_inputs(replace(case, block=FLEX_TILE), attends, recorder.device, coarse)
            qkv = inputs.features(), inputs.features(), inputs.features()
            for how, timer in timers.items():
                kind = f"{family} {case.block}{how}"
                baselines = _baselines(recorder, kind, qkv, inputs, for_flex, timer)
                for backend in recorder.backends:
                    call = partial(kernels.attention, *qkv, inputs.plan, backend=backend)
                    recorder.time(
                        "attention masks",
                        backend,
                        kind,
                        shape_of(case),
                        call,
                        partial(verify_samples, call, qkv, inputs),
                        **case_sparsity(inputs),
                        work=attention_flops(case) * inputs.density,
                        baselines=baselines,
                        timer=timer,
                    )


def pattern(
    family: str, case: Case, device: str | torch.device, block: int | None = None
) -> tuple[SparseSymbols, Attends]:
    """The symbols of a family, in blocks of the case or of ``block``, and the same mask pair by pair."""
    options = {"block": block or case.block, "batch": case.batch, "heads": case.heads, "device": device}
    if family == "causal":
        return static.causal(case.tokens, **options), causal
    if family in RANDOM:
        draw = partial(static.random_tiles, case.tokens, RANDOM[family])
        one_head = {"block": case.block, "device": device}
        seeded = [torch.Generator(device).manual_seed(0) for _ in range(2)]
        pairs = mask_from_plan(kernels.lower(draw(generator=seeded[0], **one_head)))[0, 0]
        return draw(generator=seeded[1], **options), lambda query, key: pairs[query, key]
    lengths = _segments(DOCUMENTS if family == "documents" else INTERLEAVED, case.tokens)
    length = torch.tensor(lengths, device=device)
    if family == "documents":
        document = torch.arange(len(lengths), device=device).repeat_interleave(length)
        return static.documents(lengths, **options), lambda query, key: document[query] == document[key]
    is_text = [number % 3 != 1 for number in range(len(lengths))]
    image_end = length.cumsum(0).masked_fill(torch.tensor(is_text, device=device), 0).repeat_interleave(length)
    symbols = static.interleaved(lengths, is_text, **options)
    return symbols, lambda query, key: (key <= query) | (key < image_end[query])


def _segments(of_512: tuple[int, ...], tokens: int) -> list[int]:
    """The segments of 512 tokens, stretched to the sequence, or to each eighth of a long one."""
    groups = 1 if tokens <= LAUNCH_BOUND else LONG_GROUPS
    parts = [length * tokens // (512 * groups) for length in of_512] * groups
    parts[-1] += tokens - sum(parts)
    return parts


def _baselines(
    recorder: Recorder, kind: str, qkv: QKV, inputs: Inputs, for_flex: Inputs, timer: Timer
) -> dict[str, float]:
    names = [(name, for_flex) for name in sparse_baselines(recorder.device) if name == "flex"]
    names += [(name, inputs) for name in masked_baselines(recorder.device, inputs.case.tokens)]
    if inputs.attends is causal:
        names += [(name, inputs) for name in dense_baselines(recorder.device)]
    times = {}
    for name, taken in names:
        make = partial(baseline, name, *qkv, taken)
        verify = partial(verify_samples, qkv=qkv, inputs=taken)
        times[name] = recorder.baseline(name, f"attention masks {kind} {inputs.case.name}", make, verify, timer)
    return measured(times)
