"""Fused kernels that replace plain modules with the same result.

LoRA, offload and quantisation wrap, hook or replace modules; such modules must be called.
"""

from collections.abc import Iterable

import torch
from diffusers.models.activations import GELU, SwiGLU
from diffusers.models.attention import AttentionModuleMixin, FeedForward
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm
from torch import nn
from torch.nn import functional

from dit_accel.kernels import linear_gelu, norm_rope, norm_rope_pair, swiglu
from dit_accel.models.beside.quantized_linears import in_8_bits, project, project_together
from dit_accel.models.hooks import ATTENTION_HOOK
from dit_accel.models.parallel.context_parallel import in_words

Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of a stream's tokens, float32 [S, D] each


def why_not_plain(module: nn.Module, device: torch.device) -> str | None:
    """Return why a module must be called rather than its weight be read, or None."""
    weight = module.weight
    if type(weight) not in (nn.Parameter, torch.Tensor) or not weight.is_floating_point():
        return "its weight is quantised"
    if is_hooked(module):
        return "it carries hooks (offload, layerwise casting, …)"
    return None if weight.device == device else "its weight is on another device"


def why_not_sliceable(module: nn.Module, device: torch.device) -> str | None:
    """Return why a projection must be called rather than its weight be sliced, or None."""
    if type(module) is not nn.Linear:
        package = type(module).__module__.partition(".")[0]  # LoRA's layers have the same class names as torch's
        return f"a projection is a {type(module).__name__} of {package}, not a plain linear layer"
    reason = why_not_plain(module, device)
    return reason and f"a projection can't be sliced: {reason}"


def why_called(block: nn.Module, prefix: str | tuple[str, ...]) -> str | None:
    """Return why parts of a block whose names have this prefix must be called, not replaced, or None."""
    parts = block._modules.items()
    hooked = next((name for name, part in parts if name.startswith(prefix) and is_hooked(part)), None)
    return hooked and f"its {hooked} carries hooks"


