"""Fine-tuning of a transformer with SLA in it, by accelerate: on one device, or on several by `accelerate launch`."""

from __future__ import annotations

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

from .calls import Calls, velocity_error

AVERAGE = 0.99  # decay of the running average of the weights, which is what a training gives
LOOK_EVERY = 10  # steps between looks at the clock, each of which waits for the device
LOG = "training.json"
STATE = "state"


@dataclass(frozen=True)
class Training:
    """How long and how fast.

    Args:
        steps: of the whole training; the rate rises at first and then falls to 2% by the last of them.
        batch: calls in each step and process.
        rate: of AdamW, at its peak; orthogonalised steps of matrices take it as `MasterWeights` says.
        projection_rate: times which SLA's projections are faster than other matrices, for they begin at zero.
        seed: of the rows and the noise of each step.
        seconds: within which the training ends whatever steps are left, the rate having fallen.
        minutes: after so many this run stops, and another one with the same settings goes on.
    """

    steps: int
    batch: int
    rate: float
    projection_rate: float = 10.0
    seed: int = 0
    seconds: float = math.inf
    minutes: float = math.inf


class Budget(Pace):
    """Steps, and time that earlier runs may have begun to spend: what is nearer its end counts."""

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
    """Train what requires a gradient, in place, and return the log; the weights become their running average.

    After the last step and when the time is up it leaves `training.json` and accelerate's state in `folder`, from which
    the next run goes on.

    Args:
        transformer: with SLA swapped in. It computes in its own dtype; what is trained is kept in float32 beside it.
        calls: what to learn, on the transformer's device and in its dtype.
        training: how.
        folder: for the state.

    Raises:
        ValueError: `folder` holds the state of a training with other settings.
        FloatingPointError: the loss is infinite or not a number.
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
            if accelerator.check_trigger():  # all processes stop together
                break
    accelerator.save_state(str(folder / STATE))
    log = {
        "settings": settings,
        "steps": budget.steps,
        "seconds": round(budget.elapsed, 1),
        "losses": budget.losses,
    }
    if accelerator.is_main_process:
        (folder / LOG).write_text(json.dumps(log, indent=1) + "\n")
    weights.load_averages()
    transformer.eval()
    return log


def _settings(transformer: nn.Module, calls: Calls, training: Training) -> dict[str, Any]:
    """What the runs of one training have in common."""
    attention = next(iter(swapped_attention(transformer).values()))
    objective = {"objective": "flow" if calls.velocity is None else "teacher", "calls": len(calls)}
    given = {key: value for key, value in asdict(training).items() if key not in ("seconds", "minutes")}
    return given | asdict(attention.settings) | objective


def _resume(accelerator: Accelerator, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The log of earlier runs, with the state that they left loaded."""
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
    """Rows of a step, and where its noise comes from: the same whether a run was interrupted or not."""
    seed = (training.seed * training.steps + step) * accelerator.num_processes + accelerator.process_index
    rows = torch.randint(count, (training.batch,), generator=torch.Generator().manual_seed(seed))
    return rows.to(accelerator.device), torch.Generator(accelerator.device).manual_seed(seed)
