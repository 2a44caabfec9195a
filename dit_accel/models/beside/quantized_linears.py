"""Plain linear layers of a transformer's blocks that run in 8 bits while a pipeline is accelerated.

Rounded copies are freed at the end of a run, unless CUDA graphs read them. Weights that have changed, or whose copies
are gone, are rounded in the next call: all of Qwen-Image's take 107 ms. A write through ``.data``, which no counter
shows, is noticed at the next run if it changes one of 512 values of a weight; comparing all would take as long as to
round. After a smaller one call ``reset()`` of the acceleration. Layers neither plain nor torchao's stay.

With ``weights: host`` the original weights wait on the host, and rounded copies stay on the device, modulations too. A
layer that must run unchanged gets its weight back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from dit_accel.errors import UnsupportedError
from dit_accel.kernels import quantize_rows
from dit_accel.kernels.backends import FP8_CAPABILITY
from dit_accel.kernels.blocks.quantized_linear import EVEN, Quantized, empty_rows, multiply_rows, turn
from dit_accel.kernels.checks import FLOAT_DTYPES
from dit_accel.kernels.kept import hold, is_capturing
from dit_accel.loop.conditioning import PLAIN_TENSORS
from dit_accel.loop.report import RunReport
from dit_accel.models.beside.host_weights import HostWeights, uploaded
from dit_accel.models.beside.linear_trial import LinearTrial
from dit_accel.models.free_memory import is_short, read_host_memory, read_memory
from dit_accel.models.graphs.cuda_graph import Turns
from dit_accel.models.hooks import LINEAR_HOOK, OFFLOAD_HOOK, Hook, find_hook, is_compiled
from dit_accel.models.stored_weights import State, are_same, is_readable, plain_weight, state_of
from dit_accel.presets import Linear

NEEDED = "linear.weights: layers under gradients, autocast, compilation or group offload have weights on the device"
CROWDED = "linear layers unchanged: 8-bit copies would leave less than a quarter of the GPU free"
SLOWER = "linear layers unchanged in {}, in which a call takes {:.0f} ms instead of {:.0f} ms in {}"
MEASURED = ("cuda",)  # types of devices whose free memory decides where weights wait
SLOW_INT8 = {(10, 3)}  # B300, whose int8 products are slower than those of bf16
MODULATION = re.compile(r"norm|adaln|modulation|_mod\b", re.IGNORECASE)  # in the name of a layer
LEAST_ROWS = 64  # tokens of a call; with fewer a layer's time is that of reading its weights


class Rounded(NamedTuple):
    """Concatenated weights of layers: values ``[N, C]``, scales ``[N]``, and biases ``[N]`` if they have any."""

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None


def block_linears(transformer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the plain linear layers in a transformer's blocks, by name, whose sizes allow 8-bit products."""
    for name, layer in transformer.named_modules():
        in_block = re.search(r"\.\d+\.", name) and "lora_" not in name
        if in_block and type(layer) is nn.Linear and not any(side % EVEN for side in layer.weight.shape):
            yield name, layer


def roundable(transformer: nn.Module, section: Linear, *, modulations: bool = False) -> dict[str, nn.Linear]:
    """Return the layers, by name, that a preset's section runs in 8 bits, or modulations.

    Modulations have one token per prompt or timestep, so 8 bits save memory alone, where weights wait on the host. Then
    only the weights are int8: float8 costs 4 dB on demo-flux, int8 tokens two.

    Raises:
        UnsupportedError: a pattern of excluded layers matches none.
    """
    found = {name: layer for name, layer in block_linears(transformer) if is_readable(layer.weight)}
    found = {name: layer for name, layer in found.items() if layer.weight.dtype in FLOAT_DTYPES}
    excluded: set[str] = set()
    for pattern in section.exclude:
        matching = {name for name in found if fnmatchcase(name, pattern)}
        if not matching:
            kinds = sorted({re.sub(r"\.\d+\.", ".N.", name): name for name in found}.values())  # a layer of each
            raise UnsupportedError(f"linear.exclude {pattern!r} matches no layer; layers are {', '.join(kinds)}")
        excluded |= matching
    chosen = (name for name in found if name not in excluded and bool(MODULATION.search(name)) is modulations)
    return {name: found[name] for name in chosen if not hasattr(found[name], "_hf_hook")}