def heads_of(attn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """``[B, S, H * D]`` -> ``[B, S, H, D]``."""
    return x.unflatten(2, (attn.heads, -1))


def query_key_value(attn: AttentionModuleMixin, x: torch.Tensor, *, added: bool = False) -> list[torch.Tensor]:
    """Project queries, keys and values ``[B, S, H, D]``, before their norms; ``added``: by the text's layers."""
    names = ("to_added_qkv", "add_q_proj", "add_k_proj", "add_v_proj") if added else ("to_qkv", "to_q", "to_k", "to_v")
    fused, *layers = (getattr(attn, name, None) for name in names)
    parts = project(fused, x).chunk(3, dim=-1) if attn.fused_projections else project_together(tuple(layers), x)
    return [heads_of(attn, part) for part in parts]


def key_value(attn: AttentionModuleMixin, x: torch.Tensor) -> list[torch.Tensor]:
    """Project keys and values ``[B, S, H, D]`` without the queries."""
    if attn.fused_projections:
        weight, bias = attn.to_qkv.weight[attn.inner_dim :], attn.to_qkv.bias
        parts = functional.linear(x, weight, None if bias is None else bias[attn.inner_dim :]).chunk(2, dim=-1)
    else:
        parts = attn.to_k(x), attn.to_v(x)
    return [heads_of(attn, part) for part in parts]


def query_projection(attn: AttentionModuleMixin) -> nn.Module:
    """The linear layer that holds the query projection's weight."""
    return attn.to_qkv if attn.fused_projections else attn.to_q


def query_weight(attn: AttentionModuleMixin) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight ``[H * D, C]`` and bias of the query projection; slices of them if q, k and v are fused."""
    projection = query_projection(attn)
    weight, bias = projection.weight, projection.bias
    if attn.fused_projections:
        weight, bias = weight[: attn.inner_dim], None if bias is None else bias[: attn.inner_dim]
    return weight, bias


def normalise_heads(
    norm: nn.Module, x: torch.Tensor, rotary: Rotary | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """RMSNorm of queries or keys ``[B, S, H, D]`` and RoPE, in one pass if the norm is plain.

    The norm is over each head's features, or over the features of all heads of a token.
    """
    if is_plain_norm(norm, x.device):
        return norm_rope(x, norm.weight, rotary, eps=norm.eps, out=out)
    width = norm.weight.shape[0] if getattr(norm, "weight", None) is not None else x.shape[-1]
    normed = norm(x) if width == x.shape[-1] else norm(x.flatten(2)).view(x.shape)
    turned = normed if rotary is None else apply_rotary_emb(normed, rotary, sequence_dim=1)
    return turned if out is None else out.copy_(turned)


def normalise_pair(
    norms: tuple[nn.Module, nn.Module],
    q: torch.Tensor,
    k: torch.Tensor,
    rotary: Rotary | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`normalise_heads` of queries and keys, each with its norm, in one pass if both norms are plain."""
    norm_q, norm_k = norms
    if all(is_plain_norm(norm, q.device) for norm in norms) and norm_q.eps == norm_k.eps:
        return norm_rope_pair(q, k, (norm_q.weight, norm_k.weight), rotary, eps=norm_q.eps, out=out)
    out_q, out_k = out or (None, None)
    return normalise_heads(norm_q, q, rotary, out=out_q), normalise_heads(norm_k, k, rotary, out=out_k)


def cat_tokens(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``torch.cat([first, second], dim=1)`` of tokens ``[B, S, H, D]``, without gradients in words of 8 bytes."""
    if torch.is_grad_enabled() and (first.requires_grad or second.requires_grad):
        return torch.cat([first, second], dim=1)
    parts = in_words(first.flatten(2), second.flatten(2))
    return torch.cat(parts, dim=1).view(first.dtype).unflatten(2, first.shape[2:])


def join_streams(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``torch.cat([first, second], dim=1)`` of streams ``[B, S, C]``, to read only; adjacent ones are not copied."""
    offset, strides = first.storage_offset() + first.shape[1] * first.stride(1), first.stride()
    follows = second.storage_offset() == offset and second.stride() == strides
    if not follows or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return torch.cat([first, second], dim=1)
    return first.as_strided((first.shape[0], first.shape[1] + second.shape[1], first.shape[2]), strides)


def project_gelu(linear: nn.Module, activation: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """``activation(linear(x))``; tanh-approximated GELU runs in the product's epilogue if the layer is plain."""
    if x.is_cuda and is_tanh_gelu(activation) and why_not_sliceable(linear, x.device) is None:
        return linear_gelu(x, linear.weight, linear.bias)
    return activation(linear(x))


def project_gated(linear: nn.Module, gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``linear(swiglu(gate, value))``; in 8 bits the gate is rounded in the same pass."""
    if (linears := in_8_bits(linear, gate)) is None:
        return linear(swiglu(gate, value))
    return linears.project(linear, x=gate[..., :0], hidden=(gate, value))


def gated_mlp(mlp: nn.Module, kind: type[nn.Module], names: tuple[str, str, str], x: torch.Tensor) -> torch.Tensor:
    """Run an MLP with SwiGLU by its layers for gate, value and output, if it is a plain module of that class."""
    if type(mlp) is not kind or is_hooked(mlp):
        return mlp(x)
    gate, value, out = (getattr(mlp, name) for name in names)
    return project_gated(out, *project_together((gate, value), x))


def feed_forward(mlp: FeedForward, x: torch.Tensor) -> torch.Tensor:
    """Run a block's MLP, with GELU in the epilogue of the first product if that layer is plain, or with SwiGLU."""
    first, *rest = mlp.net
    linears = in_8_bits(rest[-1], x)
    is_gelu = type(first) is GELU and is_tanh_gelu(first) and not is_hooked(mlp)
    if is_gelu and linears is not None:
        hidden = project(first.proj, x)
        return linears.project(rest[-1], x=hidden[..., :0], hidden=(hidden,))
    if type(first) is SwiGLU and not any(map(is_hooked, (mlp, first, first.activation))):
        value, gate = project(first.proj, x).chunk(2, dim=-1)
        if linears is not None:
            return linears.project(rest[-1], x=gate[..., :0], hidden=(gate, value))
        x = swiglu(gate, value)
    elif x.is_cuda and is_gelu and why_not_sliceable(first.proj, x.device) is None:
        x = linear_gelu(x, first.proj.weight, first.proj.bias)
    else:
        return mlp(x)
    for module in rest:
        x = module(x)
    return x


def is_tanh_gelu(activation: nn.Module) -> bool:
    return getattr(activation, "approximate", "none") == "tanh" and not is_hooked(activation)


def is_plain_norm(norm: nn.Module, device: torch.device) -> bool:
    """Return True for an RMSNorm whose weight kernels can read."""
    return isinstance(norm, (nn.RMSNorm, RMSNorm)) and norm.eps is not None and why_not_plain(norm, device) is None


def why_no_plain_norms(norms: Iterable[nn.Module], device: torch.device) -> str | None:
    """Return why kernels can't stand in for these norms, or None."""
    return None if all(is_plain_norm(norm, device) for norm in norms) else "a norm is no plain RMSNorm"


def is_hooked(module: nn.Module) -> bool:
    """Return True if a module has hooks, or its forward is replaced, so that it must be called."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    registry = vars(module).get("_diffusers_hook")
    order = None if registry is None else registry._hook_order
    only_ours = order == [ATTENTION_HOOK] and not hasattr(module, "_old_forward")
    return bool(hooks) or ("forward" in vars(module) and not only_ours) or hasattr(module, "_hf_hook")
