"""Fine-tune a transformer with SLA, with accelerate: on one device, or on several by `accelerate launch`."""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from dit_accel.sla.swap import swapped_attention
from scripts.demo_training.training import MasterWeights, Pace, finite, trained_weights
from scripts.tables import as_json

from .calls import Calls, velocity_error

AVERAGE = 0.99  # decay of the running average of the weights, which is the result of training
LOOK_EVERY = 10  # steps between time checks, each of which waits for the device
LOG = "training.json"
STATE = "state"


@dataclass(frozen=True)
class Training:
    """Length and rates of a training; the rate rises first and falls to 2% by the last step.

    `batch`: calls per step and process. `rate`: peak rate of AdamW; matrices use it as in `MasterWeights`, and SLA's
    projections, which start at zero, `projection_rate` times it. `seconds`: time limit of the training, which the rate
    follows if it is shorter than the steps. `minutes`: of this run; another run with the same settings resumes.
    """

    steps: int
    batch: int
    rate: float
    projection_rate: float = 10.0
    seed: int = 0
    seconds: float = math.inf
    minutes: float = math.inf


class Budget(Pace):
    """Steps and time, including the time of earlier runs; the one nearer to its end counts."""

    def __init__(self, training: Training, earlier: dict[str, Any]) -> None:
        super().__init__("sla", training.seconds, training.rate, most_steps=training.steps)
        self.steps, self.losses, self.earlier = earlier["steps"], earlier["losses"], earlier["seconds"]

    @property
    def elapsed(self) -> float:
        """Seconds of all runs."""
        return self.earlier + time.monotonic() - self.started

    @property
    def spent(self) -> float:
        return min(1.0, max(super().spent, self.elapsed / self.seconds))


def fine_tune(transformer: nn.Module, calls: Calls, training: Training, folder: Path) -> dict[str, Any]:
    """Train the weights that require a gradient, in place, and return the log; they become their running average.

    After the last step, and when the time is up, it saves `training.json` and accelerate's state in `folder`, from
    which the next run resumes. `calls` are on the transformer's device and in its dtype. Raises ValueError if `folder`
    holds the state of a training with other settings.
    """
    accelerator = Accelerator(mixed_precision="no", cpu=transformer.device.type == "cpu")
    masters = [weight.detach().clone().float() for _, weight in trained_weights(transformer)]
    names = [name for name, _ in trained_weights(transformer) if name.endswith("projection.weight")]
    rates = dict.fromkeys(names, training.projection_rate)
    weights = MasterWeights(transformer, masters, average_decay=AVERAGE, rates=rates)
    student = accelerator.prepare(transformer.train())
    accelerator.register_for_checkpointing(weights)
    settings = _settings(transformer, calls, training)
    budget = Budget(training, _resume(accelerator, settings, folder))
    running = None
    while budget.spent < 1:
        rows, generator = _draw(len(calls), training, budget.steps, accelerator)
        loss = velocity_error(student, calls.rows(rows), generator)
        accelerator.backward(loss)
        weights.step(budget.rate)
        running = loss.detach() if running is None else torch.lerp(running, loss.detach(), 0.05)
        budget.count(training.batch, lambda loss=running: finite({"loss": loss}), every=50)
        if budget.steps % LOOK_EVERY == 0:
            if time.monotonic() - budget.started > 60 * training.minutes:
                accelerator.set_trigger()
            if accelerator.check_trigger():  # all processes stop at the same step
                break
    accelerator.save_state(str(folder / STATE))
    log = {"settings": settings, "steps": budget.steps, "seconds": round(budget.elapsed, 1), "losses": budget.losses}
    if accelerator.is_main_process:
        (folder / LOG).write_text(as_json(log))
    weights.load_averages()
    transformer.eval()
    return log


def _settings(transformer: nn.Module, calls: Calls, training: Training) -> dict[str, Any]:
    """Settings that all runs of one training share."""
    attention = next(iter(swapped_attention(transformer).values()))
    objective = {"objective": "flow" if calls.velocity is None else "teacher", "calls": len(calls)}
    values = {key: value for key, value in asdict(training).items() if key not in ("seconds", "minutes")}
    return values | asdict(attention.settings) | objective


def _resume(accelerator: Accelerator, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load the state of earlier runs and return their log."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / LOG).exists():
        return {"steps": 0, "seconds": 0.0, "losses": []}
    log = json.loads((folder / LOG).read_text())
    if log["settings"] != settings:
        raise ValueError(
            f"{folder} holds a training with {log['settings']}, got {settings}: "
            "give the same settings or another folder"
        )
    accelerator.load_state(str(folder / STATE))
    return log


def _draw(count: int, training: Training, step: int, accelerator: Accelerator) -> tuple[torch.Tensor, torch.Generator]:
    """Return the rows of a step and its noise generator: the same whether a run was interrupted or not."""
    seed = (training.seed * training.steps + step) * accelerator.num_processes + accelerator.process_index
    rows = torch.randint(count, (training.batch,), generator=torch.Generator().manual_seed(seed))
    return rows.to(accelerator.device), torch.Generator(accelerator.device).manual_seed(seed)
