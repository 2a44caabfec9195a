"""Branches of guidance on different devices: one device computes each branch and sends the output to the others.

A pipeline reads the outputs after all calls of a step. So a call for another device's branch returns a placeholder
tensor at once. Outputs are sent in the order of the calls. The loop on every device sees all of them, makes the same
decisions, and can forecast both branches: steps that run no block send nothing.
"""

from __future__ import annotations  # a torch without distributed has no ProcessGroup

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from dit_accel.errors import UnsupportedError
from dit_accel.loop.branch import Call
from dit_accel.models.beside.control_net import TensorForm, call_form, deferred
from dit_accel.models.parallel.context_parallel import parallel_degree, shares_layers

GROUP = "_dit_accel_branch_group"  # attribute of a transformer: the group of devices that share its branches


def is_shared(transformer: nn.Module) -> bool:
    """Return True if several processes share the transformer's calls: their tokens, layers or branches."""
    has_group = getattr(transformer, GROUP, None) is not None
    return has_group or parallel_degree(transformer) > 1 or shares_layers(transformer)


class SharedBranches:
    """Runs a transformer's calls, or receives their outputs from another device."""

    def __init__(self, transformer: nn.Module) -> None:
        self._transformer = transformer
        self._forms: dict[tuple, tuple[Any, Any]] = {}  # forms of outputs, and of observed outputs, by kind of call

    def run(self, session: Any, call: Call, passed: Any, compute: Callable, observe: Callable[[Any], Any]) -> Any:
        """Return the output of a call that is not forecast.

        The first call of its kind runs on all devices, because the form of the output is not known yet. ``observe``
        takes the output from any device, and returns the output for the pipeline. A form that other devices can't
        receive, because an earlier call had another, is an UnsupportedError.
        """
        if (group := getattr(self._transformer, GROUP, None)) is None:
            return observe(compute())
        kind = self._kind(call, passed)
        owner, known = call.place % dist.get_world_size(group), self._forms.get(kind)
        is_own = owner == dist.get_rank(group)
        if known is not None and not is_own:
            form, standing = known
            return self._awaited(
                session, standing, lambda: observe(_sent(pytree.tree_map_only(TensorForm, _empty, form), owner, group))
            )
        output = compute()
        if not is_own:
            call.branch.sites.clear()  # another device has the blocks' records of this branch
        session.run.branches.settle()
        form = pytree.tree_map_only(torch.Tensor, TensorForm.of, output)
        if known is not None and form != known[0]:
            rule = "with branches=2 equal calls of the transformer must give equal forms of output"
            raise UnsupportedError(f"{rule}, got {form} after {known[0]}: run the pipeline on one device")
        result = observe(_sent(output, owner, group))
        self._forms[kind] = form, pytree.tree_map_only(torch.Tensor, TensorForm.of, result)
        return result

    def _kind(self, call: Call, passed: Any) -> tuple:
        """Key of everything that decides the form of a call's output."""
        weight = next(self._transformer.parameters())
        device = weight.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return call_form(passed), call.branch.shapes, weight.dtype, cast

    def _awaited(self, session: Any, form: Any, receive: Callable[[], Any]) -> Any:
        """Return a placeholder of that form, which receives the output when it is first read."""
        received: list[Any] = []
        pipeline = session.pipeline
        session.run.branches.awaited.append(lambda: received.append(receive()))

        def settled() -> Any:
            session.begin(pipeline)
            try:
                session.run.branches.settle()
            finally:
                session.end()
            if not received:
                raise UnsupportedError("the output of another device's branch was read after its run had ended")
            return received[0]

        return deferred(form, settled)


def _sent(output: Any, owner: int, group: dist.ProcessGroup) -> Any:
    def send(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, dist.get_global_rank(group, owner), group=group)
        return tensor

    return pytree.tree_map_only(torch.Tensor, send, output)


def _empty(form: TensorForm) -> torch.Tensor:
    return torch.empty(form.shape, dtype=form.dtype, device=form.device)
