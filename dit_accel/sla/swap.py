"""Replace a diffusers model's attention by SLA, and fine-tune the model with it.

The saved model runs without this module: ``folder/transformer`` is a plain diffusers model, or ``folder`` is a LoRA of
diffusers if one was trained. The preset key ``skip.projection`` takes ``folder/sla.safetensors``.
"""

from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from dit_accel.errors import UnsupportedError
from dit_accel.models import denoisers, dtype_argument
from dit_accel.models.families import require_family
from dit_accel.models.families.family import Attention, Family, Tokens
from dit_accel.models.hooks import find_hook, parameter_names
from dit_accel.models.interceptor import Catching, Caught, key_lengths, with_leading_keys
from dit_accel.sla.module import SparseLinearAttention
from dit_accel.sparse.inputs import Inputs
from dit_accel.sparse.projections import PROJECTIONS, TRAINED_WITH, load_projections, trained_with

LORA = "pytorch_lora_weights.safetensors"  # diffusers' file name of a LoRA


class TransformerCalls:
    """Keep the token layout of a transformer's latest call, because gradient checkpointing may rerun its blocks."""

    def __init__(self, family: Family, transformer: nn.Module) -> None:
        self.tokens: Tokens | None = None
        self._family = family
        self._names = parameter_names(transformer)
        self.handle = transformer.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.tokens = self._family.tokens(transformer, {**dict(zip(self._names, args, strict=False)), **kwargs})


class SlaProcessor(nn.Module):
    """A model's own attention processor, with SLA and its projection in place of attention over the block's tokens."""

    def __init__(self, base: Any, attention: SparseLinearAttention, calls: TransformerCalls, sees_text: bool) -> None:
        super().__init__()
        self.base = base
        self.attention = attention
        self.calls = calls
        self._sees_text = sees_text
        # diffusers reads a processor's arguments from the signature of __call__.
        self.__dict__["__call__"] = update_wrapper(partial(SlaProcessor.__call__, self), base.__call__)

    @torch.compiler.disable  # compilers can't trace the context that catches the processor's attention
    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tokens, block = self.calls.tokens, self.attention.settings.block
        if tokens is None:  # the attention was called outside of the transformer
            return self.base(attn, *args, **kwargs)

        def attend(inputs: Inputs) -> torch.Tensor:
            return self.attention(*inputs[:3], layout=inputs.layout, kv_len=inputs.kv_len)

        def attend_sla(caught: Caught) -> torch.Tensor | None:
            return with_leading_keys(attend, caught, block, key_lengths(caught.mask, caught.tokens))

        with Catching(tokens.seen(self._sees_text), attend_sla) as catching:
            output = self.base(attn, *args, **kwargs)
        if catching.missed is not None:
            raise UnsupportedError(f"a block's own attention processor {catching.missed} before swap_attention")
        return output


def swap_attention(pipe: Any, **settings: Any) -> dict[str, SparseLinearAttention]:
    """Replace each block's self- or joint attention by a new :class:`~dit_accel.sla.SparseLinearAttention`.

    The projections become submodules of the transformer: they are in its parameters, in its ``state_dict`` and in
    checkpoints of accelerate. They start at zero. A second swap replaces the first.

    Args:
        pipe: a plain (not accelerated) pipeline of an adapted family, or its transformer.
        settings: ``critical``, ``negligible``, ``feature_map`` and ``block`` of each attention.

    Returns:
        The attentions by site. A site has the block's name in the report; a second attention ends with ``.attn2``.

    Raises:
        UnsupportedError: the pipeline is accelerated, or the blocks of this transformer are not known.
    """
    attentions = {}
    for transformer, found in _attentions(pipe):
        _, head_dim = require_family(transformer).heads(transformer)
        for layer in found:
            attention = SparseLinearAttention(head_dim, **settings)
            attentions[layer.site] = attention.to(transformer.device, transformer.dtype)
    restore_attention(pipe)
    _put_in(pipe, attentions)
    return attentions


def restore_attention(pipe: Any) -> None:
    """Undo :func:`swap_attention`; without a swap, do nothing."""
    for module in _modules(pipe).values():
        if isinstance(module.processor, SlaProcessor):
            module.processor.calls.handle.remove()
            _set_processor(module, module.processor.base)


def swapped_attention(pipe: Any) -> dict[str, SparseLinearAttention]:
    """Return the attentions of :func:`swap_attention`, by site."""
    processors = {site: module.processor for site, module in _modules(pipe).items()}
    return {site: found.attention for site, found in processors.items() if isinstance(found, SlaProcessor)}


