"""Forms of a transformer's weights; each changes the plain linear layers of the blocks in place."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn

from dit_accel.models.beside.quantized_linears import block_linears

Q4_BLOCK, Q4_BYTES = 32, 18  # weights of a block of GGUF's Q4_0, and its bytes: a scale in float16, then nibbles


def _as_built(transformer: nn.Module) -> None:
    pass


def _stored_in_float8(transformer: nn.Module) -> None:
    """Layerwise casting of diffusers: every weight is stored in float8, and computed in the model's dtype."""
    dtype = next(transformer.parameters()).dtype
    transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)


def _by_torchao(config: str) -> Callable[[nn.Module], None]:
    def quantize(transformer: nn.Module) -> None:
        from torchao import quantization

        names = {name for name, _ in block_linears(transformer)}
        quantization.quantize_(transformer, getattr(quantization, config)(), lambda _, name: name in names)

    return quantize


def _packed_in_4_bits(transformer: nn.Module) -> None:
    """Random weights like those of a .gguf file of type Q4_0, with scales that keep their spread."""
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    for name, layer in list(block_linears(transformer)):
        if layer.in_features % Q4_BLOCK:
            continue
        device, has_bias = layer.weight.device, layer.bias is not None
        packed = torch.randint(
            256, (layer.out_features, layer.in_features // Q4_BLOCK, Q4_BYTES), dtype=torch.uint8, device=device
        )
        spread = (3 * layer.in_features) ** -0.5 / 4.6  # of nn.Linear's weights, over that of integers from -8 to 7
        packed[..., :2] = torch.tensor([spread], dtype=torch.float16, device=device).view(torch.uint8)
        made = GGUFLinear(
            layer.in_features, layer.out_features, bias=has_bias, compute_dtype=layer.weight.dtype, device="meta"
        )
        made.weight = GGUFParameter(packed.flatten(1), quant_type=gguf.GGMLQuantizationType.Q4_0)
        made.bias = layer.bias
        parent, _, own = name.rpartition(".")
        setattr(transformer.get_submodule(parent), own, made)


# name: (package that it needs, or None; function that changes a transformer)
WEIGHTS: dict[str, tuple[str | None, Callable[[nn.Module], None]]] = {
    "bf16": (None, _as_built),
    "cast": (None, _stored_in_float8),
    "int8": ("torchao", _by_torchao("Int8WeightOnlyConfig")),
    "float8": ("torchao", _by_torchao("Float8WeightOnlyConfig")),
    "q4": ("gguf", _packed_in_4_bits),
}


def why_not_available(weights: str) -> str | None:
    """Return why weights can't have this form here, or None."""
    package, _ = WEIGHTS[weights]
    return None if package is None or find_spec(package) is not None else f"{package} is not installed"


def bytes_of(transformer: nn.Module) -> int:
    """Bytes of a transformer's parameters as they are stored."""
    return sum(_bytes(parameter) for parameter in transformer.parameters())


def _bytes(tensor: torch.Tensor) -> int:
    parts = getattr(type(tensor), "tensor_data_names", None)  # torchao's tensors report the dtype that they stand for
    if parts is None:
        return tensor.numel() * tensor.element_size()
    return sum(_bytes(getattr(tensor, part)) for part in parts)
