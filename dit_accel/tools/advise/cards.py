"""GPUs that commands know by name, with their memory."""

import re
from typing import NamedTuple

FLOAT8_SINCE = (8, 9)  # compute capability from which matrix products of float8 run
OTHER_CARDS = {"laptop", "ti", "super", "d", "nvl", "pcie", "mig"}  # a GPU with such a word in its name is another one


class Card(NamedTuple):
    title: str
    memory_gib: int
    capability: tuple[int, int]


CARDS = {
    "t4": Card("T4", 16, (7, 5)),
    "v100": Card("V100", 32, (7, 0)),
    "3060": Card("RTX 3060", 12, (8, 6)),
    "3070": Card("RTX 3070", 8, (8, 6)),
    "3080": Card("RTX 3080", 10, (8, 6)),
    "3090": Card("RTX 3090", 24, (8, 6)),
    "4060": Card("RTX 4060", 8, (8, 9)),
    "4070": Card("RTX 4070", 12, (8, 9)),
    "4080": Card("RTX 4080", 16, (8, 9)),
    "4090": Card("RTX 4090", 24, (8, 9)),
    "5060": Card("RTX 5060", 8, (12, 0)),
    "5070": Card("RTX 5070", 12, (12, 0)),
    "5080": Card("RTX 5080", 16, (12, 0)),
    "5090": Card("RTX 5090", 32, (12, 0)),
    "a10": Card("A10", 24, (8, 6)),
    "a10g": Card("A10G", 24, (8, 6)),
    "a40": Card("A40", 48, (8, 6)),
    "a6000": Card("RTX A6000", 48, (8, 6)),
    "l4": Card("L4", 24, (8, 9)),
    "l40": Card("L40", 48, (8, 9)),
    "l40s": Card("L40S", 48, (8, 9)),
    "6000-ada": Card("RTX 6000 Ada", 48, (8, 9)),
    "pro-6000": Card("RTX PRO 6000", 96, (12, 0)),
    "a100-40gb": Card("A100 of 40 GB", 40, (8, 0)),
    "a100": Card("A100", 80, (8, 0)),
    "h20": Card("H20", 96, (9, 0)),
    "h100": Card("H100", 80, (9, 0)),
    "h200": Card("H200", 141, (9, 0)),
    "b200": Card("B200", 180, (10, 0)),
}


def known_card(name: str) -> str | None:
    """Return the key of a GPU's name, such as ``rtx4090``, ``NVIDIA H100 80GB HBM3`` or ``h100``; None = unknown."""
    words = set(re.split(r"[\W_]+", re.sub(r"rtx(?=\w)", " ", name.lower())))
    return None if words & OTHER_CARDS else next((key for key in CARDS if words.issuperset(key.split("-"))), None)
