"""Sizes of tiles, pipeline stages and warps of the kernels whose best sizes depend on the GPU.

A kernel's columns, of which a launch takes the first that fits:

    float32 | tma: sm90, tiles by its copy engine | the GPU's own, such as sm90 | "": 99 KiB of shared memory

Sizes of half precision that ``dit-accel env --tune`` measured on this GPU come first. Sizes of sm90 are measured. The
others fit and spill little (``scripts/checks/compiled_kernels.py``). sm100 has 16 warps
where a product stands in a condition: 4 and 8 warps use its tensor memory, for which Triton 3.6 can't compile that.
"""

import functools
import hashlib
import json
from pathlib import Path

import torch
import triton

from dit_accel.kernels.backends import device_properties
from dit_accel.kernels.cache_folder import cache_folder


def _sizes(stages: int, warps: int, **sizes: int) -> dict[str, int]:
    return {**sizes, "STAGES": stages, "num_warps": warps}


def _tile(queries: int, keys: int, stages: int, warps: int) -> dict[str, int]:
    return _sizes(stages, warps, QUERIES=queries, KEY_TILE=keys)


BY_TMA = ", by TMA"  # ends the name of the variant of a kernel whose tiles are copied by it: it has sizes of its own
_SCALAR = _tile(64, 16, 1, 8)  # scalar units, for tests
# Three programs of 64 queries fit a multiprocessor: one computes while the others wait.
_THREE_PROGRAMS = _tile(64, 128, 1, 4) | {"maxnreg": 168}
_TWO_PROGRAMS = {"num_warps": 8, "maxnreg": 128}  # one loads while the other computes
# Tiles of 64 keys leave room for prefetching and need it: 483 TF with three stages, 431 TF with one.
_PREFETCHED = _tile(64, 64, 3, 4)
_INT8 = _sizes(1, 4, KEY_TILE=128, maxnreg=168)

CONFIGS: dict[str, dict[str, dict[str, int]]] = {
    "attention": {"float32": _SCALAR, "tma": _THREE_PROGRAMS, "": _tile(128, 64, 3, 8)},
    "attention, blocks of 64": {"": _PREFETCHED},
    "attention, masks": {  # they take shared memory too
        "tma": _THREE_PROGRAMS, "sm90": _PREFETCHED, "sm100": _tile(128, 64, 2, 16), "": _tile(128, 64, 2, 8),
    },
    # 512 tokens, 8 heads of 64: 7.1 us with tiles of 128 keys and three stages, 7.5 us with two, 8.8 us with one
    "attention, masks, heads of 64": {
        "sm90": _tile(64, 128, 3, 4), "sm100": _tile(128, 64, 2, 16), "": _tile(128, 64, 2, 8),
    },
    "attention, masks, blocks of 64": {"sm90": _PREFETCHED, "sm100": _tile(64, 64, 2, 16), "": _tile(64, 64, 2, 4)},
    "attention, pv_threshold": {"tma": _THREE_PROGRAMS, "sm100": _tile(64, 128, 2, 16), "": _tile(64, 128, 2, 8)},
    "attention, pv_threshold, blocks of 64": {
        "tma": _PREFETCHED, "sm100": _tile(64, 64, 1, 16), "": _tile(64, 64, 1, 4),
    },
    "attention, int8": {
        "float32": _sizes(1, 4, KEY_TILE=32), "sm90": _INT8, "sm100": _INT8, "": _sizes(2, 4, KEY_TILE=64),
    },
    # a step is a whole tile
    "attention, int8, pv_threshold": {
        "sm90": _INT8, "sm100": _sizes(2, 16, KEY_TILE=128), "": _sizes(2, 8, KEY_TILE=128),
    },
    # 5% of 512 x 512 tiles, 12 heads of 128 on one H200: dQ 571 TF and dK, dV 627 TF; in tiles of 32 tokens 554 and 558
    "attention, backward": {"float32": _sizes(1, 8, TILE=16), "tma": _sizes(2, 4, TILE=64), "": _sizes(2, 4, TILE=32)},
    # every key single, 12 heads of 128, 32760 tokens on one H200: 14.6 ms, with two stages 21.5 ms
    "single keys": {
        "float32": _SCALAR, "sm90": _tile(128, 64, 3, 8), "sm100": _tile(128, 64, 3, 8),
        "sm120": _tile(128, 32, 2, 8), "": _tile(128, 64, 2, 8),
    },
    "single keys, blocks of 64": {
        "float32": _SCALAR, "sm90": _PREFETCHED, "sm100": _tile(64, 64, 3, 8), "": _tile(64, 64, 2, 8),
    },
    "key selection, sums": {"float32": _SCALAR, "sm90": _tile(64, 128, 1, 4), "": _tile(64, 64, 2, 4)},
    "key selection, bits": {"float32": _SCALAR, "": _PREFETCHED},
    "linear attention, states, blocks of 128": {"sm120": {"num_warps": 8, "maxnreg": 168}, "": _TWO_PROGRAMS},
    "linear attention, states, blocks of 64": {"sm90": {"num_warps": 4, "maxnreg": 168}, "": _TWO_PROGRAMS},
    "linear attention, outputs": {"": _TWO_PROGRAMS},
    "linear attention, gradients": {"": {"num_warps": 8}},
    # dense 4608 x 3072 x 3072 in bf16 on one H200: 0.135 ms plain, 0.19 ms fused; GEMM-O 0.16 ms; F.linear 0.12 ms
    "GEMM-Q": {
        "float32": _sizes(2, 8, K_TILE=32), "sm90": _sizes(3, 8, K_TILE=64), "sm100": _sizes(3, 8, K_TILE=64),
        "": _sizes(3, 8, K_TILE=32),
    },
    "GEMM-Q, norm and RoPE": {
        "float32": _sizes(2, 8, K_TILE=32), "sm90": _sizes(3, 8, K_TILE=128), "sm100": _sizes(3, 8, K_TILE=128),
        "": _sizes(3, 8, K_TILE=32),
    },
    "GEMM-O": {
        "float32": _sizes(2, 8, N_TILE=64, K_TILE=32), "sm90": _sizes(3, 8, N_TILE=256, K_TILE=64),
        "sm100": _sizes(3, 8, N_TILE=128, K_TILE=64), "": _sizes(3, 8, N_TILE=128, K_TILE=32),
    },
    "linear layers": {
        "sm90": _sizes(4, 8, ROWS=128, COLUMNS=256, CHANNELS=128),
        "sm100": _sizes(4, 8, ROWS=128, COLUMNS=128, CHANNELS=128),
        "": _sizes(3, 8, ROWS=128, COLUMNS=128, CHANNELS=64),
    },
}  # fmt: skip


