"""FLOPs that a transformer's blocks do, counted where they are done: at their linear layers and convolutions.

Methods skip work by replacing the forward of blocks, of attentions or of single layers. A counter that lies beneath all
of these, at the leaves, sees what is left, whoever did the skipping. An attention is paid for by the leaf that runs
last before it (the projection of values): it runs exactly when the attention does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dit_accel.tools.timing import removed_after

See = Callable[[str, Any, Any], None]  # a leaf's name, its input and its output
LEAVES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class WorkCounter:
    """Counts the FLOPs of some transformers' blocks, those in module lists; without such lists, of everything.

    Args:
        transformers: by name.

    Attributes:
        plain_flops: of the blocks in a whole plain run, once that was calibrated on.
    """

    def __init__(self, transformers: Mapping[str, nn.Module]) -> None:
        self.move_to(transformers)
        self._cost: dict[str, float] = {}  # FLOPs per value of a leaf's input, attentions included
        self.plain_flops = 0.0

    def move_to(self, transformers: Mapping[str, nn.Module]) -> None:
        """Counts those of other transformers that are built alike from now on; what leaves cost stays known."""
        self._blocks = {
            f"{name}.{path}": block
            for name, transformer in transformers.items()
            for path, block in _blocks(transformer).items()
        }
        self._leaves = {
            f"{name}.{path}": leaf
            for name, block in self._blocks.items()
            for path, leaf in block.named_modules()
            if isinstance(leaf, LEAVES)
        }

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Within, one plain run tells what each leaf costs, and what a whole run does."""
        spent: Counter[str] = Counter()
        taken: Counter[str] = Counter()
        latest: list[str] = []

        def see(name: str, x: Any, output: Any) -> None:
            leaf = self._leaves[name]
            width = leaf.in_features if isinstance(leaf, nn.Linear) else leaf.weight[0].numel()
            spent[name] += 2 * output.numel() * width
            taken[name] += x.numel()
            latest[:] = [name]

        def attended(flops: int) -> None:
            if latest:  # else it is outside of blocks: of text encoders, refiners or the autoencoder
                spent[latest[0]] += flops

        def leave_block(*_: Any) -> None:
            latest.clear()

        handles = [block.register_forward_hook(leave_block) for block in self._blocks.values()]
        with removed_after(handles), self._watched(see), _AttentionMeter(attended):
            yield
        self._cost = {name: spent[name] / taken[name] for name in taken}
        self.plain_flops = float(spent.total())

    @contextmanager
    def counting(self) -> Iterator[Callable[[], float]]:
        """Within, leaves are counted; yields a function that gives their FLOPs over those of the plain run."""
        flops = [0.0]

        def see(name: str, x: Any, output: Any) -> None:
            flops[0] += self._cost[name] * x.numel()

        with self._watched(see):
            yield lambda: flops[0] / self.plain_flops

    @contextmanager
    def _watched(self, see: See) -> Iterator[None]:
        """Within, every leaf that runs is shown with its input and output.

        The leaf's own forward is wrapped, not hooked: torch's hooks run even where a method has replaced the forward.
        """
        leaves = list(self._leaves.items())
        own = [vars(leaf).get("forward") for _, leaf in leaves]  # layerwise casting, offload
        for name, leaf in leaves:
            leaf.forward = _seen(name, leaf.forward, see)
        try:
            yield
        finally:
            for (_, leaf), forward in zip(leaves, own, strict=True):
                del leaf.forward
                if forward is not None:
                    leaf.forward = forward


class _AttentionMeter(TorchFunctionMode):
    """Tells the FLOPs of every attention that torch computes while it is on."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function is functional.scaled_dot_product_attention:
            q, k, v = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("query", "key", "value")))
            self._tell(2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1]))
        return function(*args, **(kwargs or {}))


def _seen(name: str, plain: Callable[..., Any], see: See) -> Callable[..., Any]:
    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(x, *args, **kwargs)
        see(name, x, output)
        return output

    return forward


def _blocks(transformer: nn.Module) -> dict[str, nn.Module]:
    """What stands in a transformer's module lists, by name; without such lists the transformer itself."""
    lists = {name: part for name, part in transformer.named_children() if isinstance(part, nn.ModuleList)}
    blocks = {f"{name}.{path}": block for name, part in lists.items() for path, block in part.named_children()}
    return blocks or {"": transformer}
