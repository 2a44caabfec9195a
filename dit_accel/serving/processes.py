"""Processes that load pipelines: their warnings, and those that torchrun starts to share one pipeline."""

import logging
import os
import warnings
from datetime import timedelta

from dit_accel.errors import ArgumentError

LONGEST_WAIT = timedelta(minutes=10)  # for another process, which may still load its weights
# Loggers that warn about binaries and types of torchao that nothing here uses.
TALKATIVE = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao")


def silence_libraries() -> None:
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    # By module, or by file for warnings of the compiler. Python's own options, such as -W error, come first.
    warnings.filterwarnings("ignore", module=r"(.*[/\\])?torch(ao|vision)\b", append=True)


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def leads() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def join(degrees: dict[str, int], device: str | None) -> str | None:
    if not degrees:
        return device
    import torch
    import torch.distributed as dist

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        place, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if place >= count:
            raise ArgumentError("parallel", f"needs a GPU for each of {ranks()} processes, but there are {count}")
        torch.cuda.set_device(place)
        device = f"cuda:{place}"
    elif device != "cpu":
        raise ArgumentError("device", f"must be cuda or cpu with --parallel, which assigns GPUs itself, got {device}")
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=LONGEST_WAIT)
    return device
