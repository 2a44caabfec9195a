"""One attention site at scope ``head``: from q and k to symbols, then GEMM-Q, attention and GEMM-O under them."""

from __future__ import annotations

import torch
from torch import nn

from dit_accel.forecast import History, forecast_weights
from dit_accel.kernels import attention, gemm_o_dispatch, gemm_o_update, gemm_q, lower, pooled_map
from dit_accel.layout import TokenLayout
from dit_accel.policies import flashomni, sparge
from dit_accel.presets import Preset
from dit_accel.state import Call, SiteState
from dit_accel.symbols import SparseSymbols


class SparseSite:
    """The site's state in one call, with the ops that read and write it in the order of the data flow.

    UPDATE: :meth:`refresh` symbols from q and k, :meth:`record` O, :meth:`project_out`.
    DISPATCH: :meth:`query`, :meth:`attend`, :meth:`project_out`.
    """

    def __init__(self, name: str, call: Call, preset: Preset) -> None:
        self.state: SiteState = call.site(name)
        self._name = name
        self._call = call
        self._preset = preset
        self._gemm = preset.kernels.gemm

    def refresh(self, q: torch.Tensor, k: torch.Tensor, layout: TokenLayout) -> None:
        """New symbols for the coming DISPATCH steps. q, k: ``[B, S, H, D]`` as attention gets them."""
        reuse, skip = self._preset.reuse, self._preset.skip
        probabilities = pooled_map(q, k, layout.block).probabilities
        progress = self._call.progress
        tau_rows = flashomni.ramped(reuse.tau_q, progress, reuse.ramp)
        skip_bits = None
        if skip.policy == "sparge":
            tau_tiles = flashomni.ramped(skip.tau_kv, progress, reuse.ramp)
            skip_bits = sparge.tile_bits(probabilities, layout, tau_tiles)
        self.state.symbols = SparseSymbols(
            cache_bits=flashomni.row_bits(probabilities, layout, tau_rows),
            skip_bits=skip_bits,
            heads=q.shape[2],
            tokens=layout.tokens,
            block=layout.block,
        )
        plan = self.state.plan = lower(self.state.symbols)
        rows, tiles = plan.kv_count.numel(), plan.kv_index.numel()
        self._call.densities[self._name] = torch.cat([plan.work_count / rows, plan.kv_count.sum()[None] / tiles])

    def record(self, o: torch.Tensor) -> None:
        """Remembers the dense attention output ``[B, S, H, D]`` for the cached bias."""
        if self.state.attention is None:
            self.state.attention = History(self._preset.forecast.order)
        self.state.attention.record(self._call.coordinate, (o,))

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
        return gemm_q(
            x,
            weight,
            bias,
            self.state.plan,
            offset=offset,
            norm_weight=norm.weight,
            norm_eps=norm.eps,
            rope=rope,
            out=out,
            backend=self._gemm,
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Sparse attention ``[B, S, H, D]``; reused rows of the result hold nothing."""
        return attention(q, k, v, self.state.plan, backend=self._preset.kernels.attention)

    def project_out(
        self, o: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, dispatch: bool, offset: int = 0
    ) -> torch.Tensor:
        """GEMM-O of the stream that starts at token ``offset`` of ``o`` ``[B, T, H, D]`` -> ``[B, S, N]``."""
        state, stream = self.state, o[:, offset:]
        if dispatch:
            weights = forecast_weights(
                self._preset.forecast.method, state.bias_coordinates, self._call.coordinate, self._call.branch.order
            )
            return gemm_o_dispatch(
                stream, weight, state.plan, state.bias_stack, weights, offset=offset, backend=self._gemm
            )
        remembered = [value[:, offset:] for (value,) in state.attention.values[1:]]
        state.bias_coordinates = state.attention.coordinates
        out, state.bias_stack = gemm_o_update(
            stream, weight, bias, state.plan, history=remembered, offset=offset, backend=self._gemm
        )
        return out


def why_not_sliceable(module: nn.Module, device: torch.device) -> str | None:
    """Why a projection's weight must not be used without calling the module, or None.

    LoRA, offload and quantisation wrap, hook or replace the linear layer; then only its own call is right.
    """
    if type(module) is not nn.Linear:
        return f"a projection is a {type(module).__name__}, not a plain linear layer"
    if type(module.weight) not in (nn.Parameter, torch.Tensor) or not module.weight.is_floating_point():
        return "a projection's weight is quantised"
    hooked = (
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) or hasattr(module, "_hf_hook")
    )
    if hooked:
        return "a projection carries hooks (offload, layerwise casting, …)"
    if module.weight.device != device:
        return "a projection's weight is on another device"
    return None
