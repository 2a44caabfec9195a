"""The demo models that ship, as scripts load them."""

from __future__ import annotations

import torch
from diffusers import DiffusionPipeline

from dit_accel.tools.demo import demo_path


def load_demo(model: str, dtype: str, device: str) -> DiffusionPipeline:
    """A demo model's pipeline without a progress bar; `dtype` is torch's name of one."""
    pipe = DiffusionPipeline.from_pretrained(demo_path(model), torch_dtype=getattr(torch, dtype)).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe
