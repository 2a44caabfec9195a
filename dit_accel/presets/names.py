"""Which preset a name means: the usual one, and the video form of a plain name."""

from __future__ import annotations

from pathlib import Path

from dit_accel.presets.preset import Preset

DEFAULT = "balanced"
PLAIN = ("quality", "balanced", "turbo")  # names for any pipeline; one that makes videos gets their video form


def default_preset(preset: str | Path | Preset | None, *, is_video: bool) -> str | Path | Preset:
    """What a preset means for a pipeline, as :func:`load_preset` takes it.

    Args:
        preset: None, for the usual one; a name, a path or a :class:`Preset`. Only None and the plain names `quality`,
            `balanced` and `turbo` mean one thing for images and another for videos.
        is_video: whether the pipeline makes videos.
    """
    name = DEFAULT if preset is None else preset
    return f"video-{name}" if is_video and name in PLAIN else name