class QuantizedLinears:
    """The 8-bit layers of one transformer, and the state that they share.

    ``moved`` is called when the transformer moves to another device, if weights wait on the host.

    Raises:
        UnsupportedError: the transformer is compiled, or its GPU can't multiply such values; a pattern of excluded
            layers matches none, or all are excluded; weights can't wait on the host under group offload.
    """

    def __init__(self, transformer: nn.Module, section: Linear, note: Callable[[str], None], moved: Callable) -> None:
        self._section = section
        if any(is_compiled(module) for module in transformer.modules()):
            why = f"is compiled, and linear.dtype {section.dtype!r} replaces layers inside it"
            fix = "leave linear.dtype out, or reload the pipeline without compiling it"
            raise UnsupportedError(f"{type(transformer).__name__} {why}: {fix}")
        self.layers = roundable(transformer, section)
        if not self.layers:
            why = f"every plain linear layer in the blocks of {type(transformer).__name__} is excluded or offloaded"
            raise UnsupportedError(f"linear.dtype {section.dtype!r} finds no layer to round: {why}")
        self._place = section.weights
        modulations = roundable(transformer, section, modulations=True).values()
        self._modulations, self.all_layers = {*modulations}, [*self.layers.values(), *modulations]
        self._bytes = sum(layer.weight.nbytes for layer in self.all_layers)
        self._transformer = transformer
        if self._place == "host" and not self._can_wait():
            offload = f"group offload of {type(transformer).__name__}, which moves weights to the GPU"
            raise UnsupportedError(f"linear.weights 'host' can't be used with {offload}: leave one of them out")
        device = next(iter(self.layers.values())).weight.device
        self.dtype = dtype_for(section, device)
        require_capability(self.dtype, device)
        self._note = note
        self._moved = moved
        self._run: object = None
        self._examined: object = None  # the run whose first call looked for room on the GPU
        self._version: object = None  # of the weights and adapters when weights were rounded
        self._trial = LinearTrial()
        self._remarked: object = None  # the run whose report says that layers stay unchanged
        self._crowded: object = None  # the run in which copies of weights that can't move find no room
        self._kind: Hashable = None  # of the call in progress
        self._depth = 0  # calls in progress, which may nest
        self.is_resting = self.is_timing = False  # the call in progress leaves all layers unchanged, and is timed so
        movable = [layer for layer in self.all_layers if type(layer.weight) in PLAIN_TENSORS]
        self._are_plain = len(movable) == len(self.all_layers)
        self.on_host = HostWeights(transformer, () if self._place == "device" else movable, self._leave)
        self._ready: dict[nn.Linear, Rounded] = {}  # rounded for the first call, which joins some
        self._weights: dict[tuple[nn.Linear, ...], Rounded] = {}  # of layers that share one product
        self._together: dict[tuple[nn.Linear, ...], torch.device] = {}  # device of these layers at their first call
        self._states: dict[tuple[nn.Linear, ...], list[State]] = {}  # of weights when they were rounded
        self._rows: list[tuple[torch.Tensor, int, Quantized]] = []  # of the latest inputs, which layers share
        self._turns = Turns()  # threads may call the transformer on several streams

    def inherit(self, earlier: QuantizedLinears) -> None:
        """Take over weights that wait on the host, and their rounded copies, so that nothing moves in between."""
        self.on_host.inherit(earlier.on_host)
        for layers, state in earlier._states.items() if self.dtype == earlier.dtype else ():
            if layers in earlier._weights and all(layer in self.on_host for layer in layers):
                self._weights[layers], self._states[layers] = earlier._weights[layers], state
                self._together[layers] = earlier._together[layers]

    def attach(self) -> None:
        """Move the weights to the host, if they wait there by the preset or have so far."""
        if self._place == "host" or self.on_host:
            self.on_host.attach()
        else:
            vars(self._transformer)["_apply"] = self._apply  # `to`, `cuda`, `half` and so on call it

    def detach(self) -> None:
        vars(self._transformer).pop("_apply", None)
        self.free()

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Move or convert the transformer; weights that would fill the GPU on which it arrives go to the host first."""
        device = function(torch.empty(0)).device
        arrives = self._device.type == "cpu" != device.type and self._are_plain and self._can_wait()
        if arrives and self._is_short(device, self._bytes):
            self.on_host.attach()
        return type(self._transformer)._apply(self._transformer, function, recurse)

    @contextmanager
    def call(self, run: RunReport, kind: Hashable, version: object) -> Iterator[None]:
        """Begin a call of a kind, which decides its time, and end it; ``version`` is new if weights or adapters are."""
        with nullcontext() if is_capturing() else self._turns.turn(self._device):
            self._begin(run, kind, version)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                self._rows.clear()

    def _begin(self, run: RunReport, kind: Hashable, version: object) -> None:
        """Choose how the call runs, and round the weights again if a new run has begun or they have changed."""
        self._kind, slower, self.dtype = kind, self._trial.slower.get(kind), dtype_for(self._section, self._device)
        if run is not self._examined:
            self._examined, target = run, self._uploads_to()
            if (target or not self._are_plain) and self._is_full(target or self._device):
                self._crowded = run
                self._note(CROWDED)
        if slower is not None and self._remarked is not run:
            self._remarked = run
            dtype = str(next(iter(self.layers.values())).weight.dtype).removeprefix("torch.")
            self._note(SLOWER.format(dtype, 1000 * slower[1], 1000 * slower[0], self.dtype))
        self.is_timing = self._trial.is_timing(self._kind)
        self.is_resting = slower is not None or self.is_timing or run is self._crowded
        if self.is_resting or (run is self._run and version is self._version):
            return
        self._run, self._version = run, version
        self._prepare_host()
        remark = f"{len({*self.layers.values(), *self.on_host})} linear layers in {self.dtype}"
        self._note(f"{remark}, weights of {len(self.on_host)} on the host" if self.on_host else remark)
        self._round_again()

    def _round_again(self) -> None:
        """Round weights that have changed, or whose copies are gone: now, or a graph would do so in each replay."""
        there = [layers for layers, device in self._together.items() if self._are_on(device, layers)]
        self._weights = {layers: self._weights[layers] for layers in there if layers in self._weights}
        known = {layers: state for layers, state in self._states.items() if layers in self._weights}
        are_all_same = are_same(chain(*known.values()), state_of(chain(*known)))
        for layers in there:
            if layers in known and (are_all_same or are_same(known[layers], state_of(layers))):
                continue
            held, device = self._weights.get(layers), self._together[layers]
            new = _joined([self._round(layer, device) for layer in layers])
            self._states[layers] = state_of(layers, copied=True)
            before, now = ([x if x is None else (x.shape, x.dtype) for x in part] for part in (held or (), new))
            if before != now:
                self._weights[layers] = new
            else:
                with torch.inference_mode():  # under which they may have been made
                    for item, fresh in zip(held, new, strict=True):
                        if item is not None:
                            item.copy_(fresh)

    def _are_on(self, device: torch.device, layers: tuple[nn.Linear, ...]) -> bool:
        """Return True unless a layer was offloaded or replaced since, or some have a bias and others have none."""
        is_mixed = len({layer.bias is None for layer in layers}) > 1
        are_there = (self.on_host.device_of(layer) == device and is_readable(layer.weight) for layer in layers)
        return not is_mixed and all(are_there)

    def timed(self, run: RunReport, compute: Callable[[], Any]) -> Any:
        """Run a computed call, and time it while it is unknown whether 8 bits are faster."""
        if self.on_host or run is self._crowded:
            return compute()
        return self._trial.run(self._kind, self._device, run, compute)

    @property
    def _device(self) -> torch.device:
        return self.on_host.device_of(next(iter(self.layers.values())))

    def _uploads_to(self) -> torch.device | None:
        """Return where group offload takes the weights, or None if it does not."""
        modules = self._transformer.modules() if self._device.type == "cpu" else ()
        hooks = filter(None, (find_hook(item, OFFLOAD_HOOK) for item in modules))
        return next((hook.group.onload_device for hook in hooks), None)

    def _prepare_host(self) -> None:
        """Round weights on the host that no call has used: now, because uploads prevent the capture of a call."""
        if self.on_host or self._is_short(self._device):
            if self._can_wait():
                self.on_host.attach()
            else:
                for layer in [*self.on_host]:
                    self.need_weight(layer)
        used = {layer for layers in self._together for layer in layers}
        self._ready = {
            layer: self._round(layer, held.device) for layer, held in self.on_host.items() if layer not in used
        }

    def _is_short(self, device: torch.device, arriving: int = 0) -> bool:
        """Return True if a GPU would be full, as below, and the host has room for the layers' own weights."""
        return self._is_full(device, arriving) and not is_short(read_host_memory(), self._bytes - arriving)

    def _is_full(self, device: torch.device, arriving: int = 0) -> bool:
        """Return True if rounded weights, and bytes that arrive, would fill a GPU."""
        if self._place != "auto" or self._weights or device.type not in MEASURED:
            return False
        taken = arriving + sum(layer.weight.numel() for layer in self.layers.values())
        return all(is_short(read_memory(device, empties=empties), taken) for empties in (False, True))  # True is slow

    def _can_wait(self) -> bool:
        """Return True if weights may wait on the host: they are not compiled in or moved by group offload."""
        return not any(is_compiled(item) or find_hook(item, OFFLOAD_HOOK) for item in self._transformer.modules())

    def forget(self) -> None:
        """Round all weights again in the next call, in place of their copies, which graphs read."""
        self._run, self._states = None, {}

    def release(self) -> None:
        """Free the rounded weights after a run, unless the original weights wait on the host."""
        self._run = None
        self._turns.end()
        self._weights = {layers: held for layers, held in self._weights.items() if any(map(self.on_host.get, layers))}

    def free(self) -> None:
        self.release()
        for kept in (self._ready, self._weights, self._together, self._states):
            kept.clear()

    def _leave(self) -> None:
        if self._ready or self._together:
            self._moved()
            self.free()

    def need_weight(self, layer: nn.Module) -> None:
        """Move a layer's weight back to the device if it waits on the host, because the layer runs unchanged."""
        if self.on_host.give_back(layer):
            self._ready.pop(layer, None)
            self._note(NEEDED)

    def reads(self, x: torch.Tensor, *, on_host: bool = False) -> bool:
        """Return True if layers that take ``x``, whose weights may wait on the host, may run in 8 bits."""
        return (
            not self.is_resting
            and x.numel() >= (1 if on_host else LEAST_ROWS) * x.shape[-1]
            and x.shape[-1] % EVEN == 0
            and not (torch.is_grad_enabled() and x.requires_grad)
            and not torch.is_autocast_enabled(x.device.type)
        )

    def takes(self, layer: nn.Linear, x: torch.Tensor) -> bool:
        """Return True if the layer's call with this input runs in 8 bits."""
        weight, waits = layer.weight, layer in self.on_host
        return (
            (waits or layer not in self._modulations)
            and self.reads(x, on_host=waits)
            and not (torch.is_grad_enabled() and weight.requires_grad)
            and is_readable(weight)
            and (weight.dtype, self.on_host.device_of(layer)) == (x.dtype, x.device)
        )

    def normalise(self, norm: Callable[..., Any], x: torch.Tensor, *values: Any, **options: Any) -> Any:
        """Run ``norm_modulate`` or ``add_gated_norm_modulate``, which also quantises its result for the next layers."""
        quantized = empty_rows(x, x.shape[-1], self.dtype)
        results = norm(x, *values, quantized=quantized, **options)
        self._keep(results[-1] if isinstance(results, tuple) else results, quantized)
        return results

    def project(
        self, *layers: nn.Linear, x: torch.Tensor, hidden: Sequence[torch.Tensor] = (), tokens: slice | None = None
    ) -> torch.Tensor:
        """Concatenated outputs ``[..., N]`` of layers, whose input is ``x`` ``[..., C]``, then activated features.

        The layers all have a bias, or all have none. ``hidden`` holds one or two tensors for :func:`quantize_rows`.
        ``tokens``: of ``x`` ``[B, S, C]``, which layers of other tokens share.
        """
        if not self._depth:  # outside of the transformer's calls, which notice new weights
            weights = _joined([self._round(layer, x.device) for layer in layers])
        elif (weights := self._weights.get(layers)) is None:
            weights = _joined([self._part(layer) or self._round(layer, x.device) for layer in layers])
            self._together[layers] = x.device
            if not is_capturing():
                self._weights[layers] = weights
                self._states[layers] = state_of(layers, copied=True)
        if layers[0] in self._modulations:  # its token is not rounded
            values, scales, bias = hold(weights)
            product = nn.functional.linear(turn(x.float()).to(x.dtype), values.to(x.dtype)) * scales
            return (product if bias is None else product + bias).to(x.dtype)
        rows = quantize_rows(x, *hidden, dtype=self.dtype) if hidden else self._rows_of(x)
        if tokens is not None:
            rows = tuple(item[:, tokens].contiguous() for item in rows)
        return multiply_rows(*rows, *hold(weights), x.dtype)

    @torch.no_grad()
    def _round(self, layer: nn.Linear, device: torch.device) -> Rounded:
        require_capability(dtype := "int8" if layer in self._modulations else self.dtype, device)
        bias = None if layer.bias is None else layer.bias.clone()
        return Rounded(*quantize_rows(uploaded(plain_weight(layer.weight), device), dtype=dtype), bias)

    def _part(self, layer: nn.Linear) -> Rounded | None:
        """Return a layer's rounded weights, if they exist; they may be rows of weights that are used together."""
        for layers, weights in self._weights.items():
            if layer in layers:
                start = sum(item.out_features for item in layers[: layers.index(layer)])
                rows = slice(start, start + layer.out_features)
                return Rounded(*(item if item is None else item[rows] for item in hold(weights)))
        return self._ready.pop(layer, None)

    def _rows_of(self, x: torch.Tensor) -> Quantized:
        for known, version, rows in self._rows:
            if known is x and version == x._version:
                return rows
        rows = quantize_rows(x, dtype=self.dtype)
        self._keep(x, rows)
        return rows

    def _keep(self, x: torch.Tensor, rows: Quantized) -> None:
        if self._depth and not x.is_inference():  # inference tensors have no version counter
            self._rows = [*self._rows[-1:], (x, x._version, rows)]  # of an image and of its text


