"""Read the learned projections of SLA from the files that a preset names, once per accelerated pipeline."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.kept import Kept
from dit_accel.presets import Preset
from dit_accel.sparse.policies import policy_of

PROJECTIONS = "sla.safetensors"  # the name under which fine-tuning writes them
TRAINED_WITH: dict[str, Callable[[str], Any]] = {  # the file's metadata
    "critical": float,
    "negligible": float,
    "feature_map": str,
    "block": int,
}


class Projections:
    """Projections of those attentions of a transformer for which the preset names a file.

    Warns if the preset has another share, feature map or block size than the fine-tuning that wrote a file. ``sites``
    has the name of each attention, and of the block whose settings it uses; names of ``siblings``, the transformers
    that a pipeline may have, begin block names in the files.

    Raises:
        UnsupportedError: a file is missing, lacks an attention, has an attention that the transformer lacks, or has a
            matrix that is not ``[D, D]``.
    """

    def __init__(
        self, preset: Preset, transformer: str, siblings: Collection[str], sites: Mapping[str, str], head_dim: int
    ) -> None:
        self._held: dict[str, torch.Tensor] = {}  # as read from the files
        wanted: dict[str, list[str]] = {}  # sites by file
        projects = any(policy_of(settings).projection(settings) is not None for settings in preset.skip.variants)
        for name, block in sites.items() if projects else ():
            settings = preset.skip.at(block)
            if (file := policy_of(settings).projection(settings)) is not None:
                wanted.setdefault(file, []).append(name)
        self._on_device: Kept[torch.Tensor] = Kept(2 * len(sites))  # room for two dtypes or devices
        others = tuple(f"{name}." for name in siblings if name != transformer)
        for file, names in wanted.items():
            held = load_projections(file)
            missing = [name for name in names if name not in held]
            unknown = [name for name in held if name not in sites and not name.startswith(others)]
            if missing or unknown:
                raise UnsupportedError(
                    f"skip.projection {file} must hold the blocks of this {transformer}: it lacks "
                    f"{', '.join(missing) or 'none'}, and has in addition {', '.join(unknown) or 'none'}"
                )
            for name in names:
                if len(held[name]) != head_dim:
                    raise UnsupportedError(
                        f"skip.projection {file} must hold matrices [{head_dim}, {head_dim}] for this {transformer}, "
                        f"got {list(held[name].shape)} for {name}"
                    )
                self._held[name] = held[name]
            used = {id(settings): settings for settings in (preset.skip.at(sites[name]) for name in names)}
            _compare(file, [{**vars(settings), "block": preset.blocks.size} for settings in used.values()])

    def of(self, site: str, like: torch.Tensor) -> torch.Tensor | None:
        """Return the site's projection ``[D, D]`` on the device and in the dtype of ``like``; None = it has none."""
        projection = self._held.get(site)
        if projection is None:
            return None
        key = site, like.device, like.dtype
        return self._on_device.get(key, lambda: projection.to(like.device, like.dtype))


def trained_with(path: str | Path) -> dict[str, Any]:
    """Return the settings in `TRAINED_WITH` that the fine-tuning wrote into a file.

    Raises:
        UnsupportedError: the file is no safetensors file.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UnsupportedError(f"projection must be a safetensors file, and {path} is not: {error}") from None
    return {key: cast(metadata[key]) for key, cast in TRAINED_WITH.items() if key in metadata}


def load_projections(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the learned projections by attention site, ``[D, D]`` each, from a safetensors file.

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


def _compare(path: str, variants: Sequence[Mapping[str, Any]]) -> None:
    """Warn if settings of a preset differ from the fine-tuning that wrote a file."""
    trained = trained_with(path)
    for used in variants:
        others = [f"{key} {value} (the preset: {used[key]})" for key, value in trained.items() if used[key] != value]
        if others:
            warnings.warn(f"dit-accel: {path} was trained with {', '.join(others)}, and works best so", stacklevel=2)
