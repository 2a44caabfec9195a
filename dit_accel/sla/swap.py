"""SLA in the place of a diffusers model's attention, to fine-tune the model with it.

sites = swap_attention(pipe, critical=0.05, negligible=0.10)
...                                        # train pipe.transformer.parameters(), the projections are among them
save_swapped(pipe, folder)                 # load_swapped(pipe, folder) goes on with it

What is saved runs without this module: ``folder/transformer`` is a plain diffusers model, and the preset key
``skip.projection`` takes ``folder/sla.safetensors``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.layout import TokenLayout
from dit_accel.models import denoisers
from dit_accel.models.block_adapter import BlockAdapter
from dit_accel.models.interceptor import attention_of, key_lengths, reader
from dit_accel.models.transformer_hook import find_hook
from dit_accel.sla.module import SparseLinearAttention
from dit_accel.sparse.projections import load_projections

PROJECTIONS = "sla.safetensors"
_SETTINGS = {"critical": float, "negligible": float, "feature_map": str, "block": int}  # the file's metadata


class SlaProcessor(nn.Module):
    """A family's own attention processor, with SLA where that one calls torch's ``scaled_dot_product_attention``.

    Args:
        own: the processor, which projects, normalises, rotates and projects back as before.
        attention: what attends instead.
        calls: knows the tokens of the transformer call in progress.
    """

    def __init__(self, own: Callable, attention: SparseLinearAttention, calls: TransformerCalls) -> None:
        super().__init__()
        self.own = own
        self.attention = attention
        self.calls = calls

    # Not forward: diffusers reads from the signature of __call__ which arguments a processor takes.
    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
        **extra: Any,
    ) -> Any:
        with _Instead(self.attention, self.calls.layout) as instead:
            out = self.own(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, **extra)
        if not instead.attended:
            raise UnsupportedError(
                f"{type(self.own).__name__} attends by something else than torch's scaled_dot_product_attention: "
                'call transformer.set_attention_backend("native") before swap_attention'
            )
        return out


class TransformerCalls:
    """Keeps the layout of a transformer's latest call, which its backward pass may run again to save memory.

    Args:
        adapter: the family's, which reads it from the arguments.
        block: tokens in a block.
    """

    def __init__(self, adapter: BlockAdapter, block: int) -> None:
        self._adapter = adapter
        self._block = block
        self.layout: TokenLayout | None = None
        self._handle = adapter.transformer.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.layout = replace(self._adapter.layout(self._adapter.named(args, kwargs)), block=self._block)

    def remove(self) -> None:
        self._handle.remove()


class _Instead(TorchFunctionMode):
    """Within it SLA takes the place of attentions ``[B, H, S, D]`` over all tokens of the layout."""

    def __init__(self, attention: SparseLinearAttention, layout: TokenLayout) -> None:
        super().__init__()
        self._attention = attention
        self._layout = layout
        self.attended = False

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            output = self._attend(*args, **kwargs)
            if output is not None:
                return output
        return function(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor | None:
        tokens = self._layout.tokens
        if query.shape[2] != tokens or key.shape[2] != tokens:
            return None  # to an image prompt
        self.attended = True
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self._attention(q, k, v, layout=self._layout, kv_len=key_lengths(attn_mask)).transpose(1, 2)


def swap_attention(
    pipe: Any, *, critical: float = 0.05, negligible: float = 0.10, feature_map: str = "softmax", block: int = 64
) -> dict[str, SparseLinearAttention]:
    """Puts a new :class:`~dit_accel.sla.SparseLinearAttention` in the place of each block's self- or joint attention.

    Projections are submodules of the transformer from then on: in its parameters, its ``state_dict`` and what
    accelerate saves of it. They start at zero. A second swap takes the place of the first.

    Args:
        pipe: a plain (not accelerated) pipeline of FLUX, HunyuanVideo or Wan, or a transformer of one.
        critical, negligible, feature_map, block: of each attention.

    Returns:
        The attentions by block name, as in the report.

    Raises:
        UnsupportedError: the pipeline is accelerated, or the blocks of this transformer are not known here.
    """
    attentions = {}
    for adapter in _adapters(pipe):
        transformer = adapter.transformer
        for name in adapter.layers():
            attentions[name] = SparseLinearAttention(
                transformer.config.attention_head_dim,
                critical=critical,
                negligible=negligible,
                feature_map=feature_map,
                block=block,
            ).to(transformer.device, transformer.dtype)
    restore_attention(pipe)
    _put_in(pipe, attentions)
    return attentions


def restore_attention(pipe: Any) -> None:
    """Undoes :func:`swap_attention`; nothing happens where nothing was swapped."""
    for layer in _layers(pipe).values():
        attn = attention_of(layer)
        if isinstance(attn.processor, SlaProcessor):
            attn.processor.calls.remove()
            attn.set_processor(attn.processor.own)


def swapped_attention(pipe: Any) -> dict[str, SparseLinearAttention]:
    """The attentions that :func:`swap_attention` put in, by block name."""
    processors = {name: attention_of(layer).processor for name, layer in _layers(pipe).items()}
    return {name: held.attention for name, held in processors.items() if isinstance(held, SlaProcessor)}


def save_swapped(pipe: Any, folder: str | Path) -> None:
    """Writes each transformer as diffusers does, without projections, and these to ``sla.safetensors``.

    Raises:
        UnsupportedError: nothing is swapped.
    """
    attentions = swapped_attention(pipe)
    if not attentions:
        raise UnsupportedError("save_swapped needs a pipeline with SLA in it: call swap_attention first")
    folder = Path(folder)
    restore_attention(pipe)
    try:
        for name, transformer in denoisers(pipe).items():
            transformer.save_pretrained(folder / name)
    finally:
        _put_in(pipe, attentions)
    settings = {key: str(getattr(next(iter(attentions.values())).settings, key)) for key in _SETTINGS}
    projections = {name: attention.projection.weight.detach().contiguous() for name, attention in attentions.items()}
    save_file(projections, folder / PROJECTIONS, metadata=settings)


def load_swapped(pipe: Any, folder: str | Path) -> dict[str, SparseLinearAttention]:
    """Puts what :func:`save_swapped` wrote into a pipeline of the same kind, and SLA with it.

    Returns:
        The attentions by block name, with their settings and projections of then.

    Raises:
        UnsupportedError: the projections are of other blocks than the pipeline's.
    """
    folder = Path(folder)
    for name, transformer in denoisers(pipe).items():
        loaded = type(transformer).from_pretrained(folder / name, torch_dtype=transformer.dtype)
        setattr(pipe, name, loaded.to(transformer.device))
    with safe_open(folder / PROJECTIONS, "pt") as file:
        settings = {key: cast(file.metadata()[key]) for key, cast in _SETTINGS.items()}
    attentions = swap_attention(pipe, **settings)
    projections = load_projections(folder / PROJECTIONS)
    if projections.keys() != attentions.keys():
        raise UnsupportedError(
            f"{folder / PROJECTIONS} must hold blocks {', '.join(attentions)}, got {', '.join(projections)}"
        )
    for name, projection in projections.items():
        attentions[name].projection.load_state_dict({"weight": projection})
    return attentions


def _put_in(pipe: Any, attentions: dict[str, SparseLinearAttention]) -> None:
    for adapter in _adapters(pipe):
        layers = adapter.blocks()
        calls = TransformerCalls(adapter, attentions[next(iter(layers))].settings.block)
        for name, layer in layers.items():
            attn = attention_of(layer)
            attn.set_processor(SlaProcessor(attn.processor, attentions[name], calls))


def _layers(pipe: Any) -> dict[str, nn.Module]:
    return {name: layer for adapter in _adapters(pipe) for name, layer in adapter.blocks().items()}


def _adapters(pipe: Any) -> list[BlockAdapter]:
    transformers = {"transformer": pipe} if isinstance(pipe, nn.Module) else denoisers(pipe)
    if any(find_hook(transformer) is not None for transformer in transformers.values()):
        raise UnsupportedError("SLA is swapped into a plain pipeline, got an accelerated one: restore it first")
    return [reader(name, transformer) for name, transformer in transformers.items()]
