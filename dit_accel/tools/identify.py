"""Which model is meant: the family of a name, a folder or an id, without loading or downloading the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dit_accel.errors import UnsupportedError, shown
from dit_accel.presets import Preset
from dit_accel.presets.names import PLAIN
from dit_accel.tools.demo import demo_names, demo_path

if TYPE_CHECKING:
    from dit_accel.models.families.family import Family

DISTILLED = ("turbo", "lightning", "hyper", "lightx2v", "distill")  # parts of ids, as the families' pages have more


@dataclass(frozen=True)
class Identity:
    """A model as far as its name or folder tells.

    Args:
        name: as it was given.
        family: as presets call it; ``any`` where no facts are known of it.
        is_video: whether it makes videos.
        is_distilled: whether its name says that it was distilled to few steps.
        is_loadable: whether the name can be loaded; that of a family can't.
        steps: that the model was distilled to, where its name tells.
    """

    name: str
    family: str
    is_video: bool
    is_distilled: bool = False
    is_loadable: bool = True
    steps: int | None = None

    @property
    def title(self) -> str:
        return "a model whose blocks are not known here" if self.facts is None else self.facts.title

    @property
    def facts(self) -> Family | None:
        """The family's page; None where no facts are known."""
        return _families().get(self.family)

    @property
    def makes_images_alone(self) -> bool:
        """Whether no model of the family makes videos."""
        return not self.is_video and self.facts is not None and self.facts.makes == "images"

    def takes(self, preset: Preset) -> bool:
        """Whether a shipped preset is meant for the model: video forms are for videos alone, plain ones for images."""
        if preset.name in PLAIN or preset.name.startswith("video-"):
            return self.is_video == preset.name.startswith("video-")
        return preset.model in ("any", self.family)


def identify(model: str) -> Identity:
    """The family of a model.

    Args:
        model: a family's name, a shipped demo model, a folder of a diffusers pipeline, or an id on the hub.

    Raises:
        UnsupportedError: it is none of these.
    """
    if not isinstance(model, str):
        raise UnsupportedError(f"model must be a name, a folder or an id, got {shown(model)}")
    families = _families()
    if model in ("any", *families):
        return Identity(model, model, _makes_videos(model), is_loadable=False)
    squeezed = model.lower().translate({ord(sign): None for sign in "-_. "})
    distilled = {word: steps for family in families.values() for word, steps in family.distilled.items()}
    word = next((word for word in (*distilled, *DISTILLED) if word in squeezed), None)
    is_distilled, steps = word is not None, distilled.get(word or "")
    folder = demo_path(model) or Path(model)
    index = folder / "model_index.json"
    if index.is_file():
        classes = [value[1] for value in json.loads(index.read_text(encoding="utf-8")).values() if _is_class(value)]
        name = next((name for name, family in families.items() if family.model in classes), "any")
        is_video = _makes_videos(name) or any("Video" in each for each in classes)
        return Identity(model, name, is_video, is_distilled, steps=steps)
    if model.count("/") != 1 or folder.exists():
        raise UnsupportedError(
            f"model must be an id such as black-forest-labs/FLUX.1-dev, a folder with model_index.json, a demo model "
            f"({', '.join(demo_names())}) or a family ({', '.join([*families, 'any'])}), got {shown(model)}"
        )
    words = {word: name for name, family in families.items() for word in family.words if word in squeezed}
    # The longest, and of words as long that of the last family, which is more special than those before.
    name = words[max(reversed(words), key=len)] if words else "any"
    return Identity(model, name, _makes_videos(name) or "video" in squeezed, is_distilled, steps=steps)


@cache
def _families() -> dict[str, Family]:
    """The families by name; torch comes with the facts, and not before they are asked for."""
    from dit_accel.models.families import FAMILIES

    return {family.name: family for family in FAMILIES}


def _makes_videos(name: str) -> bool:
    """Whether all models of a family make videos."""
    return (family := _families().get(name)) is not None and family.makes == "videos"


def _is_class(value: object) -> bool:
    """Whether a value of a pipeline's index is a component: its library and its class."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)
