"""One attention site: from q and k to symbols, then GEMM-Q, attention and GEMM-O under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from dit_accel.kernels import (
    PooledMap,
    attention,
    gemm_o_dispatch,
    gemm_o_update,
    gemm_q,
    linear_attention,
    lower,
    pooled_map,
    unpack_bits,
)
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.loop.branch import Call
from dit_accel.loop.forecast import History, forecast_weights
from dit_accel.loop.report import AttentionRecord
from dit_accel.loop.tracker import StepMode
from dit_accel.presets import Preset
from dit_accel.sparse import policies
from dit_accel.sparse.policies import flashomni
from dit_accel.sparse.probe import attention_error, probed_rows
from dit_accel.sparse.projections import Projections
from dit_accel.sparse.site_state import KEPT_TILES, SiteState, state_name

_ATTENDED, _ERROR = 3, slice(5, 6)  # places in what a site measures


class Inputs(NamedTuple):
    """What one attention gets.

    Args:
        q, k, v: ``[B, S, H, D]``.
        layout: of the S tokens.
        dense: the model's own attention of them, for calls that leave no tile out.
        kv_len: int32 ``[B]``, valid keys of each sample; None = all.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: TokenLayout
    dense: Callable[[], torch.Tensor]
    kv_len: torch.Tensor | None = None


