"""Processes that torchrun started, each with a device of its own, and a model whose tokens they share."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

from dit_accel.models.families import known_family
from dit_accel.models.parallel.context_parallel import split_plan

LIMIT = timedelta(seconds=120)  # after which a rank that waits for another gives up


def join(smoke: bool, stack: ExitStack) -> tuple[int, int]:
    """This process's rank and their number; ``smoke`` on CPUs. Under torchrun alone."""
    if smoke:
        ranks = int(os.environ["WORLD_SIZE"])
        stack.enter_context(
            patch.object(torch.accelerator, "device_count", lambda: ranks)
        )  # diffusers asks it for CPUs
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("gloo" if smoke else "cpu:gloo,cuda:nccl", timeout=LIMIT)
        stack.callback(dist.destroy_process_group)
    stack.enter_context(torch.no_grad())
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    return dist.get_rank(), dist.get_world_size()


def share_tokens(transformer: torch.nn.Module, ranks: int, smoke: bool) -> None:
    """From here on all ranks share the tokens of a transformer's calls."""
    plan = split_plan(transformer, known_family(transformer))
    config = ContextParallelConfig(ulysses_degree=ranks, ulysses_anything=smoke)  # toy sizes are odd
    transformer.enable_parallelism(config=config, cp_plan=plan)


def on_any(mine: bool) -> bool:
    """Whether it is so on any rank; also where they are still in step, which a stuck one ends for all."""
    flag = torch.tensor([float(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
