"""Group normalisation with SiLU, and the sum behind a residual block, in channels-last layout.

    y = SiLU(((x + c - mean_g) / sqrt(var_g + eps) * weight + bias) * scale + shift)          z = x + update + bias

Mean and variance are those of the features of a group over all pixels and frames (Wu and He 2018, arXiv 1803.08494).
``c`` is the bias of the convolution before, one number a channel, so that the convolution need not add it in a pass of
its own. Videos may get a border of repeated pixels and frames before the first one, which a causal convolution reads,
and a scale and a shift for blocks of pixels, as in CogVideoX's decoder.
"""

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import resolve_backend
from dit_accel.kernels.custom_ops import eager_op

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@eager_op
def group_moments(
    x: torch.Tensor, *, groups: int, input_bias: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """Return mean and variance of each group of channels, for :func:`group_norm`; for one norm of several parts of x.

    Args:
        x: ``[B, C, H, W]`` or ``[B, C, T, H, W]``, float16, bfloat16 or float32; read fastest in channels-last layout.
        groups: number of groups, which must divide C.
        input_bias: ``[C]``, added to x before; None = nothing.

    Returns:
        ``[B, groups, 2]``, float32: mean and (biased) variance over channels, frames and pixels.
    """
    _require_features(x, groups)
    checks.require_typed("x", x, (x.shape[1],), input_bias=input_bias)
    if resolve_backend(backend, x) == "triton":
        from dit_accel.kernels._triton.group_norm import moments_into

        moments = x.new_empty(x.shape[0], groups, 2, dtype=torch.float32)
        moments_into(x.contiguous(memory_format=LAST[x.ndim]), groups, _dense(input_bias), moments)
        return moments
    values = x.float() if input_bias is None else x.float() + _by_channel(input_bias, x)
    variance, mean = torch.var_mean(values.reshape(x.shape[0], groups, -1), -1, correction=0)
    return torch.stack([mean, variance], -1)


@eager_op
def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    *,
    groups: int,
    eps: float,
    silu: bool = True,
    input_bias: torch.Tensor | None = None,
    moments: torch.Tensor | None = None,
    before: int = 0,
    border: int = 0,
    frames: slice | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Normalise groups of channels, in float32 and rounded once. Forward only: no gradient flows.

    Args:
        x: ``[B, C, H, W]`` or ``[B, C, T, H, W]``, float16, bfloat16 or float32; read fastest in channels-last layout.
        weight, bias: ``[C]``, any float dtype.
        scale, shift: ``[B, C, T, H / n, W / n]``, any float dtype; each counts for n x n of x. Both or neither; videos.
        groups: number of groups, which must divide C.
        input_bias: ``[C]``, added to x before; None = nothing.
        moments: float32 ``[B, groups, 2]``, from :func:`group_moments` with the same bias; None = those of x.
        before: frames before the first one, which repeat the frames before it in x, or the first frame of x.
        border: pixels on each side that repeat the outermost ones; videos only.
        frames: start and stop of the frames to return; None = all. The moments are those of all frames.

    Returns:
        ``[B, C, H, W]``, or ``[B, C, before + T, H + 2 border, W + 2 border]``, like x, in channels-last layout.
    """
    _require_features(x, groups)
    if x.ndim == 4 and (before or border or frames is not None or scale is not None):
        raise ShapeError("before, border, frames and scale need x of shape [B, C, T, H, W], got an image")
    _require_maps(x, scale, shift)
    checks.require_typed("x", x, (x.shape[1],), weight=weight, bias=bias, input_bias=input_bias)
    checks.require_typed("x", x, (x.shape[0], groups, 2), torch.float32, moments=moments)
    if moments is None:
        moments = group_moments(x, groups=groups, input_bias=input_bias, backend=backend)
    first, stop = (-before, x.shape[2]) if frames is None else (frames.start - before, frames.stop)
    if resolve_backend(backend, x) == "triton":
        from dit_accel.kernels._triton.group_norm import group_norm_into

        sides = (stop - first, *(side + 2 * border for side in x.shape[3:])) if x.ndim == 5 else x.shape[2:]
        out = empty(x, (*x.shape[:2], *sides))
        is_same = out.shape == x.shape and scale is None and first == 0
        padding = None if is_same else (first, border)
        x, scale, shift = (y if y is None else y.contiguous(memory_format=LAST[x.ndim]) for y in (x, scale, shift))
        vectors = map(_dense, (weight, bias, input_bias))
        group_norm_into(x, *vectors, moments.contiguous(), scale, shift, eps, silu, out, padding)
        return out
    normed = _normed(x, input_bias, weight, bias, scale, shift, eps, moments)
    result = (F.silu(normed) if silu else normed).to(x.dtype)
    if x.ndim == 5:
        place = torch.arange(first, stop, device=x.device).clamp(min=0)  # frames before 0 are copies of it
        result = F.pad(result.index_select(2, place), (border, border, border, border, 0, 0), mode="replicate")
    return result.contiguous(memory_format=LAST[x.ndim])


def _normed(x, input_bias, weight, bias, scale, shift, eps, moments) -> torch.Tensor:
    values = x.float() if input_bias is None else x.float() + _by_channel(input_bias, x)
    mean, variance = moments[..., None].unbind(2)  # [B, groups, 1]
    normed = (values.reshape(*moments.shape[:2], -1) - mean) * torch.rsqrt(variance + eps)
    normed = normed.view(x.shape) * _by_channel(weight, x) + _by_channel(bias, x)
    if scale is not None:
        scale, shift = (F.interpolate(y.float(), size=x.shape[2:]) for y in (scale, shift))
        normed = normed * scale + shift
    return normed


@eager_op
def add_residual(
    x: torch.Tensor, update: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """Return ``x + update + bias``, in float32 and rounded once. Forward only: no gradient flows.

    Args:
        x, update: ``[B, C, H, W]``, float16, bfloat16 or float32; read fastest in channels-last layout.
        bias: ``[C]``, any float dtype; None = nothing.

    Returns:
        Like x, in channels-last layout.
    """
    checks.require_floats("x", x, ("B", "C", "H", "W"), strided=True)
    checks.require_same("x", x, tuple(x.shape), update=update)
    checks.require_typed("x", x, (x.shape[1],), bias=bias)
    if resolve_backend(backend, x) == "triton":
        from dit_accel.kernels._triton.group_norm import add_residual_into

        out = empty(x, x.shape)
        images = (y.contiguous(memory_format=LAST[4]) for y in (x, update))
        add_residual_into(*images, bias, out)
        return out
    total = x.float() + update.float()
    total = total if bias is None else total + _by_channel(bias, x)
    return total.to(x.dtype).contiguous(memory_format=LAST[4])


def empty(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor of a shape ``[B, C, …]`` in channels-last layout, without values; by default of x's dtype."""
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device, memory_format=LAST[len(shape)])


