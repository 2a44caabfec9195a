"""Known model families, one file of facts each. Facts do not need diffusers, so the import is quick."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dit_accel.errors import UnsupportedError
from dit_accel.models import denoisers
from dit_accel.models.families import (
    chroma,
    cogvideox,
    ernie_image,
    flux,
    flux2,
    flux3,
    glm_image,
    helios,
    hidream,
    hunyuan_image,
    hunyuan_video,
    hunyuan_video15,
    kandinsky5,
    krea2,
    longcat_image,
    ltx,
    ltx2,
    lumina2,
    minimax_h3,
    mochi,
    prx,
    qwen_image,
    qwen_image_21,
    sd3,
    wan,
    wan_relatives,
    z_image,
)
from dit_accel.models.families.family import Family

if TYPE_CHECKING:
    import torch

FAMILIES: tuple[Family, ...] = (
    *(flux.FAMILY, hunyuan_video.FAMILY, wan.FAMILY, sd3.FAMILY, qwen_image.FAMILY, flux2.FAMILY, z_image.FAMILY),
    *(hunyuan_video15.FAMILY, ltx.FAMILY, ltx2.FAMILY, cogvideox.FAMILY),
    *(wan_relatives.VACE, wan_relatives.ANIMATE, wan_relatives.SKYREELS_V2),
    *(hidream.FAMILY, lumina2.FAMILY, kandinsky5.FAMILY, mochi.FAMILY, prx.FAMILY, chroma.FAMILY),
    *(longcat_image.FAMILY, hunyuan_image.FAMILY, krea2.FAMILY, qwen_image_21.FAMILY, ernie_image.FAMILY),
    *(flux3.FAMILY, helios.FAMILY, glm_image.FAMILY, minimax_h3.FAMILY),
)


def known_family(transformer: torch.nn.Module) -> Family | None:
    """Return a transformer's family, by the name of its class or of a base class; None = unknown."""
    names = [cls.__name__ for cls in type(transformer).__mro__]
    return next((family for family in FAMILIES if family.model in names), None)


def require_family(transformer: torch.nn.Module) -> Family:
    """Return the family of a transformer.

    Raises:
        UnsupportedError: the family is unknown.
    """
    family = known_family(transformer)
    if family is None:
        raise UnsupportedError(
            f"the blocks of {type(transformer).__name__} are not known: it must be a pipeline or transformer of "
            f"{', '.join(family.model for family in FAMILIES)}"
        )
    return family


def pipeline_family(pipe: Any) -> Family | None:
    """Return the family of a pipeline's transformers; None = unknown, or they belong to several families."""
    known = {known_family(transformer) for transformer in denoisers(pipe).values()}
    return known.pop() if len(known) == 1 else None
