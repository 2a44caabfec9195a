"""Sparse attention and forecasts of whole outputs the slow, obvious way, in any model: masks, and outputs overwritten.

It knows nothing of families, hooks or kernels: which modules attend, and over how many vision tokens, the test says.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from dit_accel.kernels import pooled_map, unpack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.sparse.policies import sparge
from tests.models.naive_flux import NaiveAttention, Remembered, Schedule


class Sequence(NamedTuple):
    """Sequence of a model's attention.

    Args:
        attentions: names of the attention modules, a regular expression.
        vision: image or video tokens; the rest is text.
        text_first: whether text comes before them.
        pads_end: whether padding follows all tokens, and not the text.
    """

    attentions: str
    vision: int
    text_first: bool = True
    pads_end: bool = False

    def modules(self, transformer: torch.nn.Module) -> dict[str, torch.nn.Module]:
        return {name: each for name, each in transformer.named_modules() if re.fullmatch(self.attentions, name)}


class NaiveTiles:
    """Dense attention with masks for the tiles that SpargeAttn skips; records the kept tiles."""

    def __init__(self, schedule: Schedule, sequence: Sequence) -> None:
        self.schedule, self.sequence, self.kept, self._depth = schedule, sequence, [], 0
        self._attend = functional.scaled_dot_product_attention

    @contextmanager
    def within(self, transformer: torch.nn.Module) -> Iterator[list[float]]:
        """Replaces attention in the model's modules."""

        def count(step):
            def hook(*_):
                self._depth += step

            return hook

        with ExitStack() as undo:
            for module in self.sequence.modules(transformer).values():
                undo.callback(module.register_forward_pre_hook(count(1)).remove)
                undo.callback(module.register_forward_hook(count(-1)).remove)
            functional.scaled_dot_product_attention = self
            undo.callback(setattr, functional, "scaled_dot_product_attention", self._attend)
            yield self.kept

    def __call__(self, query, key, value, attn_mask=None, **settings):
        """Inputs ``[B, H, S, D]``."""
        missing = key.shape[2] - query.shape[2]  # queries of text that is among the keys alone
        own = query.shape[2] == self.sequence.vision or not missing
        if self._depth and self.schedule.skips and own and key.shape[2] >= self.sequence.vision:
            if missing and attn_mask is None:  # then too the keys of text come last
                attn_mask = torch.ones(len(key), 1, 1, key.shape[2], dtype=torch.bool)
            attn_mask = self._mask(functional.pad(query, (0, 0, missing, 0)), key, attn_mask)[:, :, missing:]
        return self._attend(query, key, value, attn_mask=attn_mask, **settings)

    def tiles(self, q, k, layout, kv_len):
        """Tiles ``[B, H, T, T]`` that are kept of q and k ``[B, S, H, D]``."""
        probabilities = pooled_map(q, k, layout.block, kv_len=kv_len, backend="reference").probabilities
        return unpack_bits(sparge.tile_bits(probabilities, layout, self.schedule.preset.skip.tau_kv), layout.blocks)

    def _mask(self, query, key, attn_mask):
        """Pairs of tokens that attend, bool ``[B, H, S, S]``. Kernels want keys that count to come first."""
        tokens, (_, vision, text_first, pads_end) = query.shape[2], self.sequence
        text, places = tokens - vision, torch.arange(tokens).expand(len(query), -1)
        if padded := attn_mask is not None:
            valid = attn_mask[:, 0, -1 if text_first and not pads_end else 0]
            if text_first and not pads_end:  # the image, text that counts, and padding
                text_first, kinds = False, torch.where(places >= text, 0, torch.where(valid, 1, 2))
                places = kinds.argsort(dim=1, stable=True)
        layout = TokenLayout(text, vision, self.schedule.preset.blocks.size, text_first=text_first)
        q, k = (x.take_along_dim(places[:, None, :, None], 2).transpose(1, 2) for x in (query, key))
        kv_len = valid.sum(1).to(torch.int32) if padded else None
        tiles = self.tiles(q, k, layout, kv_len)
        self.kept.append(tiles.float().mean().item())
        by_token = tiles.repeat_interleave(layout.block, 2).repeat_interleave(layout.block, 3)[..., :tokens, :tokens]
        back = places.argsort(1)[:, None]
        by_token = by_token.take_along_dim(back[..., None], 2).take_along_dim(back[..., None, :], 3)
        return by_token & valid[:, None, None] if padded else by_token


@contextmanager
def forecast_outputs(transformer: torch.nn.Module, schedule: Schedule) -> Iterator[None]:
    """Record a transformer's outputs and overwrite them in DISPATCH steps; calls of a step are branches, in order."""
    calls, remembered = defaultdict(int), defaultdict(list)

    def hook(module, arguments, output):
        leaves, spec = pytree.tree_flatten(output)
        histories = remembered[calls[schedule.step]]
        calls[schedule.step] += 1
        if not histories:
            histories.extend(Remembered(schedule) for _ in leaves)
        if schedule.mode == "dispatch":
            return pytree.tree_unflatten([history.forecast() for history in histories], spec)
        for history, leaf in zip(histories, leaves, strict=True):
            if schedule.records:
                history.record(leaf)
        return output

    handle = transformer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def overwritten_rows(transformer: torch.nn.Module, schedule: Schedule, sequence: Sequence) -> Iterator[None]:
    """Compute everything in the model's attention, and overwrite reused rows with their forecast."""
    attend, running = functional.scaled_dot_product_attention, []

    def naive(query, key, value, **settings):
        if not running:
            return attend(query, key, value, **settings)
        site = running.pop()  # which attends itself
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        text, size = q.shape[1] - sequence.vision, schedule.preset.blocks.size
        o = site.attend(q, k, v, TokenLayout(text, sequence.vision, size, text_first=sequence.text_first))
        running.append(site)
        return o.transpose(1, 2)

    with ExitStack() as undo:
        for module in sequence.modules(transformer).values():
            enter = partial(lambda site, *_: running.append(site), NaiveAttention(schedule))
            undo.callback(module.register_forward_pre_hook(enter).remove)
            undo.callback(module.register_forward_hook(lambda *_: running.clear()).remove)
        functional.scaled_dot_product_attention = naive
        undo.callback(setattr, functional, "scaled_dot_product_attention", attend)
        yield
