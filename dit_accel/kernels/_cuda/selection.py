"""Launchers of ``selection.cu``."""

from __future__ import annotations

import torch

from dit_accel.kernels._cuda.runtime import Defines, Kernel, kernel
from dit_accel.kernels.constants import COUNT_SLACK, UNITS
from dit_accel.kernels.layout import block_count

WARPS = 8
HEADS_PER_BYTE = 8
SCORES = 2


def select_tiles_into(
    skip_bits: torch.Tensor,
    probabilities: torch.Tensor,
    tau_units: int,
    first_always: int,
    stop_always: int,
    *,
    by_count: bool,
    rows: torch.Tensor | None,
    columns: torch.Tensor | None,
) -> None:
    blocks = probabilities.shape[-1]
    all_rows = probabilities.shape[0] * probabilities.shape[1] * blocks
    judged = rows is not None or columns is not None
    defines = (("BY_COUNT", int(by_count)), ("COUNT_SLACK", COUNT_SLACK), ("JUDGED", int(judged)))
    _selection("select_tiles", blocks, probabilities.device, defines).launch(
        (block_count(all_rows, WARPS),),
        32 * WARPS,
        (
            probabilities, rows, columns, skip_bits, all_rows, blocks, float(UNITS), tau_units,
            first_always, stop_always,
        ),
    )  # fmt: skip


def select_rows_into(
    cache_bits: torch.Tensor, probabilities: torch.Tensor, units: int, tau_units: int, text: range, vision: range
) -> None:
    batch, heads, blocks, _ = probabilities.shape
    _selection("select_rows", blocks, probabilities.device).launch(
        (batch * block_count(heads, HEADS_PER_BYTE),),
        32 * HEADS_PER_BYTE * SCORES,
        (
            probabilities, cache_bits, heads, blocks, float(units), tau_units,
            text.start, text.stop, vision.start, vision.stop,
        ),
        shared_bytes=HEADS_PER_BYTE * blocks,
    )  # fmt: skip


def _selection(name: str, blocks: int, device: torch.device, defines: Defines = ()) -> Kernel:
    """Compiled for the registers that a row of ``blocks`` takes in a warp, in steps of two."""
    return kernel("selection.cu", name, device, (("ITEMS", 2 * block_count(blocks, 64)), *defines))
