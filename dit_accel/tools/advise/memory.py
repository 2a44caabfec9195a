"""Count the memory that a pipeline takes on a GPU, by component, and choose what waits in host memory.

``models.json`` has billions of parameters, and peaks of autoencoders, which are rows of ``docs/results/decoding.json``.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dit_accel.tools.advise.cards import Card
from dit_accel.tools.advise.identify import TABLE, Identity, squeeze
from dit_accel.tools.demo import demo_arguments

WAYS = TABLE["ways"]  # the fastest first: options of the command, line of Python, modules that stay, reason to print
BILLION = 2e9 / 2**30  # GiB of a billion parameters in bf16
RESERVED = 1.0  # GiB of a card for driver, context, loaded kernels, and gaps between tensors
STREAMS = 24  # tensors [tokens, width] that a plain step holds, at most (speed-flux2-klein-4b.json)
TEXT = 512  # tokens
DECODING = 1.2  # of the measured peak of an autoencoder, for latents and prompts in a whole call (recommended.json)
BY_FRAME = 1.5  # the same if one frame is decoded after another: the first decode is compared, and keeps frames twice
RESULTS = 4 * 6 / 2**30  # GiB per pixel of the copies of a result that tiles are joined in
EIGHT_BITS = 0.545  # share of its bytes in bf16 of a transformer with layers in 8 bits, at most (recommended.json)
GAPS = 1.03  # between tensors, where weights stay: 15.2 GiB are reserved for a peak of 13.2 (recommended.json)
STORED = 0.65  # share of its bytes in bf16 that a quantised transformer has, at most (small-cards.json, cast)
TWO_BLOCKS = 1 / 8  # of a transformer, at most: one runs while the next one is uploaded
PROMPT = 0.5  # GiB of the features of a prompt
LAYER = 2.5  # GiB of the embedding of a text encoder, at most; ``models.json`` has smaller ones


class Placement(NamedTuple):
    """Way to run a pipeline on a card."""

    way: str = "whole"  # in WAYS
    in_tiles: bool = False  # the autoencoder decodes in tiles
    gib: float | None = None  # peak by count; None = unknown
    in_8_bits: bool = False  # layers run in 8 bits, and their weights wait in host memory


@dataclass(frozen=True)
class Footprint:
    """GiB of the components of a pipeline in bf16, and of the tensors of a step and of decoding."""

    transformers: tuple[float, ...]
    texts: tuple[float, ...]  # text encoders, and other components
    autoencoder: float
    step: float
    decoding: tuple[float, float]  # in one piece, and in tiles; 0 = unknown, infinite if tiles are known
    size: str
    counted_as: str  # id of the counted model if the name does not say the size
    fused: float  # decoding in one piece with fused kernels, where the decoder's own forward does not fit
    layer: float  # the largest layer of a text encoder, its embedding
    undivided: float  # other components, whose layers can't move one by one
    ways: tuple[str, ...]  # of WAYS, those that the pipeline has, the fastest first

    def needed(self, way: str, decoding: float) -> float:
        """Return the peak in GiB; ``way`` is one of WAYS."""
        largest, decoding_alone = max(self.transformers), self.autoencoder + decoding
        if way == "whole":
            return self.weights + max(self.step, decoding, PROMPT)
        if way == "text":
            stay = (*self.transformers, self.autoencoder, self.undivided)
            return GAPS * (sum(stay) + max(self.step, decoding, self.layer + PROMPT))
        if way == "model":
            return max(largest + self.step, *(text + PROMPT for text in self.texts), decoding_alone)
        return self.undivided + max(TWO_BLOCKS * largest + self.step, self.layer + PROMPT, decoding_alone)

    def plan(self, card: Card, *, rounds: bool = False) -> Placement | None:
        """Return the fastest plan that fits a card, which may round layers; None = no plan does.

        Decoding is in tiles if it never fits. Layers are in 8 bits where that avoids a slower way.
        """
        if card.memory_gib is None:
            return Placement()
        ways, rounds = (("whole",), False) if card.is_unified else (self.ways, rounds)
        every = ((way, bool(tiles), self.needed(way, self.decoding[tiles])) for tiles in (0, 1) for way in ways)
        best = next((Placement(*plan) for plan in every if plan[2] <= card.memory_gib - RESERVED), None)
        if not rounds or (best is not None and best.way in ("whole", "text")):  # the transformer stays on the card
            return best
        parts = {"transformers": tuple(EIGHT_BITS * gib for gib in self.transformers)}
        peaks = (self.decoding[0], self.fused)  # the first decode is compared if that fits
        others = (replace(self, **parts, decoding=(gib, self.decoding[1])).plan(card) for gib in peaks)
        smaller = (plan._replace(in_8_bits=True) for plan in others if plan and plan.way != "group")  # moves bf16
        return min(filter(None, (best, *smaller)), key=lambda it: (it.in_tiles, self.ways.index(it.way)), default=None)

    @property
    def weights(self) -> float:
        """GiB of all weights, which host memory holds if they are offloaded."""
        return sum((*self.transformers, *self.texts, self.undivided)) + self.autoencoder

    def __str__(self) -> str:
        parts = {"transformer": sum(self.transformers), "text encoders": sum(self.texts)}
        parts |= {"autoencoder": self.autoencoder, f"a step of {self.size}": self.step}
        parts |= zip(("decoding", "decoding in tiles"), self.decoding, strict=True)
        known = {name: f"{gib:.1f}" if 0 < gib < math.inf else "unknown" for name, gib in parts.items()}
        return ", ".join(f"{name} {gib}" for name, gib in known.items())


def row_of(model: Identity) -> Mapping[str, Any]:
    """Return the row of a model in ``models.json``, or of its family's largest; empty = its family is not there."""
    rows = [row for row in TABLE["models"] if row["family"] == model.family and model.name not in TABLE["uncounted"]]
    rows.sort(key=lambda row: sum(row["transformers"]))
    return max(reversed(rows), key=lambda row: len(row["part"]) * (row["part"] in squeeze(model.name)), default={})


