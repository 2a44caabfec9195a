"""Lower bound on the memory of a run, from the size of its output, so that nothing that fits is refused."""

import math
from collections.abc import Mapping
from typing import Any

from dit_accel.errors import OutOfMemoryError, UnsupportedError
from dit_accel.models import call_number, denoisers

TOKEN_PATCH = 2  # latent pixels of a token's side where the transformer does not say more
USUAL = 6  # tensors of a step, as tools/advise/memory counts them, over those of the lower bound


def require_memory(pipe: Any, arguments: Mapping[str, Any]) -> None:
    """Raise an error if the memory can't hold a run, or the free memory probably can't hold a batch of prompts."""
    from torch.cuda import get_device_properties

    from dit_accel.models.free_memory import GIB, read_host_memory, read_memory

    size, needed = estimated(pipe, arguments)
    place, prompts = getattr(pipe, "_execution_device", None), arguments.get("prompt")
    if not needed or place is None:
        return
    free = read_host_memory().free if place.type != "cuda" else None
    if isinstance(prompts, list):
        free, needed = free or read_memory(place).free, needed * USUAL * len(prompts)
        if needed > free:
            needs = f"{len(prompts)} of {size} need about {needed / GIB:,.1f} GiB, and {free / GIB:,.1f} are free"
            raise OutOfMemoryError(f"out of memory: {needs}; use a smaller batch")
    elif needed > (there := free or get_device_properties(place).total_memory):
        needs = f"{size} need at least {needed / GIB:,.0f} GiB of memory, but {place} has {there / GIB:,.0f} GiB"
        raise UnsupportedError(f"{needs}: use a smaller height, width or number of frames")


def estimated(pipe: Any, arguments: Mapping[str, Any]) -> tuple[str, int]:
    """Return the size of a run in words, and the bytes that each of its prompts needs at least; 0 = unknown."""
    from dit_accel.stages.decode import PAGES, FusedDecode

    transformers = list(denoisers(pipe).values())
    names = ("height", "width", "num_frames", "num_images_per_prompt")
    height, width, frames, images = (call_number(pipe, arguments, name) for name in names)
    if not transformers or not height or not width:
        return "", 0
    frames, images, config = frames or 1, images or 1, transformers[0].config
    scale = first_whole(pipe, "vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio") or 8
    per_latent = first_whole(pipe, "vae_scale_factor_temporal", "vae_temporal_compression_ratio") or 1
    side = scale * max(first_whole(config, "patch_size") or 1, TOKEN_PATCH)
    tokens = (height // side) * (width // side) * ((frames - 1) // per_latent + 1)
    channels = (first_whole(config, "num_attention_heads") or 0) * (first_whole(config, "attention_head_dim") or 0)
    itemsize, vae = transformers[0].dtype.itemsize, getattr(pipe, "vae", None)
    needed = [
        4 * tokens * channels * images * itemsize,  # queries, keys, values and the stream that attention adds to
        3 * 4 * frames * height * width * images,  # the output in float32
    ]
    in_parts = getattr(vae, "use_tiling", False) or getattr(vae, "use_slicing", False)
    is_plain = isinstance(arguments.get("prompt"), list) and FusedDecode.on(vae) is None  # fused, it may turn to tiles
    if (is_plain or pipe._execution_device.type == "cpu") and not in_parts:
        config = getattr(vae, "config", None)
        (first, *_) = getattr(config, "block_out_channels", None) or (getattr(config, "base_dim", 0),)
        peak = getattr(PAGES.get(type(vae).__name__), "PEAKS", ((math.inf,),))[-1][0] / scale**2  # as measured
        needed.append(int(min(2 * first, peak / USUAL) * height * width) * itemsize)  # of the decoder's last block
    return f"{width} × {height} pixels" + (f" × {frames} frames" if frames > 1 else ""), max(needed)


def first_whole(holder: Any, *names: str) -> int | None:
    """Return the first attribute that is a whole number; of a tuple its last number."""
    values = (getattr(holder, name, None) for name in names)
    values = (value[-1] if isinstance(value, tuple | list) and value else value for value in values)
    return next((value for value in values if isinstance(value, int)), None)
