"""Base of the hooks on hand-written blocks: when a hook replaces a block's forward, and whole-feature forecasts."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, partial
from itertools import filterfalse
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn

from dit_accel.kernels import attention
from dit_accel.kernels.layout import TokenLayout
from dit_accel.loop.branch import Call
from dit_accel.loop.forecast import forecast
from dit_accel.loop.tracker import StepMode
from dit_accel.models.beside.quantized_linears import project
from dit_accel.models.driver import NO_CALL, FamilyDriver
from dit_accel.models.fused.parts import why_called, why_not_sliceable
from dit_accel.models.hooks import Hook, is_compiled, why_not_replaceable
from dit_accel.models.kernel_limits import why_no_kernels
from dit_accel.models.parallel.context_parallel import RING, config_of, shares_layers
from dit_accel.models.wrappers import GATHERED
from dit_accel.sparse.head_site import HeadSite
from dit_accel.sparse.inputs import Inputs
from dit_accel.sparse.site_state import SiteState
from dit_accel.sparse.tile_site import TileSite

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class BlockHook(Hook, ABC):
    """Replaces a block's forward in calls that record, forecast or skip, and where fused kernels are faster.

    In all other calls the block's own forward runs. A family derives a hook for each block class.
    """

    processors: tuple[type, ...]  # attention processors that the hook can replace
    attentions: tuple[str, ...] = ("attn",)  # names of the block's attention modules
    reads: tuple[str, ...] = ()  # arguments of the block's forward that some versions of diffusers lack
    attends_by_sample = False  # True if attention runs sample by sample where prompts differ in length
    norms: str | tuple[str, ...] = "norm"  # prefixes of the names of norms that fused kernels replace

    def __init__(self, name: str, driver: FamilyDriver) -> None:
        super().__init__()
        self.name = name
        self.driver = driver
        self.preset = driver.preset

    @property
    def call(self) -> Any:
        return self.driver.session.call

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        self._defaults = _defaults(type(module))
        missing = [*filterfalse(self._defaults.__contains__, self.reads)]
        self._why_other = f"in this version of diffusers the block takes no {missing[0]}" if missing else None
        return module

    # A family implements these. `inputs` holds arguments by the names of the block's own forward.

    @abstractmethod
    def compute(self, block: nn.Module, inputs: SimpleNamespace) -> Any:
        """Compute the block's output, with attention by :meth:`site` if :attr:`attends`, and remember features."""

    @abstractmethod
    def forecast(self, block: nn.Module, inputs: SimpleNamespace) -> Any:
        """Compute the block's output from forecast features; modulation and gates are fresh."""

    def sliced(self, block: nn.Module) -> list[nn.Module]:
        """Projections whose weights GEMM-Q and GEMM-O read at level ``head`` without calling the module."""
        return []

    def why_dense(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        """Why the block's attention must be left to its own processor now, or None."""
        for name in self.attentions:
            processor = getattr(block, name).processor
            if type(processor) not in self.processors:
                return f"attention processor {type(processor).__name__}"
        return self._why_not_shared() or self.why_unsupported(block, inputs)

    def why_unsupported(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        """Why the family's attention can't run here now, or None."""
        return None

    def why_own(self, block: nn.Module, inputs: SimpleNamespace) -> str | None:
        """Why the block's own forward must run now, or None."""
        return None

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute, forecast or leave alone, as the call in progress requires."""
        call, level = self.driver.session.call, self.preset.forecast.level
        if torch.compiler.is_compiling() or call is None or not self.stands_in(call) or is_compiled(module):
            return self.fn_ref.original_forward(*args, **kwargs)
        inputs = self._bind(args, kwargs)
        reason = self._why_other or why_not_replaceable(module) or why_called(module, self.norms)
        reason = reason or why_no_kernels(inputs.hidden_states) or self.why_own(module, inputs)
        forecasts_whole = reason is None and level == "layer"  # with any attention
        if reason is None and self.attends:
            reason = self._why_dense(module, inputs)
        if reason is not None:
            call.blocks.dense.add(self.name)
            if level == "head" or not call.skips:  # else the hook on its attention runs it, or reports why not
                call.report.fall_back(self.name, reason)
            if not forecasts_whole:
                return self.fn_ref.original_forward(*args, **kwargs)
        whole_layer = level == "layer" or call.site(self.name, SiteState).heads.degraded
        if call.mode is StepMode.DISPATCH and whole_layer:
            return self.forecast(module, inputs)
        return self.compute(module, inputs)

    def stands_in(self, call: Call) -> bool:
        """Return True if the call in progress needs more than the block's own forward."""
        facts = call.blocks.facts or NO_CALL
        records = call.records and self.preset.forecast.level != "output"  # at "output" no block records
        is_ragged = self.attends_by_sample and facts.text is not None and facts.text.ragged
        return records or call.skips or call.mode is StepMode.DISPATCH or facts.fuses or is_ragged

    @property
    def attends(self) -> bool:
        """Return True if :meth:`site` runs the block's attention in this call instead of its processor."""
        call = self.call
        return (self.preset.forecast.level == "head" or call.skips) and self.name not in call.blocks.dense

    def runs_attention(self, block: nn.Module, inputs: SimpleNamespace) -> bool:
        """Return True if attention runs here: at the site, or as dense attention after fused kernels."""
        if self.attends or not self.driver.facts.fuses:
            return self.attends
        return why_called(block, self.attentions) is None and self.why_dense(block, inputs) is None

    def normalise(self, norm: Callable[..., Any], x: torch.Tensor, *values: Any, **options: Any) -> Any:
        """Run ``norm_modulate`` or ``add_gated_norm_modulate``, and quantise its result if layers run in 8 bits."""
        linears = self.driver.linears
        if linears is None or not linears.reads(x):
            return norm(x, *values, **options)
        return linears.normalise(norm, x, *values, **options)

    def attend_whole(
        self, attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, arranged: bool
    ) -> torch.Tensor:
        """Run ``attend`` over all tokens ``[B, S, H, D]``; if devices share them, for this device's share of heads.

        The inputs and the output have the tokens on this device. ``arranged``: ``attend`` depends on their order.
        """
        if (exchange := self.driver.facts.exchange) is None:
            return attend(q, k, v)
        return exchange.to_tokens(attend(*exchange.to_heads(q, k, v, arranged=arranged)), arranged=arranged)

    def attend_dense(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: Any, kv_len: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention ``[B, S, H, D]`` to all tokens, by our kernel if it is the fastest.

        Only our kernel takes ``kv_len``. ``backend`` is the one set in diffusers; None = its default.
        """
        if backend is None and self.driver.attends_by_kernel(q):
            plan = self.driver.every_row(*q.shape[:3], q.device)
            return attention(q, k, v, plan, kv_len=kv_len, backend=self.preset.kernels.attention)
        return dispatch_attention_fn(q, k, v, backend=backend).to(q.dtype)

    def attend_computed(
        self, site: TileSite | HeadSite, attn: nn.Module, *qkv: torch.Tensor, **others: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention ``[B, S, H, D]`` of a computed step over the block's own tokens; ``others`` as in ``Inputs``."""
        joint, block = self.driver.facts.joint, self.preset.blocks.size

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            layout = TokenLayout(0, qkv[0].shape[1], block) if joint is None else joint.layout(block)
            dense = partial(self.attend_dense, *qkv, attn.processor._attention_backend)
            return site.attend_computed(Inputs(*qkv, layout, dense, **others))

        return self.attend_whole(attend, *qkv, arranged=self.attends)

    @staticmethod
    def project_out(site: TileSite | HeadSite, out: nn.Module, o: torch.Tensor) -> torch.Tensor:
        """Project attention ``[B, S, H, D]`` to ``[B, S, C]``; the site may cache a bias."""
        return site.project_out(o, out.weight, out.bias) if site.caches_bias else project(out, o.flatten(2))

    def remember(self, feature: str, value: tuple[torch.Tensor, ...], *, by_row: bool = False) -> None:
        """Record a whole feature if a later DISPATCH step may forecast it; ``by_row`` also allows some rows."""
        call, preset = self.call, self.preset
        whole = preset.forecast.level == "layer" or preset.reuse.degrade_below > 0
        if call.records and (whole or (by_row and preset.forecast.level == "head")):
            call.site(self.name, SiteState).history(feature, call.branch.memory).record(call.coordinate, value)

    def recall(self, feature: str) -> tuple[torch.Tensor, ...]:
        """Return the forecast of a whole feature."""
        call = self.call
        history, method = call.site(self.name, SiteState).features[feature], self.preset.forecast.method
        return forecast(method, history, call.coordinate, call.branch.order)

    def site(self) -> TileSite | HeadSite:
        return self.driver.site(self.name, self.name)

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> SimpleNamespace:
        """Return arguments by name with defaults; the block ignores what it takes as ``*args`` and ``**kwargs``."""
        named = dict(zip(self._defaults, args, strict=False)) | kwargs
        return SimpleNamespace(**{name: named.get(name, default) for name, default in self._defaults.items()})

    def _why_not_shared(self) -> str | None:
        """Return why diffusers must run the attention of a call that several devices share, or None."""
        if shares_layers(self.driver.transformer):
            return "several devices share each layer (tensor parallelism)"
        if config_of(self.driver.transformer) is None:
            return None
        if not self.driver.family.sharing:
            return "several devices share tokens, which is not tested with its blocks"
        if (exchange := self.driver.facts.exchange) is None:
            return RING
        if self.preset.forecast.level == "head":
            return "level head needs all heads of a token on one GPU, and context parallelism distributes them"
        heads, _ = self.driver.family.heads(self.driver.transformer)
        return None if exchange.divides(heads) else f"{heads} heads can't be shared out evenly"

    def _why_dense(self, module: nn.Module, inputs: SimpleNamespace) -> str | None:
        """Return why the site can't run sparse attention now, or None."""
        call, device = self.call, inputs.hidden_states.device
        if torch.is_autocast_enabled(device.type):  # it casts inputs of modules, and sites call no modules
            return "autocast"
        reason = why_called(module, self.attentions) or self.why_dense(module, inputs)
        if reason is not None or self.preset.forecast.level != "head":
            return reason
        reasons = (why_not_sliceable(projection, device) for projection in self.sliced(module))
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None and call.mode is StepMode.DISPATCH and call.site(self.name, SiteState).tiles.symbols is None:
            reason = "no symbols: the block could not skip tiles at the latest UPDATE"
        return reason


@cache
def _defaults(kind: type[nn.Module]) -> dict[str, Any]:
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    return {item.name: item.default for item in parameters if item.kind not in GATHERED}
