"""Which preset a name means: the usual one, the video form of a plain name, and former names."""

from __future__ import annotations

from pathlib import Path

from dit_accel.presets.preset import Preset

DEFAULT = "balanced"
PLAIN = ("quality", "balanced", "turbo")  # names for any pipeline; one that makes videos gets their video form
ALIASES = {  # former names; a preset by such a name has the values that it always had
    "any-quality": "quality",
    "any-balanced": "balanced",
    "any-turbo": "turbo",
    "flux-quality": "quality",
    "flux-balanced": "balanced",
    "flux-turbo": "turbo",
    "any-video-quality": "video-quality",
    "any-video-balanced": "video-balanced",
    "any-video-turbo": "video-turbo",
    "hunyuan-quality": "video-quality",
    "hunyuan-balanced": "video-balanced",
    "hunyuan-turbo": "video-turbo",
    "wan21-quality": "video-quality",
    "wan21-balanced": "video-balanced",
    "wan21-turbo": "video-turbo",
    "wan22-quality": "video-quality",
    "wan22-balanced": "video-balanced",
    "wan22-turbo": "video-turbo",
    "hunyuan-flashomni-balanced": "hunyuan-flashomni-paper",
}


def default_preset(preset: str | Path | Preset | None, *, is_video: bool) -> str | Path | Preset:
    """What a preset means for a pipeline, as :func:`load_preset` takes it.

    Args:
        preset: None, for the usual one; a name, a path or a :class:`Preset`. Only None and the plain names `quality`,
            `balanced` and `turbo` mean one thing for images and another for videos.
        is_video: whether the pipeline makes videos.
    """
    name = DEFAULT if preset is None else preset
    return f"video-{name}" if is_video and name in PLAIN else name


def name_of_today(name: str) -> str:
    """A name with the preset's name of today in the place of a former one, e.g. of ``flux-turbo target_error=0.5``."""
    former, space, rest = name.partition(" ")
    return f"{ALIASES.get(former, former)}{space}{rest}"
