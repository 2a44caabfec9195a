"""Find the family of a model from its name, folder or id, without loading or downloading it.

``models.json`` has the known ids, and parts of names: of distilled models, of models with a UNet, of pipelines with
further inputs (the first part decides), and of repositories that diffusers can't load.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import diffusers

from dit_accel.errors import UnsupportedError, shown
from dit_accel.models.families import FAMILIES
from dit_accel.models.families.family import Family
from dit_accel.presets import Preset
from dit_accel.presets.loading import LEVELS
from dit_accel.tools.demo import demo_names, demo_path
from dit_accel.tools.files import pipeline_index

TABLE = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
_FAMILIES = {family.name: family for family in FAMILIES}
IDS = [*TABLE["uncounted"], *(name for row in TABLE["models"] for name in row["ids"])]


@dataclass(frozen=True)
class Identity:
    """Facts about a model from its name or folder."""

    name: str  # as given by the caller, or the id of a known name without its owner
    family: str  # in presets; `any` for an unknown family
    is_video: bool
    is_distilled: bool = False  # for few steps, as its name says
    is_loadable: bool = True  # False for a family's name and an id without its owner
    steps: int | None = None  # that the model is distilled for, if its name says so
    folder: Path | None = None  # of the pipeline, on this machine

    @property
    def facts(self) -> Family | None:
        return _FAMILIES.get(self.family)

    @property
    def title(self) -> str:
        return "a model whose blocks are not known here" if self.facts is None else self.facts.title

    @property
    def is_modular(self) -> bool:
        by_family = self.facts is not None and self.facts.is_modular
        return by_family if self.folder is None else not (self.folder / "model_index.json").is_file()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Inputs, besides a prompt, without which the model's pipeline does not run."""
        name = "" if self.facts is None else self.name.lower().rstrip("/").rsplit("/", 1)[-1]
        return next((tuple(inputs) for part, inputs in TABLE["inputs"].items() if part in name), ())

    def takes(self, preset: Preset) -> bool:
        """Return True if a shipped preset suits the model: video presets for videos, others for images."""
        if preset.name.removesuffix("-8bit") in LEVELS or preset.name.startswith("video-"):
            return self.is_video == preset.name.startswith("video-")
        return preset.model in ("any", self.family)


def identify(model: str) -> Identity:
    """Find the family of a model: a family's name, a demo model, a folder of a diffusers pipeline, or an id on the Hub.

    An id of a known family may lack its owner, such as ``qwen-image``. Other names, misspelt ids, repositories that
    diffusers can't load, and models with a UNet are an UnsupportedError.
    """
    if not isinstance(model, str):
        raise UnsupportedError(f"model must be a name, a folder or an id, got {shown(model)}")
    if model in ("any", *_FAMILIES):
        return Identity(model, model, _makes_videos(model), is_loadable=False)
    squeezed, folder = squeeze(model), demo_path(model) or Path(model)
    is_distilled, steps = distillation(model)
    index = pipeline_index(folder) or {}
    components = [item for item in index.values() if isinstance(item, list) and len(item) in (2, 3)]
    classes = [item[1] for item in components if isinstance(item[1], str)]  # after its library
    if any("UNet" in name for name in classes) or _has(TABLE["with_unet"], "" if folder.exists() else squeezed):
        why = "which denoises with a UNet; a UNet can't be accelerated"
        raise UnsupportedError(f"model must be a diffusion transformer, got {shown(model)}, {why}")
    if classes:
        family = next((name for name, family in _FAMILIES.items() if family.model in classes), "any")
        blocks = getattr(diffusers, index.get("_blocks_class_name", ""), None)
        is_video = _makes_videos(family, *(blocks().output_names if blocks else map(squeeze, classes)))
        return Identity(model, family, is_video, is_distilled, steps=steps, folder=folder)
    if not folder.exists():
        _require_loadable(model)
        model = next((name for name in IDS if squeeze(name).endswith(f"/{squeezed}")), model)
    named = ((word, name) for name, family in _FAMILIES.items() for word in (*family.words_of_ids, *family.distilled))
    words = {word: name for word, name in named if word in squeezed}
    has_owner = model.count("/") == 1
    is_bare = "/" not in model and not model.startswith("demo-")
    if folder.exists() or not (has_owner or (is_bare and words)):
        known = [*demo_names(), *_FAMILIES]
        near = [name for name in known if len(squeezed) > 2 and squeezed in squeeze(name)]
        near = near or [name for name in known if get_close_matches(squeezed, [squeeze(name)], cutoff=0.7)]
        ids = "an id such as black-forest-labs/FLUX.1-dev, a folder with model_index.json, a demo model"
        names = f"{ids} ({', '.join(demo_names())}) or a family ({', '.join([*_FAMILIES, 'any'])})"
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UnsupportedError(f"model must be {names}, got {shown(model)}{hint}")
    # The longest word wins; for equal lengths the last family, which is the most specific.
    family = words[max(reversed(words), key=len)] if words else "any"
    return Identity(model, family, _makes_videos(family, squeezed), is_distilled, is_loadable=has_owner, steps=steps)


def squeeze(name: str) -> str:
    return re.sub(r"[-_. ]", "", name.lower())


def distillation(name: str) -> tuple[bool, int | None]:
    """Return True if the name of a model or LoRA says that it is distilled, and for how many steps if it says that."""
    squeezed = squeeze(name)
    steps = {word: count for family in FAMILIES for word, count in family.distilled.items()}
    bases = [word for family in FAMILIES for word in family.words_of_ids if word in squeezed]
    found = [word for word in (*steps, *TABLE["distilled"]) if word in squeezed and not _has([word], *bases)]
    named = re.search(r"(?<![\d.])(\d{1,2})[-_ ]?steps?", name.lower())
    return (True, int(named[1]) if named else steps.get(max(found, key=len))) if found else (False, None)


def _makes_videos(family: str, *names: str) -> bool:
    makes = "both" if family == "any" else _FAMILIES[family].makes
    return makes == "videos" or (makes == "both" and _has(TABLE["videos"], *names) and not _has(["text2image"], *names))


def _has(parts: Iterable[str], *names: str) -> bool:
    return any(part in name for part in parts for name in names)


def _require_loadable(model: str) -> None:
    """Raise for an id in a format that diffusers can't load, and for a known id with a mistake in its letters."""
    owner, _, bare = model.rpartition("/")
    squeezed, known = squeeze(bare), {squeeze(name.partition("/")[2]): name for name in IDS}
    for pattern, advice in TABLE["other_formats"].items():
        if re.search(pattern, model.lower()):
            cores = {name.replace("diffusers", ""): name for name in known}
            longer = sorted((core for core in cores if core.startswith(squeezed)), key=len)
            within = sorted((core for core in cores if re.search(core + r"(?!\d)", squeezed)), key=len, reverse=True)
            base = "".join(f", {known[cores[core]]}" for core in (longer or within)[:1])
            raise UnsupportedError(f"model must be in diffusers' format, got {shown(model)}, which {advice}{base}")
    numbered = [name for name in known if re.sub(r"\D", "", name) == re.sub(r"\D", "", squeezed)]
    near = get_close_matches(squeezed, numbered, n=1, cutoff=1 - 1.01 / len(squeezed))  # one wrong letter, or a swap
    if near and squeezed not in known and owner.lower() in ("", *(name.partition("/")[0].lower() for name in IDS)):
        raise UnsupportedError(f"model must be a known id, got {shown(model)}; did you mean {known[near[0]]}?")
