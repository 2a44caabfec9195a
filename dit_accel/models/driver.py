"""Driver of a transformer of a known family: sparse attention, all levels, token order and FLOPs of each block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dit_accel.errors import UnsupportedError
from dit_accel.kernels.layout import Grid
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.loop.branch import Call
from dit_accel.loop.memory import ModelSize
from dit_accel.loop.rows import Rows
from dit_accel.loop.tracker import StepMode
from dit_accel.models import TRANSFORMER_NAMES, interceptor
from dit_accel.models.beside.compiled import is_wrapper
from dit_accel.models.block_costs import BlockCosts
from dit_accel.models.families.family import Arguments, Attention, Family, Tokens, batch_of, latents_of
from dit_accel.models.hooks import ATTENTION_HOOK, OFFLOAD_HOOKS, ORDER_HOOK, Hook, is_compiled, lift_others
from dit_accel.models.kernel_limits import EveryRow, why_no_kernels, why_not_fused, wins_dense
from dit_accel.models.parallel import context_parallel as parallel
from dit_accel.models.part_hook import FeedHook, PartHook
from dit_accel.models.samples import TextLengths, TextMasks, arguments_of_rows
from dit_accel.models.session import Session
from dit_accel.models.token_order_hook import ReorderInput, ReorderOutput, TokenOrder
from dit_accel.models.transformer import Passed, TransformerDriver
from dit_accel.presets import Preset
from dit_accel.sparse.head_site import HeadSite
from dit_accel.sparse.policies import policy_of
from dit_accel.sparse.projections import Projections
from dit_accel.sparse.site_state import symbol_bytes
from dit_accel.sparse.tile_site import TileSite

RASTER = "tokens keep their order: frames have their own timesteps, or a causal mask"
BlockHooks = Mapping[str, Callable[[str, "FamilyDriver"], Hook]]  # by the name of the transformer's list of blocks


@dataclass(frozen=True)
class CallFacts:
    """Facts that the blocks of one call share, read before the first block."""

    fuses: bool = False  # blocks run through fused kernels
    text: TextLengths | None = None  # None = the call has no mask, or attention is left to diffusers
    joint: Tokens | None = None  # the joint sequence, where the preset works inside of the transformer
    exchange: parallel.Exchange | None = None  # None = one device, or a ring of devices
    grid: Grid | None = None  # of the vision tokens, if blocks get them in the preset's order

    def of_rows(self, rows: Sequence[int]) -> CallFacts:
        return self if self.text is None else replace(self, text=self.text.of_rows(rows))


NO_CALL = CallFacts()


class FamilyDriver(TransformerDriver):
    """Drives a transformer by its family's facts: levels ``output`` and ``layer``, and sparse attention.

    Families with hand-written blocks, whose hooks replace the forward of blocks, may also have level ``head``, and have
    fused kernels in every computed block on a GPU.
    """

    def __init__(
        self,
        transformer: nn.Module,
        preset: Preset,
        name: str,
        called: Callable[[], nn.Module],
        family: Family,
        hand_written: BlockHooks | None = None,
    ) -> None:
        super().__init__(transformer, preset, name, called)
        self.family = family
        self.family_name = family.name
        self.levels = ("output", "layer", "head") if family.fused == "head" else ("output", "layer")
        self._hand_written = hand_written
        self._order: TokenOrder | None = None  # of the preset, if the transformer can take it; None = raster
        self._grid: Grid | None = None  # of the latest call's vision tokens, where they have an order
        self._masks = TextMasks()
        self._exchanges = parallel.Exchanges()
        self.every_row = EveryRow()

    @property
    def token_order(self) -> torch.Tensor | None:
        return None if self._order is None or self._grid is None else self._order.of(self._grid)

    @property
    def facts(self) -> CallFacts:
        call = self.session.call
        return NO_CALL if call is None or call.blocks.facts is None else call.blocks.facts

    def blocks(self) -> dict[str, nn.Module]:
        return self.family.blocks(self.transformer, self.name)

    def layers(self) -> list[str]:
        return list(self.blocks())

    def prepare(self) -> None:
        super().prepare()
        self._refuse_compiled()
        self._sites = {name: self.family.attentions_of(block, name) for name, block in self.blocks().items()}
        self._costs = BlockCosts(self.family, self.blocks(), self._sites)
        sites = {item.site: name for name, attentions in self._sites.items() for item in attentions}
        heads, skip = self.family.heads(self.transformer), self.preset.skip
        self._needs_grid = any(policy_of(variant).needs_grid for variant in skip.variants)
        is_whole = self.family.order is not None and parallel.config_of(self.transformer) is None
        if self._needs_grid and (not is_whole or any(self.family.attentions.values())):
            model = type(self.transformer).__name__
            raise UnsupportedError(f"skip.policy 'vsa' needs a video's tokens alone in attention, on one GPU: {model}")
        self._projections = Projections(self.preset, self.name, TRANSFORMER_NAMES, sites, heads)

    def _refuse_compiled(self) -> None:
        """Raise an error if the preset works inside blocks and these, or the transformer, are compiled."""
        if not self.preset.works_inside and self.preset.blocks.token_order == "raster":
            return
        is_whole = is_compiled(self.transformer) or is_wrapper(self.called(), self.transformer)
        compiled = (f"block {name}" for name, block in self.blocks().items() if is_compiled(block))
        what = type(self.transformer).__name__ if is_whole else next(compiled, None)
        if what is not None:
            why = f"{what} is compiled, and preset {self.preset.name!r} works inside of blocks"
            fix = "use a preset of level output that skips no tiles, such as balanced, or reload the pipeline"
            raise UnsupportedError(f"{why}: {fix} without compiling it")

    def attach(self, session: Session, hook: Hook) -> None:
        super().attach(session, hook)
        if self.compiled is not None:  # hooks on blocks would do nothing but cause a recompilation
            return
        preset = self.preset
        for name, block in self.blocks().items():
            if self._hand_written is not None:
                self.hook(block, self._hand_written[name.split(".")[-2]](name, self))
                lift_others(block, *OFFLOAD_HOOKS)
            elif preset.forecast.level == "layer":
                parts, feeding = self.family.parts_of(block)
                for part, module in parts.items():
                    self.hook(module, PartHook(session, name, part, self.family.calls.get(part, 1)))
                for module in feeding:
                    self.hook(module, FeedHook(session))
            if preset.skip.steps == "all" and preset.forecast.level != "head":
                for item in self._sites[name]:
                    caught = CaughtAttention(self, item)
                    hook = interceptor.AttentionHook(caught.tokens, caught.attend, caught.fall_back)
                    self.hook(item.module, hook, ATTENTION_HOOK)
        if self.family.order is not None and preset.blocks.token_order != "raster":
            apart = self.family.first_frame_apart(self.transformer)
            self._order = TokenOrder(preset.blocks.token_order, preset.blocks.size, apart)
            for name, axes in self.family.order.tables.items():
                self.hook(self.transformer.get_submodule(name), ReorderOutput(self._reordered, axes), ORDER_HOOK)
            self.hook(next(iter(self.blocks().values())), ReorderInput(self._reordered), ORDER_HOOK)
            end = self.transformer.get_submodule(self.family.order.exit)
            self.hook(end, ReorderInput(self._reordered, undo=True), ORDER_HOOK)

    def _reordered(self, x: torch.Tensor, axis: int, undo: bool) -> torch.Tensor:
        return self._order.apply(x, self.facts.grid, axis, undo)

    def enter(self, call: Call, passed: Passed, arguments: Arguments) -> tuple[Passed, Arguments]:
        """Refuse blocks compiled since :meth:`prepare`, cut padding off behind the longest prompt, and read facts."""
        self._refuse_compiled()
        arguments, facts = self._read(arguments)
        is_part = call.computed_rows is not None and call.mode is not StepMode.DISPATCH
        call.blocks.facts = facts.of_rows(call.computed_rows or ()) if is_part else facts
        return ((), arguments), arguments

    def _read(self, arguments: Arguments) -> tuple[Arguments, CallFacts]:
        """Return a call's arguments, with removable padding cut off, and its facts."""
        arguments, text = self._cut(arguments)
        latents, tokens = next(iter(latents_of(arguments)), None), self.family.tokens(self.transformer, arguments)
        can_fuse = self._hand_written is not None and latents is not None and self.compiled is None
        features = arguments.get(self.family.computes_in, latents)
        self._grid = None if self._order is None else tokens.grid
        is_parallel, exchange = parallel.config_of(self.transformer) is not None, None
        if is_parallel and not self._needs_grid:
            exchange = self._exchanges.of(self.transformer, tokens, self.token_order, latents.device)
        return arguments, CallFacts(
            fuses=can_fuse and not parallel.shares_layers(self.transformer) and self.fuses_kernels(features),
            text=text,
            joint=tokens if self.works_inside else None,
            exchange=exchange,
            grid=None if is_parallel else self._grid,  # attention alone sees the tokens of all devices
        )

    def _cut(self, arguments: Arguments) -> tuple[Arguments, TextLengths | None]:
        """Cut padding off where the family can; return the arguments, and the prompts' lengths if these are needed."""
        text, mask = arguments.get("encoder_hidden_states"), arguments.get(self.family.text_mask)
        if text is None or mask is None:
            return arguments, None
        cuts = self.cuts_padding(text.device)
        if not cuts and self.preset.skip.steps != "all":
            return arguments, None
        lengths = self._masks.lengths(mask)
        if cuts:
            lengths = lengths.divisible(parallel.parallel_degree(self.transformer), mask.shape[1])
            return self.family.cut(arguments, lengths)
        return arguments, lengths

    def cuts_padding(self, device: torch.device) -> bool:
        """Return True if padding is cut off: if tiles, rows or layers may be skipped, on a GPU, or on several devices.

        On a CPU it stays otherwise, so that steps equal diffusers' bit by bit, in a transformer that is compiled whole
        to spare recompilations, and under the caller's own plan for several devices, whose tokens must divide evenly.
        """
        if self.family.cut is None:
            return False
        if parallel.config_of(self.transformer) is not None:
            return self.family.split is not None
        return self.works_inside or (device.type != "cpu" and self.compiled is None)

    def fuses_kernels(self, x: torch.Tensor) -> bool:
        _, head_dim = self.family.heads(self.transformer)
        reason = why_not_fused(x, head_dim)
        if reason is not None and x.is_cuda:
            self.session.run.report.note(f"blocks run without fused kernels: {reason}")
        return reason is None

    def site(self, name: str, block: str, sample: int = 0) -> TileSite | HeadSite:
        """Return an attention site in the call in progress, with a block's settings; samples may attend apart."""
        preset = self.preset
        kind = HeadSite if preset.forecast.level == "head" else TileSite
        return kind(name, self.session.call, preset, self._projections, block, sample)

    def attends_by_kernel(self, q: torch.Tensor) -> bool:
        """Return True if our kernel runs dense attention of q ``[B, S, H, D]``: if it is fastest and not disabled."""
        return self.facts.fuses and self.preset.kernels.attention != "reference" and wins_dense(q)

    def decisions(self) -> tuple:
        facts = self.facts
        text = None if facts.text is None else (facts.text.lengths, facts.text.end, facts.text.leading)
        return facts.fuses, facts.joint, text

    def shared_tensors(self) -> Any:
        return self.facts.text, self.facts.exchange

    def announce(self, symbols: Mapping[str, SparseSymbols], densities: Mapping[str, torch.Tensor]) -> None:
        blocks = {item.site: name for name, attentions in self._sites.items() for item in attentions}
        for name, measured in densities.items():
            self.site(name, blocks.get(name, name)).announce(symbols.get(name), measured)

    def used(self, arguments: Arguments, output: torch.Tensor, rows: Rows) -> torch.Tensor:
        arguments = arguments if rows is None else arguments_of_rows(arguments, rows)
        return self.family.used(self.transformer, output, arguments)

    def size(self, arguments: Arguments) -> ModelSize:
        preset = self.preset
        arguments, _ = self._cut(arguments)
        layout = self.family.tokens(self.transformer, arguments).layout(preset.blocks.size)
        heads, _ = self.family.heads(self.transformer)
        symbols = symbol_bytes(preset, layout, batch_of(arguments), heads)
        size = self.family.size(self.transformer, arguments, layout, symbols)
        most = -(-heads // parallel.parallel_degree(self.transformer))  # heads of the device that has most
        return replace(size, width=size.width * most // heads, symbols=size.symbols * most // heads)

    def lengths(self, arguments: Arguments) -> tuple:
        """Text tokens that blocks get: a mask of the same shape may have another length."""
        _, text = self._cut(arguments)
        return () if text is None else (text.end,)

    def account(self, call: Call, arguments: Arguments) -> None:
        tokens = self.family.tokens(self.transformer, arguments)
        if self._order is not None and tokens.grid is None:
            self.session.run.report.note(RASTER)
        if call.blocks.symbols:
            self.session.run.last_layout = tokens.layout(self.preset.blocks.size)
        self._costs.account(call, self._costs.of(self.transformer, arguments, tokens), self.preset.forecast.level)


class CaughtAttention:
    """An attention that keeps its own processor, while its call of torch's attention runs at a tile site."""

    def __init__(self, driver: FamilyDriver, facts: Attention) -> None:
        self._driver = driver
        self._facts = facts
        self._sample = 0  # next sample, if the model attends to each sample separately

    def fall_back(self, reason: str) -> None:
        self._driver.session.run.report.fall_back(self._facts.site, reason)

    def tokens(self) -> Tokens | None:
        """Return the tokens if the attention runs at its site; None = it does not, and the report says why."""
        call, facts = self._driver.session.call, self._driver.facts
        tokens, text = facts.joint, facts.text
        if call is None or not call.skips or tokens is None:
            return None
        if facts.exchange is None and parallel.config_of(self._driver.transformer) is not None:
            self.fall_back(parallel.RING)
            return None
        if self._facts.sees_text and text is not None and not text.leading:
            self.fall_back("some padding precedes text")
            return None
        self._sample = 0
        return tokens.seen(self._facts.sees_text)

    def attend(self, caught: interceptor.Caught) -> torch.Tensor | None:
        """Run the attention at its site; None = it can't run there."""
        facts, preset = self._driver.facts, self._driver.preset
        tokens, (q, *_), mask, dense, _ = caught
        text = facts.text if self._facts.sees_text else None
        head_dim = q.shape[-1] if preset.kernels.attention == "auto" else None
        reason = "autocast" if torch.is_autocast_enabled(q.device.type) else why_no_kernels(q, head_dim)
        reads_mask = tokens.padding in ("all", "mask")
        hides_padding = mask is None or (reads_mask and interceptor.hides_keys_alone(mask))
        if reason is None and text is None and not hides_padding:
            reason = interceptor.MASKED if mask.dtype == torch.bool else interceptor.WEIGHED
        if reason is not None:
            self.fall_back(reason)
            return None
        site = self._driver.site(self._facts.site, self._facts.block, self._sample)
        self._sample += tokens.padding == "sample"
        if reads_mask:
            kv_len = interceptor.key_lengths(mask, tokens)
        else:
            kv_len = None if text is None or min(text.lengths) >= tokens.text else text.counts + tokens.vision
        shared = facts.exchange
        if shared is not None:  # diffusers has already exchanged tokens for heads
            qkv = tuple(map(shared.arrange, caught.qkv))
            caught = caught._replace(qkv=qkv, dense=lambda: shared.arrange(dense()))
        o = interceptor.with_leading_keys(site.attend_computed, caught, preset.blocks.size, kv_len)
        return o if o is None or shared is None else shared.as_received(o)
