"""Conversion of finished images to arrays and PIL images on the GPU, bit for bit as diffusers does it on the CPU."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.video_processor import VideoProcessor
from PIL import Image

from dit_accel.loop.storage import empty_on_host
from dit_accel.models.stand_in import StandIn

DEVICES = ("cuda",)  # kinds of devices whose tensors are converted there
STAGED = 2**24  # bytes of the pinned buffer that results pass through; the GPU copies into other memory slowly
METHODS = ("postprocess", "denormalize", "pt_to_numpy", "numpy_to_pil")  # that a known processor has from diffusers


def convert_on_gpu(pipe: Any, undo: ExitStack) -> None:
    """Let a pipeline's image and video processors make arrays and PIL images this way until ``undo`` is closed."""
    for name in ("image_processor", "video_processor"):
        processor = getattr(pipe, name, None)
        if not isinstance(processor, VaeImageProcessor) or "postprocess" in vars(processor):
            continue  # it is of another kind, or replaced: another pipeline may have it, too
        if all(getattr(type(processor), method) is getattr(VaeImageProcessor, method) for method in METHODS):
            undo.callback(StandIn(processor, "postprocess", _postprocess).leave)
            if getattr(type(processor), "postprocess_video", None) is VideoProcessor.postprocess_video:
                undo.callback(StandIn(processor, "postprocess_video", _postprocess_video).leave)


def _postprocess(original: Callable[..., Any], _: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Postprocess ``image``, of shape (images, channels, height, width)."""
    names = dict(zip(("image", "output_type", "do_denormalize"), args, strict=False)) | kwargs
    image, kind = names.get("image"), names.get("output_type", "pil")
    is_known = isinstance(image, torch.Tensor) and image.device.type in DEVICES and image.ndim == 4
    if not is_known or kind not in ("np", "pil"):
        return original(*args, **kwargs)
    images = original(**{**names, "output_type": "pt"})
    if kind == "np":
        return _on_host(images, torch.float32)
    arrays = _on_host(images, torch.uint8)
    return [Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array) for array in arrays]


def _postprocess_video(original: Callable[..., Any], processor: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Postprocess ``video``, of shape (videos, channels, frames, height, width); a single one is not copied again."""
    names = dict(zip(("video", "output_type"), args, strict=False)) | kwargs
    video, kind = names.pop("video", None), names.pop("output_type", "np")
    if kind != "np" or not isinstance(video, torch.Tensor) or video.shape[0] != 1:
        return original(*args, **kwargs)
    return processor.postprocess(video[0].permute(1, 0, 2, 3), kind, **names)[None]


def _on_host(images: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """Return images (images, channels, height, width) in [0, 1] with channels last, in float32 or as uint8."""
    count, channels, height, width = images.shape
    host = torch.empty((count, height, width, channels), dtype=dtype)
    size = max(1, STAGED * count // max(host.nbytes, 1))
    buffer = empty_on_host((min(size, count), *host.shape[1:]), dtype)
    for part, place in zip(images.split(size), host.split(size), strict=True):
        part = part.permute(0, 2, 3, 1).float()
        part = part if dtype == torch.float32 else (part * 255).round().to(dtype)
        place.copy_(buffer[: len(part)].copy_(part.contiguous()))  # the second copy runs on all of the host's threads
    return host.numpy()
