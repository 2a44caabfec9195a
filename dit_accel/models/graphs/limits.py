"""Reasons why computed steps can't run as CUDA graphs; ``StepGraphs._why_not`` collects them and others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dit_accel.loop.branch import Call
from dit_accel.loop.conditioning import PLAIN_TENSORS
from dit_accel.loop.torch_modes import watches_all_calls
from dit_accel.models import hooks
from dit_accel.models.stored_weights import is_readable
from dit_accel.presets import Preset

VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)  # types of arguments in a graph's key
PARALLEL_HOOKS = ("ContextParallelSplitHook", "ContextParallelGatherHook")  # diffusers', since 0.36


def why_not_preset(preset: Preset) -> str | None:
    if any(variant.refresh > 1 for variant in preset.skip.variants):
        return "masks are kept from step to step (skip.refresh)"
    if any(variant.probe_blocks for variant in preset.skip.variants):
        return "the probe looks at other queries in each step (skip.probe_blocks)"
    return None


def why_not_call(call: Call, leaves: Sequence) -> str | None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    unknown = (leaf for leaf in leaves if type(leaf) not in PLAIN_TENSORS and not isinstance(leaf, VALUES))
    others = {type(leaf).__name__ for leaf in unknown}
    if not tensors or others:
        return f"arguments hold {', '.join(sorted(others)) or 'no tensor'}"
    if len({tensor.device for tensor in tensors}) > 1:
        return "arguments lie on several devices"
    if call.computed_rows is not None:
        return "prompts of a batch are computed apart"
    if torch.is_grad_enabled():
        return "gradients are enabled; call the transformer under torch.no_grad()"
    if watches_all_calls():
        return "a hook of all modules or a mode of all operations watches the call"
    return "autocast" if torch.is_autocast_enabled(tensors[0].device.type) else None


def why_not_output(output: Any) -> str | None:
    """Return why a graph can't return this output of a transformer, or None."""
    leaves = pytree.tree_leaves(output)
    others = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (torch.Tensor, *VALUES))}
    return f"the output holds {', '.join(sorted(others))}" if others else None


def why_not_module(name: str, module: nn.Module, device: torch.device) -> str | None:
    """Return why a module of a transformer on a device can't be captured, or None; without a name, the transformer."""
    where, registry = name or type(module).__name__, vars(module).get("_diffusers_hook")
    around_it = () if registry is None else registry.hooks.values()
    varies = any(not isinstance(hook, hooks.Hook) and type(hook).__name__ not in PARALLEL_HOOKS for hook in around_it)
    around = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    if not name:  # they run before and after the graph
        around = [hook for hook in around if not hooks.is_stateless(hook)]
    if varies or around or hasattr(module, "_hf_hook"):
        return f"{where} carries hooks (offload, layerwise casting, …)"
    if hooks.is_compiled(module):
        return f"{where} is compiled"
    linear = hooks.find_hook(module, hooks.LINEAR_HOOK)
    unread = module.weight if linear is not None and module in linear.linears.on_host else None
    for item in (*module._parameters.values(), *module._buffers.values()):
        if item is not None and item is not unread and (not is_readable(item) or item.device != device):
            return f"a weight of {where} is a {type(item).__name__} on {item.device}"
    return None


def why_not_known(name: str, module: nn.Module) -> str | None:
    """Return why a module may behave differently in each step, which a graph would not, or None."""
    where, processor = name or type(module).__name__, getattr(module, "processor", None)
    if not hooks.runs_known_code(module):
        return f"{where} runs a forward that is not diffusers' own, and may differ from step to step"
    kind = type(processor)
    if processor is not None and not (hooks.is_known_class(kind) and hooks.is_known(kind.__call__)):
        return f"the attention processor of {where} is not diffusers' own, and may differ from step to step"
    return None
