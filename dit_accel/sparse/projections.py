"""The projections that SLA learned, as presets name them: read once, when a pipeline is accelerated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dit_accel.errors import UnsupportedError
from dit_accel.presets import Skip


class Projections:
    """The projections of a transformer's attentions, wherever the preset asks for them.

    Args:
        skip: says which blocks run SLA, and names the files.
        transformer: the transformer's name in the pipeline.
        siblings: names of all transformers that the pipeline may have; names of their blocks begin so.
        sites: names of its attentions, with that of the block whose settings each has.
        head_dim: D of their attention.

    Raises:
        UnsupportedError: a file is missing, lacks an attention, holds one that the transformer lacks, or a matrix that
            is not ``[D, D]``.
    """

    def __init__(
        self, skip: Skip, transformer: str, siblings: Collection[str], sites: Mapping[str, str], head_dim: int
    ) -> None:
        self._held: dict[str, torch.Tensor] = {}
        wanted: dict[str, list[str]] = {}  # sites by file
        for name, block in sites.items():
            settings = skip.at(block)
            if settings.policy == "sla" and settings.projection is not None:
                wanted.setdefault(settings.projection, []).append(name)
        others = tuple(f"{name}." for name in siblings if name != transformer)
        for file, names in wanted.items():
            held = load_projections(file)
            missing = [name for name in names if name not in held]
            unknown = [name for name in held if name not in sites and not name.startswith(others)]
            if missing or unknown:
                raise UnsupportedError(
                    f"skip.projection {file} must hold the blocks of this {transformer}: it lacks "
                    f"{', '.join(missing) or 'none'}, and holds besides {', '.join(unknown) or 'none'}"
                )
            for name in names:
                if len(held[name]) != head_dim:
                    raise UnsupportedError(
                        f"skip.projection {file} must hold matrices [{head_dim}, {head_dim}] for this {transformer}, "
                        f"got {list(held[name].shape)} for {name}"
                    )
                self._held[name] = held[name]

    def of(self, site: str, like: torch.Tensor) -> torch.Tensor | None:
        """The site's projection ``[D, D]`` on the device and in the dtype of ``like``; None = it has none."""
        projection = self._held.get(site)
        if projection is None:
            return None
        if (projection.device, projection.dtype) != (like.device, like.dtype):
            self._held[site] = projection = projection.to(like.device, like.dtype)
        return projection


def load_projections(path: str | Path) -> dict[str, torch.Tensor]:
    """Learned projections by attention site, ``[D, D]`` each, from a safetensors file.

    Raises:
        UnsupportedError: there is no such file, or it holds something else.
    """
    if not Path(path).is_file():
        raise UnsupportedError(f"projection must be a safetensors file, and {path} does not exist")
    try:
        projections = load_file(path)
    except SafetensorError as error:
        raise UnsupportedError(f"projection must be a safetensors file, and {path} is not: {error}") from None
    for name, matrix in projections.items():
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.is_floating_point():
            raise UnsupportedError(
                f"{path} must hold floating matrices [D, D], got {matrix.dtype} {list(matrix.shape)} for {name}"
            )
    return projections
