"""GPUs that commands know by name, with their memory."""

import json
import re
from pathlib import Path
from typing import NamedTuple

VARIANTS = {"laptop", "ti", "super", "d", "nvl", "mig", "pro", "max", "ultra", "q", "xt", "xtx"}  # other GPUs by a word


class Card(NamedTuple):
    title: str
    memory_gib: int | None  # None = differs by machine
    capability: tuple[int, int] | None  # None = not from NVIDIA
    device: str  # of torch

    @property
    def is_unified(self) -> bool:
        """Return True if the host shares the memory, so that offloading frees none."""
        return self.capability == (12, 1)


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_ROWS = [(key, *row, device) for device, cards in _TABLE.items() for key, row in cards.items()]
CARDS = {key: Card(title, gib, able and tuple(able), device) for key, title, gib, able, device in _ROWS}


def known_card(name: str) -> str | None:
    """Return the key of a GPU's name, such as ``rtx4070ti`` or ``NVIDIA H100 80GB HBM3``; None = unknown."""
    spaced = re.sub(r"(?<=\d{4})(ti|xtx|xt)?(super)?\b", r" \1 \2", re.sub(r"rtx(?=\w)", " ", name.lower()))
    words = set(re.split(r"[\W_]+", spaced))
    key = max((key for key in CARDS if words.issuperset(key.split("-"))), key=lambda key: key.count("-"), default="")
    return None if not key or words & VARIANTS - set(key.split("-")) else key
