#!/usr/bin/env python3
"""Run a command of dit-accel on a full-size pipeline with random weights, which need no download.

    python -m scripts.bench.random_weights report --model flux.1-dev-random-weights --minutes 2
    python -m scripts.bench.random_weights generate --model flux.1-dev-random-weights --offload group --prompt a

Only time and memory count: the images are noise, and forecasts of such outputs fail, so that presets compute all steps.
"""

import sys
from typing import Any
from unittest.mock import patch

from dit_accel.__main__ import main
from dit_accel.errors import ArgumentError
from dit_accel.serving import loading
from scripts.bench.call_speed.pipelines import CASES, build

MARK = "-random-weights"
NAMES = {case.model + MARK: case for case in reversed(CASES.values())}


def run(*, tiny: bool = False) -> None:
    def from_nothing(name: str, *_: Any, **__: Any) -> Any:
        if name not in NAMES:
            raise ArgumentError("model", f"must be one of {', '.join(NAMES)}, got {name}")
        return build(NAMES[name], tiny=tiny)

    with patch.object(loading, "resolve_model", str), patch.object(loading, "_from_pretrained", from_nothing):
        main()


if __name__ == "__main__":
    sys.exit(run())
