"""Forms of a transformer's weights; each changes the plain linear layers of the blocks in place."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn

from dit_accel.models.beside.quantized_linears import block_linears
from dit_accel.models.stored_weights import parts_of

Q4_BLOCK = 32  # weights that share a scale


def _stored_in_float8(transformer: nn.Module) -> None:
    """Layerwise casting of diffusers: every weight is stored in float8, and computed in the model's dtype."""
    transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=transformer.dtype)


def _by_torchao(config: str) -> Callable[[nn.Module], None]:
    def quantize(transformer: nn.Module) -> None:
        from torchao import quantization
        from torchao.prototype import mx_formats

        names = {name for name, _ in block_linears(transformer)}
        make = getattr(mx_formats if config.startswith("NVFP4") else quantization, config)
        quantization.quantize_(transformer, make(), lambda _, name: name in names)

    return quantize


def _as_gguf(transformer: nn.Module) -> None:
    """Weights as in a .gguf file of type Q4_0."""
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    def replacement(layer: nn.Linear) -> nn.Module:
        new = GGUFLinear(
            layer.in_features, layer.out_features, bias=False, compute_dtype=layer.weight.dtype, device="meta"
        )
        new.weight = GGUFParameter(packed_q4(layer.weight.data), quant_type=gguf.GGMLQuantizationType.Q4_0)
        new.bias = layer.bias
        return new

    _replace(transformer, replacement)


def packed_q4(weight: torch.Tensor) -> torch.Tensor:
    """Pack a weight ``[N, C]`` as GGUF's Q4_0 does: uint8 ``[N, C / 32 * 18]``.

    Each block of 32 has a scale in float16, which takes its largest value to -8, then the integers from -8 to 7 plus 8,
    two a byte: the first half of the block in the lower bits.
    """
    blocks = weight.unflatten(-1, (-1, Q4_BLOCK)).float()
    scales = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True)) / -8
    low, high = (blocks / scales.where(scales != 0, 1.0) + 8.5).to(torch.uint8).clamp(max=15).chunk(2, dim=-1)
    return torch.cat([scales.half().view(torch.uint8), low | high << 4], dim=-1).flatten(-2)


def _as_nf4(transformer: nn.Module) -> None:
    """bitsandbytes' NF4, as `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")` loads it."""
    import bitsandbytes

    def replacement(layer: nn.Linear) -> nn.Module:
        new = bitsandbytes.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, compute_dtype=layer.weight.dtype, device="meta"
        )
        weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=new)
        new.weight = weight.to(layer.weight.device)  # which rounds it
        new.bias = layer.bias
        return new

    _replace(transformer, replacement)


def _as_nvfp4(transformer: nn.Module) -> None:
    """Weights as in Black Forest Labs' checkpoints in NVFP4: blocks of 16 values with a scale in e4m3."""
    from diffusers.quantizers.bfl import utils  # since diffusers 0.42

    def replacement(layer: nn.Linear) -> nn.Module:
        new = utils.BFLNVFP4Linear(layer.in_features, layer.out_features, compute_dtype=layer.weight.dtype)
        weight, new.weight_scale, new.weight_scale_2 = utils.quantize_nvfp4(layer.weight.data)
        new.weight, new.bias = nn.Parameter(weight, requires_grad=False), layer.bias
        return new

    _replace(transformer, replacement)


def _replace(transformer: nn.Module, replacement: Callable[[nn.Linear], nn.Module]) -> None:
    for name, layer in list(block_linears(transformer)):
        if layer.in_features % Q4_BLOCK == 0:
            transformer.set_submodule(name, replacement(layer))


# name: (package that it needs, or None; function that changes a transformer)
WEIGHTS: dict[str, tuple[str | None, Callable[[nn.Module], None]]] = {
    "bf16": (None, lambda transformer: None),
    "cast": (None, _stored_in_float8),
    "int8": ("torchao", _by_torchao("Int8WeightOnlyConfig")),
    "float8": ("torchao", _by_torchao("Float8WeightOnlyConfig")),
    "q4": ("gguf", _as_gguf),
    "nf4": ("bitsandbytes", _as_nf4),
    "nvfp4": (None, _as_nvfp4),
    "torchao-nvfp4": ("torchao", _by_torchao("NVFP4WeightOnlyConfig")),
}


def why_not_available(weights: str) -> str | None:
    """Return why weights can't have this form here, or None."""
    package, _ = WEIGHTS[weights]
    return None if package is None or find_spec(package) is not None else f"{package} is not installed"


def bytes_of(transformer: nn.Module) -> int:
    """Bytes of a transformer's parameters as they are stored; torchao's report the dtype that they stand for."""
    return sum(part.nbytes for parameter in transformer.parameters() for part in parts_of(parameter))
