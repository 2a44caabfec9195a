"""Symbols and densities of a captured step, packed so that a replay copies them out with one launch per dtype.

They must be copied, because the loop and the report keep them, while the next replay of any graph of the pool may
overwrite their memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dit_accel.kernels.symbols import SparseSymbols


class Announcement:
    """Symbols and measured densities of a captured step's attentions.

    It is made during the capture, so that packing is part of the graph.
    """

    def __init__(self, symbols: Mapping[str, SparseSymbols], densities: Mapping[str, torch.Tensor]) -> None:
        parts = [tensor for item in symbols.values() for tensor in item.tensors()]
        tensors = {id(tensor): tensor for tensor in (*parts, *densities.values())}  # sites may share them
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        forms: dict[int, torch.Tensor] = {}
        self._places: dict[int, tuple[torch.dtype, int]] = {}
        for key, tensor in tensors.items():
            alike = by_dtype.setdefault(tensor.dtype, [])
            forms[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self._places[id(forms[key])] = tensor.dtype, len(alike)
            alike.append(tensor.reshape(-1))
        self._packed = {dtype: torch.cat(alike) for dtype, alike in by_dtype.items()}
        self._sizes = {dtype: [item.numel() for item in alike] for dtype, alike in by_dtype.items()}
        self._symbols = {name: item.mapped(lambda tensor: forms[id(tensor)]) for name, item in symbols.items()}
        self._densities = {name: forms[id(tensor)] for name, tensor in densities.items()}

    def copied(self) -> tuple[dict[str, SparseSymbols], dict[str, torch.Tensor]]:
        """Copy symbols and densities of the latest replay."""
        parts = {dtype: packed.clone().split(self._sizes[dtype]) for dtype, packed in self._packed.items()}

        def part(form: torch.Tensor) -> torch.Tensor:
            dtype, place = self._places[id(form)]
            return parts[dtype][place].view(form.shape)

        symbols = {name: item.mapped(part) for name, item in self._symbols.items()}
        return symbols, {name: part(form) for name, form in self._densities.items()}
