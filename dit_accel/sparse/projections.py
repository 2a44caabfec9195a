"""Read the projections that training added to attention from the files that a preset names.

Fine-tuning here writes ``sla.safetensors``, a matrix by attention. In a checkpoint keys tell the method: TurboWan has
``proj_l`` in each block (SLA), FastWan ``to_gate_compress`` (VSA). diffusers drops both when it loads the weights.
"""

import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.kept import Kept
from dit_accel.presets import Preset
from dit_accel.sparse.inputs import Projection
from dit_accel.sparse.policies import policy_of

PROJECTIONS = "sla.safetensors"  # the name under which fine-tuning writes them
TRAINED_WITH = {"critical": float, "negligible": float, "feature_map": str, "block": int}  # the file's metadata
TRAINED_KEY = re.compile(r"(\w+\.\d+)\.(?:\w+\.)*(proj_l|to_gate_compress)\.(weight|bias)$")  # of a checkpoint


class Projections:
    """Projections of those attentions of a transformer for which the preset names a file.

    Warns if the preset has another share, feature map or block size than the fine-tuning that wrote a file. ``sites``
    has the name of each attention, and of the block whose settings it uses; names of ``siblings``, the transformers
    that a pipeline may have, begin block names in the files. ``heads`` are their number and the features of one. A file
    that can't be read, or has other blocks or matrices than the transformer, is an :class:`UnsupportedError`.
    """

    def __init__(
        self,
        preset: Preset,
        transformer: str,
        siblings: Collection[str],
        sites: Mapping[str, str],
        heads: tuple[int, int],
    ) -> None:
        self._held: dict[str, Projection] = {}  # as read from the files
        self._on_device: Kept[Projection] = Kept(2 * len(sites))  # room for two dtypes or devices
        sites = sites if preset.skip.skips else {}
        read: dict[str, dict[str, Projection]] = {}  # by file
        used: dict[tuple[str, int], dict[str, Any]] = {}  # keys of each variant of the preset
        prefix = f"{transformer}."  # of attentions, which a checkpoint leaves out
        known = {*sites, *(name.removeprefix(prefix) for name in sites)}
        others = tuple(f"{name}." for name in siblings if name != transformer)
        for name, block in sites.items():
            settings = preset.skip.at(block)
            if (file := getattr(settings, "projection", None)) is None:
                continue
            held = read.get(file) or read.setdefault(file, load_projections(file, transformer))
            found = held.get(name, held.get(name.removeprefix(prefix)))
            used[file, id(settings)] = {**vars(settings), "block": preset.blocks.size}
            side = math.prod(heads) if policy_of(settings).projects_heads else heads[1]
            unknown = [name for name in held if name not in known and not name.startswith(others)]
            if found is None or unknown or len(found.weight) != side:
                needs = f"each block of this {transformer} and skip.policy {settings.policy!r}"
                got = f"{'none' if found is None else list(found.weight.shape)}, and {', '.join(unknown) or 'no block'}"
                rule = f"must hold a matrix [{side}, {side}] for {needs}: for {name} it holds {got} in addition"
                raise UnsupportedError(f"skip.projection {file} {rule}")
            self._held[name] = found
        for (file, _), keys in used.items():
            trained = trained_with(file).items()
            if others := [f"{key} {value} (the preset: {keys[key]})" for key, value in trained if keys[key] != value]:
                text = f"dit-accel: {file} was trained with {', '.join(others)}, and works best so"
                warnings.warn(text, stacklevel=2)

    def of(self, site: str, like: torch.Tensor) -> Projection | None:
        """Return the site's projection on the device and in the dtype of ``like``; None = it has none."""
        if (projection := self._held.get(site)) is None:
            return None
        return self._on_device.get((site, like.device, like.dtype), lambda: projection.to(like))


def trained_with(path: str | Path) -> dict[str, Any]:
    """Return the settings in `TRAINED_WITH` that fine-tuning wrote into a file or a folder's file; else nothing."""
    file = Path(path) / PROJECTIONS if Path(path).is_dir() else path
    if not Path(file).is_file():
        return {}
    with _opened(file) as opened:
        metadata = opened.metadata() or {}
    return {key: cast(metadata[key]) for key, cast in TRAINED_WITH.items() if key in metadata}


def method_of(path: str | Path) -> str | None:
    """Return the name of the learned modules in a checkpoint, or else of the file of a fine-tuning; None = neither."""
    return next((method for _, _, _, method, _ in _entries(Path(path), "transformer")), None)


def load_projections(path: str | Path, transformer: str = "transformer") -> dict[str, Projection]:
    """Return the learned projections of a file, or of a folder of a fine-tuning, a transformer or a pipeline.

    They have the names of attentions, or of a checkpoint's blocks. Any other file is an :class:`UnsupportedError`.
    """
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for file, key, site, _, part in _entries(Path(path), transformer):
        with _opened(file) as opened:
            parts.setdefault(site, {})[part] = opened.get_tensor(key)
    for name, tensors in parts.items():
        weight = tensors.get("weight", torch.empty(0))
        if weight.dim() != 2 or weight.shape[0] != weight.shape[1] or not weight.is_floating_point():
            keys = "keys proj_l (SLA), keys to_gate_compress (VSA), or by attention floating matrices [D, D]"
            raise UnsupportedError(f"{path} must hold {keys}, got {weight.dtype} {list(weight.shape)} for {name}")
    return {name: Projection(**tensors) for name, tensors in parts.items()}


def _entries(path: Path, transformer: str) -> Iterator[tuple[Path, str, str, str, str]]:
    """Yield file, key, attention or block, method and part of each learned tensor."""
    files = [path] if not path.is_dir() else [*path.glob("*.safetensors"), *path.glob(f"{transformer}/*.safetensors")]
    for file in sorted(files):
        with _opened(file) as opened:
            matches = {key: TRAINED_KEY.search(key) for key in list(opened.keys())}
        is_tuned = file.name == PROJECTIONS or (file == path and not any(matches.values()))
        for key, match in matches.items():
            if match is not None:
                yield file, key, *match.groups()
            elif is_tuned:
                yield file, key, key, file.name, "weight"


@contextmanager
def _opened(file: str | Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise UnsupportedError(f"projection must be a safetensors file, and {file} is not: {error}") from None
