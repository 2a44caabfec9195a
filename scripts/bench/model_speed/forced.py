"""Force densities, for random weights whose attention maps are noise."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from dit_accel.kernels import pack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.sparse.policies import fg_attn, flashomni, sparge


@contextmanager
def forced_density(rows: float, tiles: float, keys: float) -> Iterator[None]:
    """Run policies as usual, then replace their choice with random rows, tiles and single keys of these densities."""
    choose_rows, choose_tiles, choose_keys = flashomni.row_bits, sparge.select_tiles, fg_attn.select_keys

    def random_rows(probabilities: torch.Tensor, layout: TokenLayout, *arguments: Any) -> torch.Tensor:
        choose_rows(probabilities, layout, *arguments)
        batch, heads, blocks, _ = probabilities.shape
        mask = torch.rand(batch, blocks, heads, device=probabilities.device) < rows
        mask[:, layout.text_blocks] = True  # as every policy must: text is never forecast
        return pack_bits(mask)

    def random_tiles(probabilities: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        choose_tiles(probabilities, *arguments, **options)
        return pack_bits(torch.rand(probabilities.shape, device=probabilities.device) < tiles)

    def random_keys(*arguments: Any, **options: Any) -> torch.Tensor:
        chosen = choose_keys(*arguments, **options)
        bits = [
            pack_bits(torch.rand(*part.shape[:-1], 8 * part.shape[-1], device=part.device) < keys) for part in chosen
        ]
        return torch.stack(bits)

    with (
        patch.object(flashomni, "row_bits", random_rows),
        patch.object(sparge, "select_tiles", random_tiles),
        patch.object(fg_attn, "select_keys", random_keys),
    ):
        yield
