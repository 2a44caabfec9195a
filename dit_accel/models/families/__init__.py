"""Known model families, one file of facts each. Facts do not need diffusers, so the import is quick."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dit_accel.errors import UnsupportedError
from dit_accel.models import call_number, denoisers
from dit_accel.models.families.family import Family

if TYPE_CHECKING:
    import torch

PAGES = (  # modules of this package, each with its family or families
    *("flux", "hunyuan_video", "wan", "sd3", "qwen_image", "flux2", "z_image", "hunyuan_video15", "ltx", "ltx2"),
    *("cogvideox", "wan_relatives", "hidream", "lumina2", "kandinsky5", "mochi", "prx", "chroma", "longcat_image"),
    *("hunyuan_image", "krea2", "qwen_image_21", "ernie_image", "flux3", "helios", "glm_image", "minimax_h3"),
)
_found = [vars(import_module(f"{__name__}.{page}")) for page in PAGES]
FAMILIES: tuple[Family, ...] = tuple(item for page in _found for item in page.get("FAMILIES") or [page["FAMILY"]])


def known_family(transformer: torch.nn.Module) -> Family | None:
    """Return a transformer's family, by the name of its class or of a base class; None = unknown."""
    names = [cls.__name__ for cls in type(transformer).__mro__]
    return next((family for family in FAMILIES if family.model in names), None)


def require_family(transformer: torch.nn.Module) -> Family:
    """Return the family of a transformer; raise an :class:`UnsupportedError` if it is unknown."""
    if (family := known_family(transformer)) is None:
        rule = f"must be a pipeline or transformer of {', '.join(family.model for family in FAMILIES)}"
        raise UnsupportedError(f"the blocks of {type(transformer).__name__} are not known: it {rule}")
    return family


def pipeline_family(pipe: Any) -> Family | None:
    """Return the family of a pipeline's transformers; None = unknown, or they belong to several families."""
    known = {known_family(transformer) for transformer in denoisers(pipe).values()}
    return known.pop() if len(known) == 1 else None


def chunks(pipe: Any, arguments: Mapping[str, Any]) -> int:
    """Return in how many chunks a call denoises its video, one after another; 1 if that is not known."""
    number = partial(call_number, pipe, arguments)
    frames, poses = number("num_frames"), arguments.get("pose_video")
    posed = len(poses) if isinstance(poses, list) else None
    latents = number("num_latent_frames_per_chunk") or number("latent_window_size")
    unit = getattr(pipe, "vae_scale_factor_temporal", None)
    counts = [  # frames of the video, of a chunk, and of the chunk before that it repeats
        (frames, latents and unit and (latents - 1) * unit + 1, 0),  # Helios, FramePack
        (frames, number("base_num_frames"), number("overlap_history")),  # SkyReels V2
        (posed, number("segment_frame_length"), number("prev_segment_conditioning_frames")),  # Wan-Animate
    ]
    known = (sizes for sizes in counts if None not in sizes and sizes[1] > sizes[2])
    return next((max(1, -(-(whole - shared) // (size - shared))) for whole, size, shared in known), 1)
