"""The families that are known: a page of facts each. Facts alone need no diffusers, so this is quick to import."""

from __future__ import annotations

from dit_accel.models import (
    chroma,
    cogvideox,
    flux,
    flux2,
    hidream,
    hunyuan_video,
    hunyuan_video15,
    kandinsky5,
    ltx,
    ltx2,
    lumina2,
    mochi,
    prx,
    qwen_image,
    sd3,
    wan,
    wan_relatives,
    z_image,
)
from dit_accel.models.family import Family

FAMILIES: tuple[Family, ...] = (
    *(flux.FAMILY, hunyuan_video.FAMILY, wan.FAMILY, sd3.FAMILY, qwen_image.FAMILY, flux2.FAMILY, z_image.FAMILY),
    *(hunyuan_video15.FAMILY, ltx.FAMILY, ltx2.FAMILY, cogvideox.FAMILY),
    *(wan_relatives.VACE, wan_relatives.ANIMATE, wan_relatives.SKYREELS_V2),
    *(hidream.FAMILY, lumina2.FAMILY, kandinsky5.FAMILY, mochi.FAMILY, prx.FAMILY, chroma.FAMILY),
)
