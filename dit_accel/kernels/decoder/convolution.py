"""Convolutions of an autoencoder's features in channels-last layout, also behind nearest upsampling.

    y = conv(x, weight) + bias + residual

Nearest upsampling repeats each pixel, so two of the three taps of a following convolution read the same pixel. Their
weights are added once (:func:`fold_upsampling`), and each of the four output pixels above an input pixel is then a
convolution with 2 x 2 taps instead of 3 x 3 over the input: 2.25 times fewer operations, 3.4 with repeated frames.
"""

import torch
import torch.nn.functional as F

from dit_accel.errors import ShapeError
from dit_accel.kernels import checks
from dit_accel.kernels.backends import hopper_limit, resolve_backend
from dit_accel.kernels.custom_ops import eager_op
from dit_accel.kernels.decoder.group_norm import add_residual, empty

LAST = torch.channels_last_3d
CHANNELS = 16  # input channels of the kernel are a multiple


@eager_op
def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    padding: int = 0,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Convolve with stride 1; sums are float32. Forward only: no gradient flows.

    Args:
        x: ``[B, C, T, H, W]``, float16, bfloat16 or float32; read fastest in channels-last layout.
        weight: ``[O, C, kt, kh, kw]`` like x; read fastest in channels-last layout.
        bias: ``[O]``, in the dtype of the result; None = nothing.
        residual: like the result, added to it; None = nothing.
        padding: zeros on each side of rows and columns; x has a border instead where the kernel shall run.
        dtype: of the result, for example float32 of x in :func:`operand_dtype`; None = x's.
        backend: "auto" = the kernel where it is faster than cuDNN; "reference" = cuDNN on a GPU; "triton".

    Returns:
        ``[B, O, T - kt + 1, H + 2 padding - kh + 1, W + 2 padding - kw + 1]`` in channels-last layout.
    """
    dtype = dtype or x.dtype
    _require(x, weight, ("O", "C", "kt", "kh", "kw"), bias, dtype)
    batch, _, time, height, width = x.shape
    outputs, _, taps, rows, columns = weight.shape
    shape = batch, outputs, time - taps + 1, height + 2 * padding - rows + 1, width + 2 * padding - columns + 1
    checks.require_typed("x", x, shape, dtype, residual=residual)
    is_faster = dtype != x.dtype or outputs % 96 == 0 or (outputs == 128 and x.dtype != torch.float32)
    if _takes_kernel("reference" if padding else backend, x, outputs, is_faster=is_faster):
        residual = None if residual is None else residual.contiguous(memory_format=LAST)
        return _by_kernel(x, weight[None], bias, residual, empty(x, shape, dtype))
    x, weight = (y.to(dtype).contiguous(memory_format=LAST) for y in (x, weight))
    if residual is None:
        return _by_cudnn(x, weight, bias, padding).contiguous(memory_format=LAST)
    convolved = _by_cudnn(x, weight, None, padding)
    images = (y.contiguous(memory_format=LAST).transpose(1, 2).flatten(0, 1) for y in (residual, convolved))
    added = add_residual(*images, bias, backend="reference" if backend == "reference" else "auto")
    return added.unflatten(0, (shape[0], shape[2])).transpose(1, 2)


@eager_op
def upsampled_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """Repeat each pixel twice in rows and columns, then convolve 3 x 3. Forward only: no gradient flows.

    With eight phases, also repeat each frame but the first, and convolve 3 x 3 x 3 causally.

    Args:
        x: ``[B, C, T, H + 2, W + 2]`` with a border of one pixel, float16, bfloat16 or float32; read fastest in
            channels-last layout. With eight phases, the first frame is the one before the video.
        weight: ``[phases, O, C, kt, 2, 2]`` like x, from :func:`fold_upsampling`.
        bias: ``[O]`` like x; None = nothing.

    Returns:
        ``[B, O, T', 2H, 2W]`` like x, in channels-last layout. T' is T - kt + 1, or 2 (T - 1) - 1 with eight phases.
    """
    _require(x, weight, ("phases", "O", "C", "kt", 2, 2), bias, x.dtype)
    phases, outputs = weight.shape[:2]
    if phases not in (4, 8):
        raise ShapeError(f"weight must have 4 or 8 phases, got {phases}; make it with fold_upsampling")
    batch, _, time, height, width = x.shape
    frames = 2 * time - 3 if phases == 8 else time - weight.shape[3] + 1
    rows, columns = height - 2, width - 2
    out = empty(x, (batch, outputs, frames, 2 * rows, 2 * columns))
    if _takes_kernel(backend, x, outputs, is_faster=True):  # cuDNN's phases are moved in another pass
        return _by_kernel(x, weight, bias, None, out)
    x, kernel = (y.contiguous(memory_format=LAST) for y in (x, weight.flatten(0, 1)))
    phases_of_input = F.conv3d(x, kernel, None if bias is None else bias.repeat(phases))
    for phase, pixels in enumerate(phases_of_input.chunk(phases, 1)):
        down, right = phase // 2 % 2, phase % 2
        first = int(phases == 8 and phase < 4)  # the first frame is not repeated
        pixels = pixels[:, :, first:, down : down + rows, right : right + columns]
        out[:, :, first :: phases // 4, down::2, right::2] = pixels
    return out


def fold_upsampling(weight: torch.Tensor, *, frames: bool = False) -> torch.Tensor:
    """Return the weight of :func:`upsampled_convolution` for a convolution behind nearest upsampling.

    Args:
        weight: ``[O, C, kt, 3, 3]``.
        frames: frames are repeated too; then kt is 3.

    Returns:
        ``[4, O, C, kt, 2, 2]``, or ``[8, O, C, 2, 2, 2]`` with frames, C last; float32 sums, rounded once.
    """
    checks.require_shape("weight", weight, ("O", "C", 3 if frames else "kt", 3, 3))
    folded = weight.float()[None]  # [phases, O, C, kt, kh, kw]
    for dim, early_first in ((5, True), (4, True), *([(3, False)] if frames else [])):
        first, middle, last = folded.unbind(dim)
        early, late = torch.stack([first, middle + last], dim), torch.stack([first + middle, last], dim)
        folded = torch.cat([early, late] if early_first else [late, early])
    return folded.to(weight.dtype).permute(0, 1, 3, 4, 5, 2).contiguous().permute(0, 1, 5, 2, 3, 4)


def operand_dtype(x: torch.Tensor, outputs: int, *, backend: str = "auto") -> torch.dtype:
    """Return the dtype in which a norm of x shall write the input of a convolution with so many output channels.

    Products of float32 are TF32, whose mantissa has 10 bits. float16 has as many and takes half of the time; a norm's
    features, at most sqrt(C) times its weight, are in its range. Sums stay float32.
    """
    is_half = x.dtype == torch.float32 and _takes_kernel(backend, x, outputs, is_faster=True)
    return torch.float16 if is_half else x.dtype


def _takes_kernel(backend: str, x: torch.Tensor, outputs: int, *, is_faster: bool) -> bool:
    """Return True if the kernel runs: it can, and was chosen or is faster than cuDNN."""
    limit = hopper_limit(x)
    if x.shape[1] % CHANNELS:
        limit = f"x must have a multiple of {CHANNELS} channels, got {x.shape[1]}"
    # products of float32 are TF32, as cuDNN's are by default
    if backend == "auto" and not (is_faster and (x.dtype != torch.float32 or torch.backends.cudnn.allow_tf32)):
        limit = "cuDNN is faster"
    return resolve_backend(backend, x, {"triton": limit}) == "triton"


def _by_cudnn(x, weight, bias, padding: int) -> torch.Tensor:
    if weight.shape[2] > 1:
        return F.conv3d(x, weight, bias, padding=(0, padding, padding))
    images = x.transpose(1, 2).flatten(0, 1)  # cuDNN convolves videos slowly: Qwen-Image's last layer in 4.6 ms
    return F.conv2d(images, weight[:, :, 0], bias, padding=padding).unflatten(0, (len(x), -1)).transpose(1, 2)


def _by_kernel(x, weight, bias, residual, out) -> torch.Tensor:
    from dit_accel.kernels._triton.convolution import convolve_into

    convolve_into(x.contiguous(memory_format=LAST), weight, None if bias is None else bias.contiguous(), residual, out)
    return out


def _require(x: torch.Tensor, weight: torch.Tensor, shape: tuple, bias: torch.Tensor | None, dtype) -> None:
    checks.require_floats("x", x, ("B", "C", "T", "H", "W"), strided=True)
    channels = shape.index("C")
    checks.require_same("x", x, (*shape[:channels], x.shape[1], *shape[channels + 1 :]), weight=weight)
    checks.require_typed("x", x, (weight.shape[channels - 1],), dtype, bias=bias)