class LinearHook(Hook):
    """Runs a plain linear layer in 8 bits."""

    def __init__(self, linears: QuantizedLinears) -> None:
        super().__init__()
        self.linears = linears

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self.fn_ref.original_forward(*args, **kwargs)
        if kwargs or len(args) != 1 or not self.linears.takes(module, args[0]):
            self.linears.need_weight(module)
            return self.fn_ref.original_forward(*args, **kwargs)
        return self.linears.project(module, x=args[0])


def in_8_bits(layer: nn.Module, x: torch.Tensor) -> QuantizedLinears | None:
    """Return the object that runs a layer in 8 bits for inputs like ``x``; None = the layer itself must be called."""
    hook = find_hook(layer, LINEAR_HOOK)
    if hook is None or not hook.linears.takes(layer, x):
        return None
    is_alone = layer._diffusers_hook._hook_order == [LINEAR_HOOK] and not hasattr(layer, "_hf_hook")
    return hook.linears if is_alone and not layer._forward_hooks and not layer._forward_pre_hooks else None


def project(layer: nn.Module, x: torch.Tensor, tokens: slice | None = None) -> torch.Tensor:
    """Output of a layer for some tokens of ``x`` ``[B, S, C]``, whose rows the layers of other tokens share."""
    part = x if tokens is None else x[:, tokens]
    linears = in_8_bits(layer, part)
    return layer(part) if linears is None else linears.project(layer, x=x, tokens=tokens)


