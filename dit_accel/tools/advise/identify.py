"""Find the family of a model from its name, folder or id, without loading or downloading it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dit_accel.errors import UnsupportedError, shown
from dit_accel.presets import Preset
from dit_accel.presets.loading import PLAIN
from dit_accel.tools.demo import demo_names, demo_path

if TYPE_CHECKING:
    from dit_accel.models.families.family import Family

DISTILLED = ("turbo", "lightning", "hyper", "lightx2v", "distill")  # parts of ids; family files have more
WITH_UNET = (  # parts of names of models that denoise with a UNet
    *("sdxl", "stablediffusionxl", "stablediffusionv1", "stablediffusion2", "stablediffusionv2", "sdturbo", "ssd1b"),
    *("stablevideodiffusion", "playgroundv2", "animatediff", "animagine", "juggernautxl", "realvisxl", "dreamshaper"),
    *("kandinsky2", "kandinsky3", "kolors", "stablecascade", "wuerstchen", "deepfloyd", "audioldm", "musicldm"),
    *("ifixl", "latentconsistency"),
)
SEPARATORS = {ord(sign): None for sign in "-_. "}
SHORTEST_WORD = 4  # letters of a class name that a model's bare name may begin with
_UNET = "model must be a diffusion transformer, got {}, which denoises with a UNet; a UNet can't be accelerated"


@dataclass(frozen=True)
class Identity:
    """Facts about a model from its name or folder."""

    name: str  # as given by the caller
    family: str  # in presets; `any` for an unknown family
    is_video: bool
    is_distilled: bool = False  # for few steps, as its name says
    is_loadable: bool = True  # False for a family's name and an id without its owner
    steps: int | None = None  # that the model is distilled for, if its name says so

    @property
    def facts(self) -> Family | None:
        """Facts of the family; None for an unknown family."""
        return _families().get(self.family)

    @property
    def title(self) -> str:
        return "a model whose blocks are not known here" if self.facts is None else self.facts.title

    @property
    def is_modular(self) -> bool:
        """Return True if the family's models have modular pipelines alone."""
        return self.facts is not None and self.facts.is_modular

    def takes(self, preset: Preset) -> bool:
        """Return True if a shipped preset suits the model: video presets for videos, others for images."""
        if preset.name in PLAIN or preset.name.startswith("video-"):
            return self.is_video == preset.name.startswith("video-")
        return preset.model in ("any", self.family)


def identify(model: str) -> Identity:
    """Find the family of a model: a family's name, a demo model, a folder of a diffusers pipeline, or an id on the Hub.

    An id of a known family may lack its owner, such as ``qwen-image``. Other names, and models with a UNet, are an
    UnsupportedError.
    """
    if not isinstance(model, str):
        raise UnsupportedError(f"model must be a name, a folder or an id, got {shown(model)}")
    families = _families()
    if model in ("any", *families):
        return Identity(model, model, _makes_videos(model), is_loadable=False)
    squeezed = model.lower().translate(SEPARATORS)
    is_distilled, steps = _distillation(squeezed)
    folder = demo_path(model) or Path(model)
    if not folder.exists() and any(word in squeezed for word in WITH_UNET):
        raise UnsupportedError(_UNET.format(shown(model)))
    if (index := folder / "model_index.json").is_file():
        values = json.loads(index.read_text(encoding="utf-8")).values()  # components are pairs of library and class
        classes = [pair[1] for pair in values if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], str)]
        if any("UNet" in name for name in classes):
            raise UnsupportedError(_UNET.format(shown(model)))
        family = next((name for name, family in families.items() if family.model in classes), "any")
        is_video = _makes_videos(family) or any("Video" in name for name in classes)
        return Identity(model, family, is_video, is_distilled, steps=steps)
    words = {
        word: name
        for name, family in families.items()
        for word in (*family.words, *family.distilled)
        if word in squeezed
    }
    has_owner = model.count("/") == 1
    is_bare = "/" not in model and not model.startswith("demo-")
    of_class = "" if words else _class_of(squeezed.rpartition("/")[2])
    if folder.exists() or not (has_owner or (is_bare and (words or of_class))):
        raise UnsupportedError(
            f"model must be an id such as black-forest-labs/FLUX.1-dev, a folder with model_index.json, a demo model "
            f"({', '.join(demo_names())}) or a family ({', '.join([*families, 'any'])}), got {shown(model)}"
            + _meant(squeezed, [*demo_names(), *families])
        )
    # The longest word wins; for equal lengths the last family, which is the most specific.
    family = words[max(reversed(words), key=len)] if words else "any"
    is_video = _makes_videos(family) or "video" in squeezed or "Transformer3D" in of_class
    return Identity(model, family, is_video, is_distilled, is_loadable=has_owner, steps=steps)


@cache
def _families() -> dict[str, Family]:
    """Return the families by name; imported on first use, because they import torch."""
    from dit_accel.models.families import FAMILIES

    return {family.name: family for family in FAMILIES}


def _makes_videos(name: str) -> bool:
    return (family := _families().get(name)) is not None and family.makes == "videos"


def _distillation(squeezed: str) -> tuple[bool, int | None]:
    """Return True if a name says that the model is distilled, and the number of steps if the name determines it."""
    families = _families().values()
    steps = {word: count for family in families for word, count in family.distilled.items()}
    bases = [word for family in families for word in family.words if word in squeezed]
    found = [word for word in (*steps, *DISTILLED) if word in squeezed and not any(word in base for base in bases)]
    return (True, steps.get(max(found, key=len))) if found else (False, None)


def _class_of(squeezed: str) -> str:
    """Return diffusers' transformer class whose name a model's name begins with, such as auraflow; empty = none."""
    import diffusers

    names = {name.partition("Transformer")[0].lower(): name for name in dir(diffusers) if "Transformer" in name}
    words = [word for word in names if len(word) >= SHORTEST_WORD and word != "prior" and squeezed.startswith(word)]
    return names[max(words, key=len)] if words else ""


def _meant(squeezed: str, names: Sequence[str]) -> str:
    """Return a question with the names that look like a misspelt or shortened one, or nothing."""
    plain = {name: name.translate(SEPARATORS) for name in names}
    near = get_close_matches(squeezed, plain.values(), n=3, cutoff=0.7)
    found = [name for name, bare in plain.items() if bare in near or (len(squeezed) > 2 and squeezed in bare)]
    return f"; did you mean {' or '.join(found)}?" if found else ""