def count(model: Identity, size: tuple[int | None, ...], *, few: bool, quantized: bool) -> Footprint | None:
    """Count the memory of a call of ``size``: height, width, frames; None = the model's sizes are not known."""
    row = dict(row_of(model))
    if model.folder is not None:
        row = {"size": (1024, 1024, 1), "calls": 2} | row | _sizes_of_files(model.folder)
    if not row.get("width"):
        return None
    trained = demo_arguments(model.folder) if model.folder else {}
    defaults = map(trained.get, ("height", "width", "num_frames"), row["size"])
    height, width, frames = (side or default for side, default in zip(size, defaults, strict=True))
    side, per_token = row.get("token", (16, 4))
    tokens = math.ceil(height / side) * math.ceil(width / side) * ((frames - 1) // per_token + 1)
    tokens *= 2 if "image" in model.inputs and not model.is_video else 1  # references are tokens too
    calls = 1 if few else row.get("calls", 1)  # in one batch; few steps run without guidance
    kind = TABLE["autoencoders"].get(row["vae"], {})
    rows, columns, clip = kind.get("size", (1, 1, 1))
    tiled = kind.get("tiled_gib", 0.0)
    whole = kind.get("gib", math.inf if tiled else 0.0)
    share = height * width / (rows * columns) * (DECODING * frames / clip if clip else BY_FRAME)  # 0: by frame
    versions = re.compile(r"\d\.\d").findall
    new = set(versions(model.name)).difference(*map(versions, row.get("ids", [])))
    return Footprint(
        tuple((STORED if quantized else 1) * BILLION * billions for billions in row["transformers"]),
        tuple(BILLION * TABLE["texts"].get(text, text) for text in row["texts"]),
        BILLION * row.get("vae_billions", kind.get("billions", 0.0)),
        STREAMS * calls * (tokens + TEXT) * row["width"] * BILLION / 1e9,
        (share * whole, tiled and DECODING * tiled * frames / clip + RESULTS * height * width * frames),
        f"{height} x {width}" + (f" x {frames} frames" if frames > 1 else ""),
        "" if model.folder or (row["part"] in squeeze(model.name) and not new) else row["ids"][0],
        share * kind.get("fused_gib", whole),
        max([TABLE["layers"].get(text, LAYER) for text in row["texts"]], default=0.0),
        sum(BILLION * TABLE["texts"][part] for part in row.get("whole", {}).values()),
        ("whole", "model") if model.is_modular else tuple(row.get("ways", WAYS)),  # modular pipelines offload no layers
    )


def _sizes_of_files(folder: Path) -> dict[str, Any]:
    """Return the sizes of a pipeline's files, as a row has them; no width if the files do not say all sizes."""
    configs = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/config.json")}
    billions = {name: _billions(folder / name) for name in configs}
    transformers = [name for name in configs if name.startswith("transformer")]
    config = configs[transformers[0]] if transformers else {}
    width = (config.get("num_attention_heads") or 0) * (config.get("attention_head_dim") or 0)
    width = all(billions.values()) and (width or config.get("hidden_size") or config.get("dim"))
    row = {"width": width, "transformers": [billions.pop(name) for name in transformers]}
    row |= {"vae": configs.get("vae", {}).get("_class_name"), "vae_billions": billions.pop("vae", 0.0)}
    return row | {"texts": list(billions.values())}


def _billions(folder: Path) -> float:
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            total += sum(math.prod(item.get_shape()) for item in map(tensors.get_slice, tensors.keys()))
    return total / 1e9
