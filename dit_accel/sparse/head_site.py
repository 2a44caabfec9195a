"""Attention of one site at level head (FlashOmni): reused rows, and GEMM-Q and GEMM-O under the same symbols."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dit_accel.kernels import gemm_o_dispatch, gemm_o_update, gemm_q, lower, unpack_bits
from dit_accel.kernels.symbols import AttentionPlan
from dit_accel.loop.forecast import forecast_weights
from dit_accel.loop.storage import StoredHistory
from dit_accel.loop.tracker import StepMode
from dit_accel.sparse.policies.flashomni import row_bits
from dit_accel.sparse.site_state import KEPT_TILES, SiteState
from dit_accel.sparse.tile_site import Inputs, TileSite, densities_of


class HeadSite(TileSite):
    """One attention in one call at level head; methods stand in the order of the data flow.

    A computed call runs :meth:`attend_computed` and, at an UPDATE, :meth:`project_out`.
    A DISPATCH call runs :meth:`query`, :meth:`attend`, :meth:`project_out`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heads = self._call.site(self._key, SiteState).heads
        self._plan: AttentionPlan | None = None

    @property
    def caches_bias(self) -> bool:
        """Return True if :meth:`project_out` replaces the output projection's module."""
        return self._call.mode is not StepMode.FULL

    @property
    def plan(self) -> AttentionPlan:
        """Lowered symbols of DISPATCH steps."""
        if self._plan is None:
            self._plan = self.heads.plan or lower(self.state.symbols)
        return self._plan

    def attend_computed(self, inputs: Inputs) -> torch.Tensor:
        o = super().attend_computed(inputs)
        if self._call.records and not self.caches_bias:  # otherwise project_out records
            self._record(o if inputs.gate is None else o * inputs.gate)
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
        """Run GEMM-Q on a stream ``x`` ``[B, S, C]`` from token ``offset``, into the joint ``out`` ``[B, T, H, D]``."""
        turned = {"norm_weight": norm.weight, "norm_eps": norm.eps, "rope": rope}
        return gemm_q(x, weight, bias, self.plan, offset=offset, out=out, backend=self._preset.kernels.gemm, **turned)

    def project_out(
        self, o: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stream: slice = slice(None)
    ) -> torch.Tensor:
        """Run GEMM-O on the tokens ``stream`` of ``o`` ``[B, T, H, D]``; return ``[B, S, N]``.

        An UPDATE computes the bias stack under the new symbols, and records this output. DISPATCH reads the stack.
        """
        heads, call, branch = self.heads, self._call, self._call.branch
        options = {"offset": stream.start or 0, "backend": self._preset.kernels.gemm}
        if self.dispatches:
            method, coordinates = self._preset.forecast.method, heads.bias_coordinates
            weights = forecast_weights(method, coordinates, call.coordinate, branch.order)
            return gemm_o_dispatch(o[:, stream], weight, self.plan, heads.bias_stack.read(), weights, **options)
        history = [] if heads.attention is None else [value[:, stream] for (value,) in heads.attention.values]
        previous = (heads.bias_stack.read(), heads.bias_mask64) if self._rebases else None
        heads.bias_coordinates = (call.coordinate, *self._recorded)
        branch.fetch_after(self._name)
        self._record(o)
        options |= {"history": history, "previous": previous}
        out, stack = gemm_o_update(o[:, stream], weight, bias, self.plan, **options)
        heads.bias_stack, heads.bias_mask64 = branch.memory.biases.keep(stack), self.plan.mask64
        return out

    def take_densities(self, measured: Sequence[float]) -> None:
        """Read the densities, and decide whether the layer is forecast whole."""
        super().take_densities(measured)
        threshold, layout = self._preset.reuse.degrade_below, self._call.branch.size.layout
        text = len(range(layout.blocks)[layout.text_blocks])  # rows that compute every score
        computed, vision = self.state.densities.tiles * layout.blocks - text, layout.blocks - text
        self.heads.degraded = threshold > 0 and vision > 0 and computed / vision < threshold

    def _draw(self, inputs: Inputs) -> AttentionPlan | None:
        """Compute tile and row symbols; return the plan of this call's own attention, which computes every row."""
        if not (self._skips or self.caches_bias):
            return None
        if self.caches_bias:
            inputs = inputs._replace(pooled=inputs.scored())
        symbols = self._tiles(inputs)
        drawn = lower(symbols) if self._skips else None
        attended = None if drawn is None else self._attended(drawn)
        if not self.caches_bias:  # a FULL step's tiles do not belong to the cached bias
            self.announce(self.state.symbols, densities_of(drawn, attended))
            return attended
        every_row = symbols.cache_bits
        tau_rows = self._preset.reuse.tau_q * self._ramp
        symbols = replace(symbols, cache_bits=row_bits(inputs.scored().probabilities, inputs.layout, tau_rows))
        before = self.state.symbols.cache_bits if self._rebases else every_row
        projected = unpack_bits(symbols.cache_bits ^ before, symbols.heads).float().mean()[None]
        self._plan = lower(symbols)
        self.heads.plan = self._plan if self._plan.kv_index.numel() <= KEPT_TILES else None
        self.announce(symbols, densities_of(self._plan, attended, projected))
        return attended

    @property
    def _ramp(self) -> float:
        """Growth from 0 at the first step (FlashOmni, appendix A.1.1)."""
        return self._call.progress**self._preset.reuse.ramp

    def _record(self, o: torch.Tensor) -> None:
        memory, size = self._call.branch.memory, self._call.branch.size
        if self.heads.attention is None:
            self.heads.attention = StoredHistory(memory.order, memory.attention(size.layout))
        self.heads.attention.record(self._call.coordinate, (o,))

    @property
    def _recorded(self) -> tuple[float, ...]:
        """Coordinates of the recorded attention outputs, newest first."""
        return () if self.heads.attention is None else self.heads.attention.coordinates

    @property
    def _rebases(self) -> bool:
        """Return True if the last bias stack has an entry for each recorded output, not in float8, whose errors add."""
        recorded = self._recorded
        held = self.heads.bias_coordinates[: len(recorded)]
        return len(recorded) > 0 and held == recorded and not self._call.branch.memory.float8
