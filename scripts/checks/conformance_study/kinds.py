"""Kinds of acceleration, and classes of tests that fail only when accelerated.

A *failure* of a kind is a test that passes plainly and fails with it in one of these ways:

| class | meaning |
|---|---|
| crash | any exception except an assertion's, from torch, diffusers or (by accident) this plugin |
| shape | an assertion on a shape, a type, a dtype, a length or NaN |
| assertion | another assertion, with a kind that must give the plain outputs (`exact`, `fused`, `autoencoders`) |
| timeout | the test takes longer than `--seconds` |
| lost | the process ended without a result |

These classes are counted separately, because the plugin works as documented:

| class | meaning |
|---|---|
| values | another assertion, with a kind that changes outputs: on numbers, or on their consequences |
| inspects | an assertion on the hooks or attributes of a module, where the test accepts only diffusers' own |
| refused | the plugin's own error (`DitAccelError`), whose message says what to do |
"""

from __future__ import annotations

import re
from typing import Any

import torch

from dit_accel import Preset, accelerate_pipeline, load_preset
from dit_accel.errors import DitAccelError, UnsupportedError
from dit_accel.kernels.checks import FLOAT_DTYPES
from dit_accel.models.call_facts import CallReader
from dit_accel.models.families import family_of

EVERY_SECOND = {"control": "interval", "warmup": 0, "interval": 2, "cooldown": 0}
FORECAST = {"level": "output", "method": "newton", "order": 1}
FLASHOMNI = {"flux": "flux-flashomni-paper", "hunyuan_video": "hunyuan-flashomni-paper", "wan": "wan21-flashomni"}
KINDS = ("exact", "fused", "balanced", "forecast", "flashomni")
AUTOENCODERS = "autoencoders"  # of diffusers' tests of autoencoders; the others are of pipelines
PLAIN_OUTPUTS = ("exact", "fused", AUTOENCODERS)
FAILURES = ("crash", "shape", "assertion", "timeout", "lost")
APART = ("values", "inspects", "refused")
_SHAPE = re.compile(r"shape|dtype|isinstance|\btype\b|\blen\(|length|nan\b", re.IGNORECASE)
_INSPECTS = re.compile(r"hook", re.IGNORECASE)


def accelerate(pipe: Any, kind: str) -> None:
    """Accelerate a pipeline with this kind.

    `exact` and `balanced` are the presets; `fused` is `exact` with fused kernels, as on a GPU; `forecast` computes
    every second step and `flashomni` works inside the blocks of every second step, both from the first step on, because
    tests run only two or three.

    Raises:
        UnsupportedError: the pipeline is unsupported, or has no preset of this kind.
    """
    accelerate_pipeline(pipe, _preset(pipe, kind))


def _preset(pipe: Any, kind: str) -> Preset | str | None:
    if kind == "forecast":
        return load_preset("balanced", schedule=EVERY_SECOND, forecast=FORECAST)
    if kind == "flashomni":
        family = family_of(pipe)
        if family not in FLASHOMNI:
            raise UnsupportedError(f"no FlashOmni preset fits; families with one: {', '.join(FLASHOMNI)}")
        return load_preset(FLASHOMNI[family], schedule=EVERY_SECOND, blocks={"size": 64})
    return {"exact": "exact", "fused": "exact", "balanced": None}[kind]


def fuses_kernels(reader: CallReader, x: torch.Tensor) -> bool:
    """Return True if a GPU would run fused kernels, and also for float32: their references run on this device."""
    is_plain = not torch.is_autocast_enabled(x.device.type) and not torch.is_grad_enabled()
    return is_plain and x.dtype in FLOAT_DTYPES


def cuts_padding(reader: CallReader, device: torch.device, is_compiled: bool) -> bool:
    """Return True if blocks are fused, as a GPU does."""
    return reader.family.cut is not None


def found(error: BaseException, statement: str, kind: str) -> str:
    """Return the class of a test's failure.

    Args:
        statement: source of the line that raised the error.
    """
    if isinstance(error, DitAccelError):
        return "refused"
    if isinstance(error, TimeoutError):
        return "timeout"
    if not isinstance(error, AssertionError):
        return "crash"
    if _INSPECTS.search(f"{statement} {error}"):
        return "inspects"
    if _SHAPE.search(statement) or _SHAPE.search(str(error).partition("\n")[0]):
        return "shape"
    return "assertion" if kind in PLAIN_OUTPUTS else "values"
