"""Share a pipeline's work among several processes with one device each, as torchrun starts them."""

from __future__ import annotations  # a torch without distributed has no ProcessGroup

from typing import Any

import torch
import torch.distributed as dist

from dit_accel.errors import UnsupportedError, require_counts
from dit_accel.models import denoisers
from dit_accel.models.families import known_family
from dit_accel.models.hooks import before_splits, stateless
from dit_accel.models.parallel.branches import GROUP
from dit_accel.models.parallel.context_parallel import config_of, split_plan


def parallelize_pipeline(pipe: Any, *, ulysses: int = 1, branches: int = 1) -> Any:
    """Run a pipeline on several devices, in place, and return it; before or after ``accelerate_pipeline``.

    Every process calls the pipeline with the same arguments and gets the same result.

    Args:
        pipe: a diffusers pipeline with a transformer, loaded by every process on its own device.
        ulysses: number of devices that share the tokens of a transformer call (diffusers' context parallelism). Calls
            are fastest if it divides the numbers of tokens and of heads; otherwise diffusers' "Ulysses Anything" runs.
        branches: number of devices, or of groups of ``ulysses`` devices, that share branches of guidance: 2 if the
            pipeline calls its transformer with and without the prompt. Needs ``accelerate_pipeline``, any preset.

    Raises:
        UnsupportedError: not ``ulysses * branches`` processes, a model that can't share tokens, or a parallel pipeline.
    """
    transformers = denoisers(pipe)
    _check(transformers, ulysses, branches)
    device = next(next(iter(transformers.values())).parameters()).device.type
    mesh = dist.init_device_mesh(device, (branches, 1, ulysses), mesh_dim_names=("branch", "ring", "ulysses"))
    for transformer in transformers.values():
        if ulysses > 1:
            _share_tokens(transformer, ulysses, mesh)
        if branches > 1:
            setattr(transformer, GROUP, mesh["branch"].get_group())
    return pipe


def _check(transformers: dict[str, torch.nn.Module], ulysses: int, branches: int) -> None:
    require_counts(ulysses=ulysses, branches=branches)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ulysses * branches != ranks or ranks == 1:
        rule = f"must be the number of processes, at least 2, got {ulysses} × {branches} and {ranks}"
        fix = "start as many with torchrun --nproc-per-node, and call torch.distributed.init_process_group() in each"
        raise UnsupportedError(f"ulysses × branches {rule}: {fix}")
    for name, transformer in transformers.items():
        if config_of(transformer) is not None or getattr(transformer, GROUP, None) is not None:
            raise UnsupportedError(f"pipe.{name} is parallel already: reload the pipeline to change it")
        heads = getattr(transformer.config, "num_attention_heads", ulysses)
        if -heads % ulysses >= -(-heads // ulysses):
            rule = "ulysses must leave no device without a head"
            raise UnsupportedError(f"{rule}: {ulysses} devices can't share the {heads} attention heads of pipe.{name}")
        if ulysses > 1 and split_plan(transformer, known_family(transformer)) is None:
            why = f"ulysses must be 1 for {type(transformer).__name__}, whose tokens diffusers has no plan to split"
            raise UnsupportedError(f"{why}; branches may be 2 if the pipeline calls it twice for guidance")


def _share_tokens(transformer: torch.nn.Module, ulysses: int, mesh: dist.DeviceMesh) -> None:
    from diffusers import ContextParallelConfig

    divides_heads = getattr(transformer.config, "num_attention_heads", ulysses) % ulysses == 0
    config = ContextParallelConfig(ulysses_degree=ulysses, mesh=mesh, ulysses_anything=not divides_heads)
    plan = split_plan(transformer, known_family(transformer))
    count = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: max(1, count())  # diffusers divides by it, on CPUs too
    try:
        transformer.enable_parallelism(config=config, cp_plan=plan)
    finally:
        torch.accelerator.device_count = count
    if divides_heads:
        _allow_any_size(transformer, ulysses)


def _allow_any_size(transformer: torch.nn.Module, ulysses: int) -> None:
    """Let diffusers share out tokens that the devices do not divide; its exchange then first asks for all sizes."""
    config = config_of(transformer)

    @stateless
    def begin(*_: Any) -> None:
        config.ulysses_anything = False

    def watch(x: torch.Tensor, axis: int) -> None:
        if x.shape[axis] % ulysses:
            config.ulysses_anything = True

    transformer.register_forward_pre_hook(begin)
    before_splits(transformer, watch)
