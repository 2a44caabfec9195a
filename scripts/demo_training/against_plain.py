"""Compare presets on a demo model with its plain runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dit_accel import Preset, RunReport
from dit_accel.pipeline import accelerated
from dit_accel.tools.measure.timing import run_pipeline

from .prompts import HeldOutPrompt


class AgainstPlain:
    """Runs prompts plainly once, and again with each preset; `arguments` are the call's, except prompt and generator.

    `plain`: the plain output of each prompt, float32 `[frames, 3, height, width]` in 0..1.
    """

    def __init__(self, pipe: Any, arguments: dict[str, Any], prompts: Sequence[HeldOutPrompt]) -> None:
        self.pipe = pipe
        self.arguments = arguments
        self.prompts = prompts
        self.plain = [self._call(prompt) for prompt in prompts]

    def runs(self, preset: Preset) -> Iterator[tuple[torch.Tensor, torch.Tensor, RunReport]]:
        """Yield for each prompt the output with the preset, the plain output, like `plain`, and the report."""
        for prompt, plain in zip(self.prompts, self.plain, strict=True):
            with accelerated(self.pipe, preset):
                output = self._call(prompt)
                report = self.pipe.dit_accel.report()
            yield output, plain, report

    def _call(self, prompt: HeldOutPrompt) -> torch.Tensor:
        return run_pipeline(self.pipe, self.arguments, prompt.prompt, prompt.seed)["frames"]