def config(kernel: str, tensor: torch.Tensor, by_descriptor: bool = False) -> dict[str, int]:
    """Return a kernel's sizes for the dtype and device of ``tensor``; ``by_descriptor``: tiles are copied by TMA."""
    return _config(kernel + BY_TMA * by_descriptor, tensor.device, tensor.dtype == torch.float32)


def architecture(device: torch.device) -> str:
    """Return the column of a device: the first GPU of its generation from sm90 on; "" for a CPU."""
    if device.type != "cuda":
        return ""
    properties = device_properties(device)
    return f"sm{properties.major}{properties.minor if properties.major == 8 else 0}"


@functools.cache  # called at every launch
def _config(variant: str, device: torch.device, is_float32: bool) -> dict[str, int]:
    if not is_float32 and variant in own_sizes(device):
        return own_sizes(device)[variant]
    kernel, columns = variant.removesuffix(BY_TMA), ["float32"] * is_float32 + ["tma"] * variant.endswith(BY_TMA)
    shipped = CONFIGS[kernel]
    return next(shipped[column] for column in (*columns, architecture(device), "") if column in shipped)


def sizes_file(device: torch.device) -> Path:
    """File of the sizes that were measured on a GPU with this compiler, in place of those shipped now."""
    gpu = torch.cuda.get_device_name(device).replace("/", " ") if device.type == "cuda" else device.type
    shipped = hashlib.sha256(repr((CONFIGS, BY_TMA)).encode()).hexdigest()[:8]
    return cache_folder() / f"{gpu}, triton {triton.__version__}, in place of {shipped}.json"


@functools.cache
def own_sizes(device: torch.device) -> dict[str, dict[str, int]]:
    """Sizes by variant that were measured on this GPU; none without a file that can be read, or that holds others."""
    try:
        found = dict(json.loads(sizes_file(device).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
    return {variant: sizes for variant, sizes in found.items() if _are_sizes(sizes, variant)}


def _are_sizes(found: object, variant: str) -> bool:
    """Return True for whole numbers by the names of a kernel's sizes; the bound on registers may be missing."""
    shipped = CONFIGS.get(variant.removesuffix(BY_TMA), {}).values()
    is_known = isinstance(found, dict) and any({*found, "maxnreg"} == {*sizes, "maxnreg"} for sizes in shipped)
    return is_known and all(type(value) is int for value in found.values())


def launch_with(device: torch.device, variant: str, sizes: dict[str, int] | None) -> None:
    """Launch a kernel, or its variant :data:`BY_TMA`, with these sizes from now on; None = as shipped."""
    own_sizes(device).pop(variant, None)
    own_sizes(device).update({} if sizes is None else {variant: sizes})
    _config.cache_clear()
