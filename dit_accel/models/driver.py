"""Drives a transformer whose family's facts are known: sparse attention, levels, token order and FLOPs by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from dit_accel.errors import UnsupportedError
from dit_accel.kernels import lower, pack_bits
from dit_accel.kernels.kept import Kept
from dit_accel.kernels.layout import block_count
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.loop.branch import Call
from dit_accel.loop.memory import ModelSize
from dit_accel.loop.runs import Runs
from dit_accel.models import TRANSFORMER_NAMES, interceptor
from dit_accel.models.beside.compiled import is_wrapper
from dit_accel.models.block_costs import BlockCosts
from dit_accel.models.families.family import Arguments, Attention, Family, Tokens, batch_of
from dit_accel.models.hooks import ATTENTION_HOOK, ORDER_HOOK, Hook, is_compiled
from dit_accel.models.kernel_limits import KERNEL_BLOCK, can_fuse_kernels, why_no_kernels, wins_dense
from dit_accel.models.parallel.context_parallel import (
    RING,
    Exchange,
    Exchanges,
    config_of,
    parallel_degree,
    shares_layers,
)
from dit_accel.models.part_hook import FeedHook, PartHook
from dit_accel.models.samples import TextLengths, TextMasks
from dit_accel.models.token_order_hook import TokenOrder, order_hooks
from dit_accel.models.transformer import TransformerDriver
from dit_accel.sparse.projections import Projections
from dit_accel.sparse.site import SparseSite
from dit_accel.sparse.site_state import symbol_bytes

MOST_PLANS = 4  # two branches, and the tokens of one rank with those of all
RASTER = "tokens keep their order: frames have timesteps of their own, or a causal mask"
BlockHooks = Mapping[str, Callable[[str, "FamilyDriver"], Hook]]  # what makes a block's, by its list in the transformer


class FamilyDriver(TransformerDriver):
    """Levels ``output`` and ``layer`` and sparse attention in computed steps by facts; with hand-written blocks level
    ``head`` too and, on a GPU, fused kernels in every block that computes.

    Args:
        transformer, runs, name, called: as for :class:`TransformerDriver`.
        family: the transformer's facts.
        hand_written: hooks that stand in for blocks; None = the family has none.
    """

    def __init__(
        self,
        transformer: nn.Module,
        runs: Runs,
        name: str,
        called: Callable[[], nn.Module],
        family: Family,
        hand_written: BlockHooks | None = None,
    ) -> None:
        super().__init__(transformer, runs, name, called)
        self.family = family
        self.fuses = False  # whether blocks run through fused kernels in the call in progress
        self.joint: Tokens | None = None  # the joint sequence of the call in progress, where the preset works inside
        self.text: TextLengths | None = None  # of its prompts; None = no mask, or left to diffusers
        self.exchange: Exchange | None = None  # of tokens for heads, in the call in progress; None = one device or ring
        self._hand_written = hand_written
        self._masks = TextMasks()
        self._exchanges = Exchanges()
        self._order: TokenOrder | None = None  # while attached; None = raster
        self._every_row: Kept[AttentionPlan] = Kept(MOST_PLANS)
        self._sample = 0  # that comes next in an attention that runs over each apart

    @property
    def family_name(self) -> str:
        return self.family.name

    @property
    def levels(self) -> tuple[str, ...]:
        return ("output", "layer") if self._hand_written is None else ("output", "layer", "head")

    @property
    def token_order(self) -> torch.Tensor | None:
        return None if self._order is None or self._order.grid is None else self._order.permutation

    def blocks(self) -> dict[str, nn.Module]:
        return self.family.blocks(self.transformer, self.name)

    def layers(self) -> list[str]:
        return list(self.blocks())

    def tokens(self, arguments: Arguments) -> Tokens:
        """The joint sequence of a call."""
        return self.family.tokens(self.transformer, arguments)

    @property
    def works_inside(self) -> bool:
        """Whether the preset asks for anything inside the transformer."""
        preset = self.controller.preset
        return preset.forecast.level != "output" or preset.skip.steps == "all"

    def cuts_padding(self, device: torch.device) -> bool:
        """Whether padding goes: always where tiles, rows or layers may be skipped, on a GPU, and on several devices.

        Elsewhere it stays, so that a CPU's steps are diffusers' own to the bit, and where the transformer is compiled
        whole, so that prompts of other lengths need no other graph.
        """
        is_parallel = config_of(self.transformer) is not None
        on_device = device.type != "cpu" and self.compiled is None
        return self.family.cuts_padding and (self.works_inside or on_device or is_parallel)

    # Putting hooks on, and taking them off.

    def prepare(self) -> None:
        super().prepare()
        self._refuse_compiled()
        _, head_dim = self.family.heads(self.transformer)
        self._sites = {name: self.family.attentions_of(block, name) for name, block in self.blocks().items()}
        self._costs = BlockCosts(self.family, self.blocks(), self._sites)
        sites = {each.site: name for name, attentions in self._sites.items() for each in attentions}
        self._projections = Projections(self.controller.preset, self.name, TRANSFORMER_NAMES, sites, head_dim)

    def _refuse_compiled(self) -> None:
        """Raises if anything is compiled that the preset works inside of."""
        if not self.works_inside and self.controller.preset.blocks.token_order == "raster":
            return
        is_whole = is_compiled(self.transformer) or is_wrapper(self.called(), self.transformer)
        compiled = (f"block {name}" for name, block in self.blocks().items() if is_compiled(block))
        what = type(self.transformer).__name__ if is_whole else next(compiled, None)
        if what is not None:
            raise UnsupportedError(
                f"{what} is compiled, and preset {self.controller.preset.name!r} works inside of blocks: take one of "
                "level output that leaves no tiles out, such as balanced, or load the pipeline anew, uncompiled"
            )

    def attach(self, acceleration: Any) -> None:
        super().attach(acceleration)
        if self.compiled is not None:  # hooks on blocks would do nothing, and want another graph
            return
        preset = self.controller.preset
        for name, block in self.blocks().items():
            if self._hand_written is not None:
                self.hook(block, self._hand_written[name.split(".")[-2]](name, self))
            elif preset.forecast.level == "layer":
                parts, feeding = self.family.parts_of(block)
                for part, module in parts.items():
                    self.hook(module, PartHook(self.runs, name, part))
                for module in feeding:
                    self.hook(module, FeedHook(self.runs))
            if preset.skip.steps == "all" and preset.forecast.level != "head":
                for each in self._sites[name]:
                    missed = partial(self._fall_back, each)
                    hook = interceptor.AttentionHook(partial(self._caught, each), partial(self._attend, each), missed)
                    self.hook(each.module, hook, ATTENTION_HOOK)
        if self.family.order is not None and preset.blocks.token_order != "raster":
            apart = self.family.first_frame_apart(self.transformer)
            self._order = TokenOrder(preset.blocks.token_order, preset.blocks.size, apart)
            first_block = next(iter(self.blocks().values()))
            for module, order_hook in order_hooks(self._order, self.transformer, self.family.order, first_block):
                self.hook(module, order_hook, ORDER_HOOK)

    # One call.

    def forward(self, original: Any, context: str | None, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One transformer call, without the padding behind its longest prompt, with fused kernels where they can run.

        Raises:
            UnsupportedError: what the preset works inside of has been compiled since.
        """
        self._refuse_compiled()
        arguments = self.named(args, kwargs)
        latents = arguments.get("hidden_states")
        if self._order is not None:
            self._order.start(self.tokens(arguments).grid)
        can_fuse = self._hand_written is not None and isinstance(latents, torch.Tensor) and self.compiled is None
        can_fuse = can_fuse and not shares_layers(self.transformer)
        self.fuses = can_fuse and self.fuses_kernels(latents)
        try:
            if self._reads_text(arguments):
                mask = arguments[self.family.text_mask]
                self.text = self._masks.lengths(mask)
                if self.cuts_padding(mask.device):
                    self.text = self.text.divisible(parallel_degree(self.transformer), mask.shape[1])
                    text, end = arguments["encoder_hidden_states"], self.text.end
                    arguments |= {"encoder_hidden_states": text[:, :end], self.family.text_mask: mask[:, :end]}
            if self.works_inside:
                self.joint = self.tokens(arguments)
            if config_of(self.transformer) is not None:
                self._share(arguments)
            return super().forward(original, context, (), arguments)
        finally:
            self.fuses, self.text, self.joint, self.exchange = False, None, None, None
            if self._order is not None:
                self._order.is_on = False

    def _share(self, arguments: Arguments) -> None:
        """Several devices share a call's tokens; an order of tokens is theirs who have all of them, in attention."""
        order = None
        if self._order is not None and self._order.is_on:
            order, self._order.is_on = self._order.permutation, False
        device = arguments["hidden_states"].device
        self.exchange = self._exchanges.of(self.transformer, self.tokens(arguments), order, device)

    def why_not_shared(self) -> str | None:
        """Why attention of a call that several devices share must be left to diffusers, or None."""
        if shares_layers(self.transformer):
            return "several devices share each layer (tensor parallelism)"
        if config_of(self.transformer) is None:
            return None
        if self.exchange is None:
            return RING
        if self.controller.preset.forecast.level == "head":
            return "level head needs all heads of a token in one place, and context parallelism spreads them"
        heads = self.transformer.config.num_attention_heads
        return None if self.exchange.divides(heads) else f"{heads} heads can't be shared out evenly"

    def _reads_text(self, arguments: Arguments) -> bool:
        """Whether the lengths of prompts matter in this call: where padding is cut off, or attention intercepted."""
        text, mask = arguments.get("encoder_hidden_states"), arguments.get(self.family.text_mask)
        if text is None or mask is None:
            return False
        return self.cuts_padding(text.device) or self.controller.preset.skip.steps == "all"

    def take_rows(self, arguments: Arguments, rows: Sequence[int]) -> Arguments:
        """The lengths of their prompts, too."""
        if self.text is not None:
            self.text = self.text.of_rows(rows)
        return super().take_rows(arguments, rows)

    def _fall_back(self, attention: Attention, reason: str) -> None:
        self.controller.report.fall_back(attention.site, reason)

    def _caught(self, attention: Attention) -> Tokens | None:
        """Those of an attention that is to run at its site; None = it is not, and then the report says why."""
        call, tokens, text = self.controller.call, self.joint, self.text
        if call is None or not call.at_sites or tokens is None:
            return None
        if self.exchange is None and config_of(self.transformer) is not None:
            self._fall_back(attention, RING)
            return None
        if attention.sees_text and text is not None and not text.leading:
            self._fall_back(attention, "some padding precedes text")
            return None
        self._sample = 0
        return tokens.seen(attention.sees_text)

    def _attend(
        self,
        attention: Attention,
        tokens: Tokens,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dense: Callable[[], torch.Tensor],
    ) -> torch.Tensor | None:
        """An attention at its site."""
        text = self.text if attention.sees_text else None
        head_dim = q.shape[-1] if self.controller.preset.kernels.attention == "auto" else None
        reason = "autocast" if torch.is_autocast_enabled(q.device.type) else why_no_kernels(q, head_dim)
        masks_tell = tokens.padding in ("all", "mask")
        hides_padding = mask is None or (masks_tell and interceptor.hides_keys_alone(mask))
        if reason is None and text is None and not hides_padding:
            reason = interceptor.MASKED if mask.dtype == torch.bool else interceptor.WEIGHED
        if reason is not None:
            self._fall_back(attention, reason)
            return None
        attend = self.site(attention.site, attention.block, self._sample).attend_computed
        self._sample += tokens.padding == "sample"
        size = self.controller.preset.blocks.size
        if masks_tell:
            kv_len = interceptor.key_lengths(mask, tokens)
        else:
            kv_len = None if text is None or min(text.lengths) >= tokens.text else text.counts + tokens.vision
        shared, whole = self.exchange, dense
        if shared is not None:  # diffusers has made its own exchange
            q, k, v = map(shared.arrange, (q, k, v))
            whole = lambda: shared.arrange(dense())  # noqa: E731
        o = interceptor.with_leading_keys(attend, tokens, size, (q, k, v), whole, kv_len, mask)
        return o if o is None or shared is None else shared.as_received(o)

    # What its blocks share in a call.

    def site(self, name: str, block: str, sample: int = 0) -> SparseSite:
        """An attention site in the call in progress.

        Args:
            block: whose settings it takes.
            sample: its place in the call, where the model attends to each sample apart.
        """
        return SparseSite(name, self.controller.call, self.controller.preset, self._projections, block, sample)

    def fuses_kernels(self, x: torch.Tensor) -> bool:
        """Whether blocks with such features run through fused kernels."""
        _, head_dim = self.family.heads(self.transformer)
        return can_fuse_kernels(x, head_dim)

    def attends_by_kernel(self, q: torch.Tensor) -> bool:
        """Whether dense attention of q ``[B, S, H, D]`` runs in our kernel: where that is fastest, unless told else."""
        return self.fuses and self.controller.preset.kernels.attention != "reference" and wins_dense(q)

    def every_row(self, batch: int, tokens: int, heads: int, device: torch.device) -> AttentionPlan:
        """A plan under which everything computes, in the blocks that every backend takes; the latest are kept."""

        def make() -> AttentionPlan:
            rows = torch.ones(batch, block_count(tokens, KERNEL_BLOCK), heads, dtype=torch.bool, device=device)
            return lower(SparseSymbols(pack_bits(rows), None, heads, tokens, KERNEL_BLOCK))

        return self._every_row.get((batch, tokens, heads, device), make)

    # What graphs of computed steps ask.

    def decisions(self) -> tuple:
        text = None if self.text is None else (self.text.lengths, self.text.end, self.text.leading)
        return self.fuses, self.joint, text

    def shared_tensors(self) -> Any:
        return self.text, self.exchange

    def announce(self, symbols: Mapping[str, SparseSymbols], densities: Mapping[str, torch.Tensor]) -> None:
        blocks = {each.site: name for name, attentions in self._sites.items() for each in attentions}
        for name, measured in densities.items():
            self.site(name, blocks.get(name, name)).announce(symbols.get(name), measured)

    # What a call costs and remembers.

    def used(self, output: torch.Tensor, arguments: Arguments) -> torch.Tensor:
        return self.family.used(self.transformer, output, arguments)

    def size(self, arguments: Arguments) -> ModelSize:
        preset = self.controller.preset
        layout = self.tokens(arguments).layout(preset.blocks.size)
        heads, _ = self.family.heads(self.transformer)
        symbols = symbol_bytes(preset, layout, batch_of(arguments), heads)
        size, degree = self.family.size(self.transformer, arguments, layout, symbols), parallel_degree(self.transformer)
        return replace(size, width=size.width // degree, symbols=size.symbols // degree)  # of a share of it all

    def account(self, call: Call, arguments: Arguments) -> None:
        tokens = self.tokens(arguments)
        if self._order is not None and tokens.grid is None:
            self.controller.report.note(RASTER)
        if call.symbols:
            self.controller.last_layout = tokens.layout(self.controller.preset.blocks.size)
        works = self._costs.of(self.transformer, arguments, tokens)
        level = self.controller.preset.forecast.level
        for name, work in works.items():
            pairs, others = self._costs.computed(call, name, work, level)
            call.work[name] = pairs + others, work.plain
            call.attention[name] = pairs, sum(work.tiles.values())
