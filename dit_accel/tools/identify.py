"""Which model is meant: the family of a name, a folder or an id, without loading or downloading the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dit_accel.errors import UnsupportedError, shown
from dit_accel.presets import VIDEO_FAMILIES, Preset
from dit_accel.presets.names import PLAIN
from dit_accel.tools.demo import demo_names, demo_path

WORDS = {  # parts of model ids in small letters, without "-", "_" and "."; the first that fits
    "flux2": "flux2",
    "flux": "flux",
    "hunyuanvideo15": "hunyuan_video15",
    "hunyuanvideo": "hunyuan_video",
    "vace": "wan_vace",
    "wan22animate": "wan_animate",
    "wananimate": "wan_animate",
    "skyreelsv2": "skyreels_v2",
    "wan2": "wan",
    "stablediffusion3": "sd3",
    "qwenimage": "qwen_image",
    "zimage": "z_image",
    "ltx2": "ltx2",
    "ltxvideo": "ltx",
    "cogvideox": "cogvideox",
    "hidream": "hidream",
    "luminaimage2": "lumina2",
    "kandinsky5": "kandinsky5",
    "mochi": "mochi",
    "prx": "prx",
    "chroma1": "chroma",
}
DISTILLED = {  # parts of ids, likewise: steps, where each such model has the same
    "schnell": 4,
    "klein4b": 4,
    "klein9b": 4,
    "turbo": None,
    "lightning": None,
    "hyper": None,
    "lightx2v": None,
    "fastwan": None,
    "distill": None,
}


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
        return _titles()[self.family]

    @property
    def makes_images_alone(self) -> bool:
        """Whether no model of the family makes videos."""
        return not self.is_video and self.family not in ("any", "kandinsky5")

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
    if model in _titles():
        return Identity(model, model, model in VIDEO_FAMILIES, is_loadable=False)
    squeezed = model.lower().translate({ord(sign): None for sign in "-_. "})
    word = next((word for word in DISTILLED if word in squeezed), None)
    distilled, steps = word is not None, DISTILLED.get(word or "")
    folder = demo_path(model) or Path(model)
    index = folder / "model_index.json"
    if index.is_file():
        classes = [value[1] for value in json.loads(index.read_text(encoding="utf-8")).values() if _is_class(value)]
        from dit_accel.models.families import FAMILIES

        family = next((family.name for family in FAMILIES if family.model in classes), "any")
        is_video = family in VIDEO_FAMILIES or any("Video" in name for name in classes)
        return Identity(model, family, is_video, distilled, steps=steps)
    if model.count("/") != 1 or folder.exists():
        raise UnsupportedError(
            f"model must be an id such as black-forest-labs/FLUX.1-dev, a folder with model_index.json, a demo model "
            f"({', '.join(demo_names())}) or a family ({', '.join(_titles())}), got {shown(model)}"
        )
    family = next((family for word, family in WORDS.items() if word in squeezed), "any")
    return Identity(model, family, family in VIDEO_FAMILIES or "video" in squeezed, distilled, steps=steps)


@cache
def _titles() -> dict[str, str]:
    """What people call each family, by its name; torch comes with the facts, and not before they are asked for."""
    from dit_accel.models.families import FAMILIES

    return {family.name: family.title for family in FAMILIES} | {"any": "a model whose blocks are not known here"}


def _is_class(value: object) -> bool:
    """Whether a value of a pipeline's index is a component: its library and its class."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)
