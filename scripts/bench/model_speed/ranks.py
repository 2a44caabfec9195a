"""Processes started by torchrun, each with its own device, and a model whose tokens they share."""

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

LIMIT = timedelta(seconds=120)  # time limit of a rank that waits for another


def join(smoke: bool, stack: ExitStack) -> tuple[int, int]:
    """Return this process's rank and the number of ranks (only under torchrun); ``smoke``: on CPUs."""
    if smoke:
        ranks = int(os.environ["WORLD_SIZE"])
        stack.enter_context(
            patch.object(torch.accelerator, "device_count", lambda: ranks)
        )  # diffusers needs gloo for CPUs
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
    """Let all ranks share the tokens of a transformer's calls from now on."""
    plan = split_plan(transformer, known_family(transformer))
    config = ContextParallelConfig(ulysses_degree=ranks, ulysses_anything=smoke)  # toy sizes are odd
    transformer.enable_parallelism(config=config, cp_plan=plan)


def on_any(mine: bool) -> bool:
    """Return True if ``mine`` is true on any rank; a rank that hangs ends the run of all."""
    flag = torch.tensor([float(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
