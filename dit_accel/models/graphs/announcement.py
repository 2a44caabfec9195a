"""Symbols and densities of a captured step, packed, so that a replay copies them out with a launch for each dtype.

The next replay of any graph of the pool may overwrite what they are made in, and the loop and the report keep them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dit_accel.kernels.symbols import SparseSymbols


class Announcement:
    """What the attentions of a captured step have drawn and measured.

    Made within the capture, so that packing is part of the graph.

    Args:
        symbols, densities: by name of the attention.
    """

    def __init__(self, symbols: Mapping[str, SparseSymbols], densities: Mapping[str, torch.Tensor]) -> None:
        drawn = [tensor for each in symbols.values() for tensor in each.tensors()]
        tensors = {id(tensor): tensor for tensor in (*drawn, *densities.values())}  # sites may share them
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        forms: dict[int, torch.Tensor] = {}
        self._places: dict[int, tuple[torch.dtype, int]] = {}
        for key, tensor in tensors.items():
            alike = by_dtype.setdefault(tensor.dtype, [])
            forms[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self._places[id(forms[key])] = tensor.dtype, len(alike)
            alike.append(tensor.reshape(-1))
        self._packed = {dtype: torch.cat(alike) for dtype, alike in by_dtype.items()}
        self._sizes = {dtype: [each.numel() for each in alike] for dtype, alike in by_dtype.items()}
        self._symbols = {name: each.mapped(lambda tensor: forms[id(tensor)]) for name, each in symbols.items()}
        self._densities = {name: forms[id(tensor)] for name, tensor in densities.items()}

    def copied(self) -> tuple[dict[str, SparseSymbols], dict[str, torch.Tensor]]:
        """Symbols and densities of the latest replay, in memory of their own."""
        parts = {dtype: packed.clone().split(self._sizes[dtype]) for dtype, packed in self._packed.items()}

        def part(form: torch.Tensor) -> torch.Tensor:
            dtype, place = self._places[id(form)]
            return parts[dtype][place].view(form.shape)

        symbols = {name: each.mapped(part) for name, each in self._symbols.items()}
        return symbols, {name: part(form) for name, form in self._densities.items()}