def _by_channel(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return vector.float().view(-1, *(1,) * (x.ndim - 2))


def _dense(vector: torch.Tensor | None) -> torch.Tensor | None:
    return None if vector is None else vector.contiguous()


def _require_features(x: torch.Tensor, groups: int) -> None:
    shape = ("B", "C", "T", "H", "W") if x.ndim == 5 else ("B", "C", "H", "W")
    checks.require_floats("x", x, shape, strided=True)
    if groups < 1 or x.shape[1] % groups:
        raise ShapeError(f"groups must divide the {x.shape[1]} channels of x, got {groups}")


def _require_maps(x: torch.Tensor, scale: torch.Tensor | None, shift: torch.Tensor | None) -> None:
    """Raise unless both or neither came, and each of their pixels counts for a square of x."""
    if scale is None and shift is None:
        return
    if scale is None or shift is None:
        raise ShapeError("scale and shift must be given together, got one")
    checks.require_typed("x", x, (*x.shape[:3], "H / n", "W / n"), scale=scale)
    checks.require_typed("x", x, tuple(scale.shape), shift=shift)
    times, rows, columns = x.shape[3] // scale.shape[3], scale.shape[3], scale.shape[4]
    if (rows * times, columns * times) != tuple(x.shape[3:]):
        raise ShapeError(f"scale must divide the height and width of x by one number, got {list(scale.shape)}")
