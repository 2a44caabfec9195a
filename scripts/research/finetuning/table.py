"""SLA's tables 2 and 3 on a demo model: every variant before and after the same fine-tuning, and the dense model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dit_accel.sla.swap import load_swapped, save_swapped
from dit_accel.tools.demo import demo_arguments
from scripts.demo_training.loading import load

from .calls import record_calls
from .judging import hold_out, judge, paint
from .subjects import Subject
from .training import Training, fine_tune
from .variants import VARIANTS

RECORDED_AT_ONCE = 64  # prompts
COLUMNS = {  # figure: its heading and its form
    "psnr_db": ("PSNR dB", lambda value: "∞" if value is None else f"{value:.1f}"),
    "velocity_mse": ("velocity MSE", lambda value: f"{value:.5f}"),
    "flow_loss": ("flow loss", lambda value: "" if value is None else f"{value:.5f}"),
    "agreement": ("all attributes right", lambda value: f"{value['all']:.0%}"),
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the experiment: training prompts, kept share of the dense model's calls for them, and held-out prompts.

    `changes`: of a call's arguments; `variants`: their names, none = the subject's own.
    """

    prompts: int
    share: float
    held_out: int
    changes: dict[str, int]
    training: Training
    variants: tuple[str, ...] = ()


FULL = Sizes(
    prompts=256,
    share=0.5,
    held_out=24,
    changes={"num_inference_steps": 25},
    training=Training(steps=2000, batch=16, rate=5e-4, seconds=150),
)
SMOKE = Sizes(
    prompts=2,
    share=0.5,
    held_out=2,
    changes={"num_inference_steps": 2, "height": 192, "width": 192},
    training=Training(steps=2, batch=2, rate=5e-4),
    variants=("sparse-95", "sla-95"),
)


def rows(subject: Subject, model: Path, sizes: Sizes, device: torch.device, folder: Path) -> Iterator[Row]:
    """Yield the figures of the dense model in a folder, then those of each variant, which trains in ``folder``."""
    call, dtype = {**demo_arguments(model), **sizes.changes}, torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = load(model, dtype).to(device)
    prompts, _ = subject.draw(sizes.prompts, seed=1)
    calls = record_calls(pipe, prompts, call, share=sizes.share, batch=RECORDED_AT_ONCE, seed=0)
    held_out = hold_out(subject, pipe, sizes.held_out, call)
    yield {"variant": "dense", "critical": 1.0, "before": judge(pipe, held_out.dense, held_out)}
    calls = calls.to(device, dtype)
    for name in sizes.variants or subject.variants:
        variant, pipe = VARIANTS[name], load(model, dtype).to(device)
        variant.swap_in(pipe)
        before = judge(pipe, paint(subject, pipe, held_out.prompts, call), held_out)
        log = fine_tune(pipe.transformer, calls, sizes.training, folder / name)
        save_swapped(pipe, folder / name)
        load_swapped(pipe, folder / name)
        after = judge(pipe, paint(subject, pipe, held_out.prompts, call), held_out)
        yield {"variant": name, "critical": variant.critical, "before": before, "after": after, **log}


def table(found: list[Row]) -> str:
    """Rows as Markdown; the dense model has only figures before fine-tuning."""
    heads = [f"{heading} {when}" for heading, _ in COLUMNS.values() for when in ("before", "after")]
    lines = [f"| attention | critical tiles | steps | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for row in found:
        cells = [
            form(row[when].get(key)) if when in row else ""
            for key, (_, form) in COLUMNS.items()
            for when in ("before", "after")
        ]
        lines.append(f"| {row['variant']} | {row['critical']:.0%} | {row.get('steps', '')} | {' | '.join(cells)} |")
    return "\n".join(lines)
