"""One attention in a computed call: compute symbols from q and k, attend under them, and measure the error."""

from collections.abc import Sequence

import torch

from dit_accel.kernels import attention, lower
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.loop.branch import Call
from dit_accel.loop.report import AttentionRecord
from dit_accel.loop.tracker import StepMode
from dit_accel.presets import Preset
from dit_accel.sparse.inputs import Inputs
from dit_accel.sparse.policies import policy_of
from dit_accel.sparse.probe import attention_error, probed_rows
from dit_accel.sparse.projections import Projections
from dit_accel.sparse.site_state import Densities, SiteState, state_name


class TileSite:
    """One attention in one call, at every forecast level; :class:`~.head_site.HeadSite` extends it at level head.

    ``name`` is the site's in the report, ``block`` the block whose settings apply (None = it has the same name), and
    ``sample`` the place in the batch of the one sample that the attention sees; 0 also if it sees all samples.
    """

    caches_bias = False

    def __init__(
        self, name: str, call: Call, preset: Preset, projections: Projections, block: str | None = None, sample: int = 0
    ) -> None:
        self._key = state_name(name, sample)
        self.state = call.site(self._key, SiteState).tiles
        self._name = name
        self._call = call
        self._preset = preset
        self._projections = projections
        self._skip = preset.skip.at(block or name)
        self._policy = policy_of(self._skip)
        self._target: float | None = getattr(self._skip, "probe_error", None)

    @property
    def dispatches(self) -> bool:
        return self._call.mode is StepMode.DISPATCH

    def attend_computed(self, inputs: Inputs) -> torch.Tensor:
        """Return attention ``[B, S, H, D]`` of a call that computes every row; compute and record its symbols."""
        if not self._skips:
            return self._attend_drawn(inputs)
        return self._policy.attend(self._attend_drawn, inputs, self._projections.of(self._name, inputs.q))

    def _attend_drawn(self, inputs: Inputs) -> torch.Tensor:
        plan, dense = self._draw(inputs), inputs.dense
        o = dense() if plan is None else self.attend(plan, *inputs[:3], kv_len=inputs.kv_len)
        is_exact = plan is None
        if self._skips and self._skip.residual:
            is_exact = self.state.drawn_step == self._call.tick.step
            if is_exact:  # the residual is what new tiles leave out; dense attention adds 1 to the density
                sparse, o = o, dense()
                self.state.residual = self._call.branch.memory.features.keep(o - sparse)
                self._densities.attended.add_(1)
            else:
                o.add_(self.state.residual.read())
        if self._skip.probe_blocks and not is_exact:  # dense attention on a few rows; the host reads the error later
            rows = probed_rows(inputs.layout, self._skip.probe_blocks, self.state.probe_turn)
            self.state.probe_turn += 1
            self._densities.error.copy_(attention_error(o, *inputs[:3], rows, kv_len=inputs.kv_len))
            self.state.probed = sum(row.stop - row.start for row in rows) / inputs.layout.tokens
        return o

    def attend(self, plan: AttentionPlan, *qkv: torch.Tensor, kv_len: torch.Tensor | None = None) -> torch.Tensor:
        """Return attention ``[B, S, H, D]`` under a plan, with the policy's extra pass; reused rows are undefined."""
        kernels, config = self._preset.kernels, self._skip
        options = {"qk_dtype": kernels.qk_dtype, "backend": kernels.attention, **self._policy.options(config)}
        o = attention(*qkv, plan, kv_len=kv_len, **options)
        backend = "reference" if kernels.attention == "reference" else "auto"
        projection = self._projections.of(self._name, o)
        return self._policy.add(o, qkv, plan, config, projection, kv_len=kv_len, backend=backend)

    def announce(self, symbols: SparseSymbols | None, densities: torch.Tensor) -> None:
        """Store new symbols in the call, and queue their :class:`Densities`, float32 ``[6]`` on the device."""
        self.state.symbols = symbols
        if symbols is not None:
            self._call.blocks.symbols[self._key] = symbols
        self.state.probed = 0.0
        self._call.blocks.densities[self._key] = densities
        self._densities = Densities(*densities.split(1))
        self._call.measure([densities], self.take_densities)

    def take_densities(self, measured: Sequence[float]) -> None:
        """Decide from the measured densities how much this attention may leave out from now on."""
        state, call = self.state, self._call
        state.densities, state.measured_step = Densities(*measured), call.tick.step
        probed = state.densities.error if state.probed else None
        if call.skips:
            call.report.attentions.append(AttentionRecord(self._name, call.tick.step, state.densities.attended, probed))
        if probed is not None and self._target is not None:
            state.tighten(probed, self._target)

    def _draw(self, inputs: Inputs) -> AttentionPlan | None:
        """Compute new symbols; return the plan of this call's own attention, None = dense."""
        if not self._skips:
            return None
        symbols = self._tiles(inputs)
        drawn = lower(symbols)
        attended = self._attended(drawn)
        self.announce(symbols, densities_of(drawn, attended))
        return attended

    def _tiles(self, inputs: Inputs) -> SparseSymbols:
        """Return the policy's symbols, under which every row computes: kept from an earlier step, or new ones."""
        state, step = self.state, self._call.tick.step
        if state.kept is not None and step - state.drawn_step < self._skip.refresh:
            return state.kept
        growth = self._ramp
        if self._target is not None:
            growth *= state.growth
            state.drawn_growth = state.growth
        symbols = self._policy.draw(inputs, self._policy.ramped(self._skip, growth))
        if self._skip.refresh > 1:
            state.kept, state.drawn_step = symbols, step
        return symbols

    def _attended(self, drawn: AttentionPlan) -> AttentionPlan | None:
        """Return the plan of this call's own attention; None = dense.

        Dense attention costs nothing more if new masks for later calls are computed from all scores.
        """
        skip, is_new = self._skip, self.state.drawn_step == self._call.tick.step
        in_full = self._policy.keeps_scores(skip) and skip.refresh > 1 and is_new and not skip.residual
        return None if in_full else drawn

    @property
    def _ramp(self) -> float:
        """Growth of the left-out share over the run."""
        return 1.0

    @property
    def _skips(self) -> bool:
        """Return True if this computed call's own attention leaves something out."""
        return self._call.skips and self._policy.leaves_out


def densities_of(
    plan: AttentionPlan, attended: AttentionPlan | None, projected: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the :class:`Densities` of a plan as float32 ``[6]``, with error 0.

    ``attended`` is this call's own plan (None = dense), ``projected`` the share of rows projected for older biases.
    """
    rows, row_blocks = plan.work_count / plan.kv_count.numel(), (plan.mask64 != 0).float().mean()[None]
    scores = [torch.ones_like(rows) if item is None else _density(item) for item in (plan, attended)]
    nothing = torch.zeros_like(rows)
    return torch.cat([rows, row_blocks, *scores, nothing if projected is None else projected, nothing])


def _density(plan: AttentionPlan) -> torch.Tensor:
    """Return the share of whole tiles' scores that a plan computes, without linear attention, as float32 ``[1]``."""
    tiles = plan.kv_count.sum()[None] / plan.kv_index.numel()
    if plan.slices is None:
        return tiles
    return tiles + plan.slices.count.sum()[None] / (plan.kv_index.numel() * plan.block)
