"""Choose the preset that a name means: the default preset, and the video form of a plain name."""

from __future__ import annotations

from pathlib import Path

from dit_accel.presets.preset import Preset

DEFAULT = "balanced"
PLAIN = ("quality", "balanced", "turbo")  # names for any pipeline; video pipelines get the video form


def default_preset(preset: str | Path | Preset | None, *, is_video: bool) -> str | Path | Preset:
    """Return the argument of :func:`load_preset` for a pipeline that makes images or videos; None = `balanced`.

    Only None and the plain names `quality`, `balanced` and `turbo` have a separate form for videos.
    """
    name = DEFAULT if preset is None else preset
    return f"video-{name}" if is_video and name in PLAIN else name