def project_together(layers: Sequence[nn.Module], x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Outputs of layers of equal width, from one product if they run in 8 bits."""
    linears, *others = (in_8_bits(layer, x) for layer in layers)
    are_alike = linears is not None and all(item is linears for item in others)
    if not are_alike or len({(layer.out_features, layer.bias is None) for layer in layers}) > 1:
        return [layer(x) for layer in layers]
    return linears.project(*layers, x=x).chunk(len(layers), dim=-1)


def dtype_for(section: Linear, device: torch.device) -> str:
    """Return the 8-bit dtype of layers on a device; auto = int8, whose error is smaller, where it is fast."""
    if section.dtype != "auto":
        return str(section.dtype)
    return "float8" if device.type == "cuda" and torch.cuda.get_device_capability(device) in SLOW_INT8 else "int8"


def require_capability(dtype: str, device: torch.device) -> None:
    """Check that a GPU multiplies such values."""
    if dtype == "float8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            needs = f"a GPU of compute capability {FP8_CAPABILITY} or more"
            raise UnsupportedError(f"linear.dtype 'float8' needs {needs}, got {capability}; use int8")


def _joined(parts: Sequence[Rounded]) -> Rounded:
    if len(parts) == 1:
        return parts[0]
    return Rounded(*(None if items[0] is None else torch.cat(items) for items in zip(*parts, strict=True)))