def save_swapped(pipe: Any, folder: str | Path) -> None:
    """Write each transformer as diffusers does, without projections, and the projections to ``sla.safetensors``.

    If a transformer has a LoRA, only the LoRA is written, in the form of ``pipe.load_lora_weights(folder)``. Several
    LoRAs, or several transformers with one, are an :class:`UnsupportedError`, as is a pipeline without SLA.
    """
    if not (attentions := swapped_attention(pipe)):
        raise UnsupportedError("save_swapped needs a pipeline with SLA in it: call swap_attention first")
    folder = Path(folder)
    restore_attention(pipe)
    try:
        _save_transformers(pipe, folder)
    finally:
        _put_in(pipe, attentions)
    settings = {key: str(getattr(next(iter(attentions.values())).settings, key)) for key in TRAINED_WITH}
    projections = {name: attention.projection.weight.detach().contiguous() for name, attention in attentions.items()}
    save_file(projections, folder / PROJECTIONS, metadata=settings)


def load_swapped(pipe: Any, folder: str | Path) -> dict[str, SparseLinearAttention]:
    """Load the files of :func:`save_swapped` into a pipeline of the same kind, and return the swapped attentions.

    Projections for other blocks than the pipeline's are an :class:`UnsupportedError`.
    """
    folder = Path(folder)
    if (folder / LORA).exists():
        pipe.load_lora_weights(folder)
    else:
        for name, transformer in denoisers(pipe).items():
            loaded = type(transformer).from_pretrained(folder / name, **dtype_argument(transformer.dtype))
            setattr(pipe, name, loaded.to(transformer.device))
    attentions = swap_attention(pipe, **trained_with(folder))
    projections, sites = load_projections(folder), ", ".join(attentions)
    if projections.keys() != attentions.keys():
        raise UnsupportedError(f"{folder / PROJECTIONS} must hold blocks {sites}, got {', '.join(projections)}")
    for name, projection in projections.items():
        attentions[name].projection.load_state_dict({"weight": projection.weight})
    return attentions


def _save_transformers(pipe: Any, folder: Path) -> None:
    transformers = denoisers(pipe)
    loras = [(name, adapter) for name, model in transformers.items() for adapter in getattr(model, "peft_config", ())]
    if not loras:
        for name, transformer in transformers.items():
            transformer.save_pretrained(folder / name)
        return
    from peft import get_peft_model_state_dict

    if len(loras) > 1 or len(transformers) > 1:
        found = f"{', '.join(f'{adapter} of {name}' for name, adapter in loras)}, and {', '.join(transformers)}"
        raise UnsupportedError(f"save_swapped writes one LoRA of a pipeline with one transformer, got {found}")
    ((name, adapter),) = loras
    transformer = transformers[name]
    layers = {
        f"{name}_lora_layers": get_peft_model_state_dict(transformer, adapter_name=adapter),
        f"{name}_lora_adapter_metadata": transformer.peft_config[adapter].to_dict(),
    }
    pipe.save_lora_weights(folder, **layers)


def _put_in(pipe: Any, attentions: dict[str, SparseLinearAttention]) -> None:
    for transformer, found in _attentions(pipe):
        calls = TransformerCalls(require_family(transformer), transformer)
        for layer in found:
            processor = SlaProcessor(layer.module.processor, attentions[layer.site], calls, layer.sees_text)
            _set_processor(layer.module, processor)


def _set_processor(attention: nn.Module, processor: Any) -> None:
    """Set the processor as diffusers' ``set_processor`` does, which Mochi's attention lacks."""
    del attention.processor  # otherwise a module would stay among the submodules
    attention.processor = processor


def _modules(pipe: Any) -> dict[str, nn.Module]:
    return {layer.site: layer.module for _, found in _attentions(pipe) for layer in found}


def _attentions(pipe: Any) -> list[tuple[nn.Module, list[Attention]]]:
    """Return each transformer with its blocks' self- and joint attentions."""
    transformers = {"transformer": pipe} if isinstance(pipe, nn.Module) else denoisers(pipe)
    if any(find_hook(transformer) is not None for transformer in transformers.values()):
        raise UnsupportedError("pipe must be a plain pipeline for SLA, got an accelerated one: restore it first")
    return [(model, require_family(model).all_attentions(model, name)) for name, model in transformers.items()]