class SparseSite:
    """The site's state in one call, with the ops that read and write it in the order of the data flow.

    A computed call: :meth:`attend_computed`, and at an UPDATE of level head :meth:`project_out`.
    DISPATCH: :meth:`query`, :meth:`attend`, :meth:`project_out`.

    Args:
        name: the site's name in the report, which is its block's where that has one attention.
        call: the call in progress.
        preset: of the run; section ``skip`` holds as it is for this block.
        projections: of SLA's linear attention.
        block: whose settings hold; None = that of the same name.
        sample: place in the call of the only one that the attention sees; 0 also where it sees all.
    """

    def __init__(
        self,
        name: str,
        call: Call,
        preset: Preset,
        projections: Projections,
        block: str | None = None,
        sample: int = 0,
    ) -> None:
        self._key = state_name(name, sample)
        self.state = call.site(self._key, SiteState)
        self._name = name
        self._call = call
        self._preset = preset
        self._projections = projections
        self._skip = preset.skip.at(block or name)
        self._gemm = preset.kernels.gemm
        self._at_head = preset.forecast.level == "head"
        self._plan: AttentionPlan | None = None

    @property
    def dispatches(self) -> bool:
        return self._call.mode is StepMode.DISPATCH

    @property
    def caches_bias(self) -> bool:
        """Whether the output projection goes through :meth:`project_out`, and not through its module."""
        return self._at_head and self._call.mode is not StepMode.FULL

    @property
    def plan(self) -> AttentionPlan:
        """The lowered symbols of DISPATCH steps."""
        if self._plan is None:
            self._plan = self.state.plan or lower(self.state.symbols)
        return self._plan

    def attend_computed(self, inputs: Inputs) -> torch.Tensor:
        """Attention ``[B, S, H, D]`` of a call that computes every row; draws and records what the preset asks for."""
        q, k, v, layout, dense, kv_len = inputs
        plan = self._draw(inputs) if self._skips or self.caches_bias else None
        o = dense() if plan is None else self.attend(q, k, v, kv_len, plan)
        is_exact = plan is None
        if self._skips and self._skip.residual:
            is_exact = self.state.tiles_step == self._call.tick.step
            o = self._keep_residual(o, dense()) if is_exact else o.add_(self.state.residual.read())
        if self._skip.probe_blocks and not is_exact:  # dense attention of a few rows, whose error the host reads later
            rows = probed_rows(layout, self._skip.probe_blocks, self.state.probe_turn)
            self.state.probe_turn += 1
            self._densities[_ERROR] = attention_error(o, q, k, v, rows, kv_len=kv_len)
            self.state.probed = sum(row.stop - row.start for row in rows) / layout.tokens
        if self._at_head and self._call.records and not self.caches_bias:  # else project_out does
            self._record(o)
        return o

    def _keep_residual(self, sparse: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Remembers what new tiles leave out, and returns the dense output, which is counted beside the sparse one."""
        self.state.residual = self._call.branch.memory.features.keep(dense - sparse)
        self._densities[_ATTENDED] += 1
        return dense

    def _record(self, o: torch.Tensor) -> None:
        memory, size = self._call.branch.memory, self._call.branch.size
        if self.state.attention is None:
            self.state.attention = History(memory.order, memory.attention(size.layout))
        self.state.attention.record(self._call.coordinate, (o,))

    def _draw(self, inputs: Inputs) -> AttentionPlan | None:
        """New symbols; returns the plan of this call's own attention, None where that is dense."""
        call, reuse, (q, k, _, layout, _, kv_len) = self._call, self._preset.reuse, inputs
        pooled = pooled_map(q, k, layout.block, kv_len=kv_len) if self.caches_bias else None
        symbols = self._tiles(inputs, pooled)
        drawn, error = lower(symbols) if self._skips else None, torch.zeros(1, device=q.device)
        attended = None if self._scores_in_full else drawn
        projected = torch.zeros_like(error)
        if self.caches_bias:
            every_row = symbols.cache_bits
            tau_rows = flashomni.ramped(reuse.tau_q, call.progress, reuse.ramp)
            symbols = replace(symbols, cache_bits=flashomni.row_bits(pooled.probabilities, layout, tau_rows))
            before = self.state.symbols.cache_bits if self._rebases else every_row
            projected = unpack_bits(symbols.cache_bits ^ before, symbols.heads).float().mean()[None]
            self._plan = lower(symbols)
            self.state.plan = self._plan if self._plan.kv_index.numel() <= KEPT_TILES else None
        drawn_densities = torch.cat([*_densities(self._plan or drawn, attended), projected, error])
        # A FULL step's tiles are not those of the cached bias.
        self.announce(symbols if self.caches_bias or not self._at_head else self.state.symbols, drawn_densities)
        return attended

    def announce(self, symbols: SparseSymbols | None, densities: torch.Tensor) -> None:
        """Tells the call of new symbols, and of what :meth:`take_densities` is to read of them, on the device."""
        self.state.symbols = symbols
        if symbols is not None:
            self._call.symbols[self._key] = symbols
        self.state.probed = 0.0
        self._densities = self._call.densities[self._key] = densities
        self._call.measure([densities], self.take_densities)

    def take_densities(self, measured: Sequence[float]) -> None:
        """Decides by the densities of new symbols and the probe's error whether the layer degrades, and how much its
        attention may leave out from now on.

        Args:
            measured: density of rows, of row-blocks and of tiles, the share of tiles that this call attended to, the
                share of rows projected for older biases, and the probe's error.
        """
        state, call = self.state, self._call
        state.row_density, state.row_block_density, state.tile_density, state.attended, state.bias_density, error = (
            measured
        )
        state.measured_step = call.tick.step
        threshold = self._preset.reuse.degrade_below
        state.degraded = threshold > 0 and _vision_density(state.tile_density, call.branch.size.layout) < threshold
        probed = error if state.probed else None
        if call.skips:
            call.report.attentions.append(AttentionRecord(self._name, call.tick.step, state.attended, probed))
        if probed is not None and self._skip.probe_error is not None:
            state.tighten(probed, self._skip.probe_error)

    def _tiles(self, inputs: Inputs, pooled: PooledMap | None) -> SparseSymbols:
        """What the skip policy leaves in, every row computing: of an earlier step, or by these queries and keys."""
        state, call = self.state, self._call
        if state.tiles is not None and call.tick.step - state.tiles_step < self._skip.refresh:
            return state.tiles
        growth = flashomni.ramped(1.0, call.progress, self._preset.reuse.ramp) if self._at_head else 1.0
        if self._skip.probe_error is not None:
            growth *= state.growth
            state.tiles_growth = state.growth
        config, (q, k, _, layout, _, kv_len) = self._skip.ramped(growth), inputs
        symbols = policies.draw(q, k, layout, config, kv_len=kv_len, pooled=pooled)
        if self._skip.refresh > 1:
            state.tiles, state.tiles_step = symbols, call.tick.step
        return symbols

    @property
    def _skips(self) -> bool:
        """Whether this call's own attention leaves something out, though the call computes."""
        return self._call.skips and self._skip.policy != "none"

    @property
    def _scores_in_full(self) -> bool:
        """Whether this call draws masks that later ones keep from all of its scores, and so attends to all as well."""
        skip, drawn = self._skip, self.state.tiles_step == self._call.tick.step
        return skip.draws_on_all_scores and skip.refresh > 1 and drawn and not skip.residual

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_len: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> torch.Tensor:
        """Attention ``[B, S, H, D]`` under a plan; with SLA's projection, plus its linear attention.

        None = the plan of this DISPATCH call, under which reused rows of the result hold nothing.
        """
        plan = self.plan if plan is None else plan
        kernels = self._preset.kernels
        options = {
            "pv_threshold": self._skip.pv_threshold,
            "qk_dtype": kernels.qk_dtype,
            "tile_means": self._skip.means,
        }
        o = attention(q, k, v, plan, kv_len=kv_len, backend=kernels.attention, **options)
        projection = None if plan.linear_bits is None else self._projections.of(self._name, q)
        if projection is not None:
            backend = "reference" if kernels.attention == "reference" else "auto"
            learned = {"feature_map": self._skip.feature_map, "projection": projection}
            linear_attention(q, k, v, plan, kv_len=kv_len, out=o, accumulate=True, backend=backend, **learned)
        return o

    def query(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: nn.RMSNorm,
        rope: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        offset: int,
    ) -> torch.Tensor:
        """GEMM-Q of the stream ``x`` ``[B, S, C]`` from token ``offset``, into the joint ``out`` ``[B, T, H, D]``."""
        turned = {"norm_weight": norm.weight, "norm_eps": norm.eps, "rope": rope}
        return gemm_q(x, weight, bias, self.plan, offset=offset, out=out, backend=self._gemm, **turned)

    def project_out(
        self, o: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stream: slice = slice(None)
    ) -> torch.Tensor:
        """GEMM-O of the tokens ``stream`` of ``o`` ``[B, T, H, D]``: ``[B, S, N]``.

        An UPDATE makes the bias stack under the new symbols from earlier attention outputs and remembers this one;
        DISPATCH reads the stack.
        """
        state, call, branch = self.state, self._call, self._call.branch
        options = {"offset": stream.start or 0, "backend": self._gemm}
        if self.dispatches:
            method, coordinates = self._preset.forecast.method, state.bias_coordinates
            weights = forecast_weights(method, coordinates, call.coordinate, branch.order)
            return gemm_o_dispatch(o[:, stream], weight, self.plan, state.bias_stack.read(), weights, **options)
        history = [] if state.attention is None else [value[:, stream] for (value,) in state.attention.values]
        previous = (state.bias_stack.read(), state.bias_mask64) if self._rebases else None
        state.bias_coordinates = (call.coordinate, *self._recorded)
        branch.fetch_after(self._name)
        self._record(o)
        options |= {"history": history, "previous": previous}
        out, stack = gemm_o_update(o[:, stream], weight, bias, self.plan, **options)
        state.bias_stack, state.bias_mask64 = branch.memory.biases.keep(stack), self.plan.mask64
        return out

    @property
    def _recorded(self) -> tuple[float, ...]:
        """Coordinates of the remembered attention outputs, newest first."""
        return () if self.state.attention is None else self.state.attention.coordinates

    @property
    def _rebases(self) -> bool:
        """Whether an UPDATE takes the older entries of its bias stack over from the last stack.

        It must hold one for each remembered output (FULL steps record an output alone), and not be float8: an entry's
        roundings would add up.
        """
        recorded = self._recorded
        held = self.state.bias_coordinates[: len(recorded)]
        return len(recorded) > 0 and held == recorded and not self._call.branch.memory.float8


def _densities(plan: AttentionPlan, attended: AttentionPlan | None) -> list[torch.Tensor]:
    """float32 ``[1]`` each, shares of all: rows of ``plan`` that compute, row-blocks of it with any such row, scores of
    it, and scores of ``attended``; None = 1.
    """
    rows, row_blocks = plan.work_count / plan.kv_count.numel(), (plan.mask64 != 0).float().mean()[None]
    scores = [torch.ones_like(rows) if each is None else _density(each) for each in (plan, attended)]
    return [rows, row_blocks, *scores]


def _vision_density(density: float, layout: TokenLayout) -> float:
    """The share of scores that rows without text compute, by that of all rows: rows with text compute every score."""
    text = len(range(layout.blocks)[layout.text_blocks])
    return (density * layout.blocks - text) / (layout.blocks - text) if text < layout.blocks else 1.0


def _density(plan: AttentionPlan) -> torch.Tensor:
    """float32 ``[1]``, the share of scores that a plan computes: of tiles, and of single keys beside them.

    A ragged tile counts as a whole one, so single keys are counted in whole tiles too.

    Linear attention takes the same time whatever its tiles, little, and is not counted.
    """
    tiles = plan.kv_count.sum()[None] / plan.kv_index.numel()
    if plan.slices is None:
        return tiles
    return tiles + plan.slices.count.sum()[None] / (plan.kv_index.numel() * plan.block)
