"""Count the FLOPs of a transformer's blocks at their leaves: linear layers and convolutions.

Methods skip work by replacing the forward of blocks, attentions or single layers. A counter at the leaves, below all of
these, sees the remaining work of any method. The FLOPs of an attention are added to the largest leaf before it in its
block (the value projection), because both run in the same steps, also where the padding of a smaller text is removed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dit_accel.tools.measure.timing import removed_after

See = Callable[[str, Any, Any], None]  # a leaf's name, its input and its output
LEAVES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class WorkCounter:
    """Counter of the FLOPs of transformers' blocks in module lists; of the whole transformer without such lists."""

    def __init__(self, transformers: Mapping[str, nn.Module]) -> None:
        self.move_to(transformers)
        self._cost: dict[str, float] = {}  # FLOPs per value of a leaf's input, attentions included
        self.plain_flops = 0.0  # of the blocks in a whole plain run

    def move_to(self, transformers: Mapping[str, nn.Module]) -> None:
        """Switch to other transformers of the same structure; the calibration is kept."""
        named = ((name, _blocks(transformer)) for name, transformer in transformers.items())
        self._blocks = {f"{name}.{path}": block for name, blocks in named for path, block in blocks.items()}
        modules = ((name, *item) for name, block in self._blocks.items() for item in block.named_modules())
        self._leaves = {f"{name}.{path}": leaf for name, path, leaf in modules if isinstance(leaf, LEAVES)}

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Within the block, measure the FLOPs of each leaf and of a whole run on one plain run."""
        spent: Counter[str] = Counter()
        taken: Counter[str] = Counter()
        largest: list[tuple[int, str]] = []  # values of the input, and name

        def see(name: str, x: Any, output: Any) -> None:
            leaf = self._leaves[name]
            width = leaf.in_features if isinstance(leaf, nn.Linear) else leaf.weight[0].numel()
            spent[name] += 2 * output.numel() * width
            taken[name] += x.numel()
            if not largest or x.numel() >= largest[0][0]:
                largest[:] = [(x.numel(), name)]

        def attended(flops: int) -> None:
            if largest:  # otherwise outside of blocks: text encoders, refiners or the autoencoder
                spent[largest[0][1]] += flops

        handles = [block.register_forward_hook(lambda *_: largest.clear()) for block in self._blocks.values()]
        with removed_after(handles), self._watched(see), _AttentionMeter(attended):
            yield
        self._cost = {name: spent[name] / taken[name] for name in taken}
        self.plain_flops = float(spent.total())

    @contextmanager
    def counting(self) -> Iterator[Callable[[], float]]:
        """Within the block, count FLOPs; yield a function that returns them as a fraction of the plain run."""
        flops = [0.0]

        def see(name: str, x: Any, output: Any) -> None:
            flops[0] += self._cost[name] * x.numel()

        with self._watched(see):
            yield lambda: flops[0] / self.plain_flops

    @contextmanager
    def _watched(self, see: See) -> Iterator[None]:
        """Within the block, call ``see`` for every leaf that runs, with its input and output.

        The leaf's forward is wrapped, not hooked: torch's hooks run even if a method has replaced the forward.
        """
        leaves = list(self._leaves.items())
        replaced = [vars(leaf).get("forward") for _, leaf in leaves]  # layerwise casting, offload
        for name, leaf in leaves:
            leaf.forward = partial(_seen, name, leaf.forward, see)
        try:
            yield
        finally:
            for (_, leaf), forward in zip(leaves, replaced, strict=True):
                del leaf.forward
                if forward is not None:
                    leaf.forward = forward


class _AttentionMeter(TorchFunctionMode):
    def __init__(self, report: Callable[[int], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function is functional.scaled_dot_product_attention:
            q, k, v = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("query", "key", "value")))
            self._report(2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1]))
        return function(*args, **(kwargs or {}))


def _seen(name: str, plain: Callable[..., Any], see: See, x: Any, *args: Any, **kwargs: Any) -> Any:
    output = plain(x, *args, **kwargs)
    see(name, x, output)
    return output


def _blocks(transformer: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in a transformer's module lists, by name; without such lists the transformer itself."""
    lists = {name: part for name, part in transformer.named_children() if isinstance(part, nn.ModuleList)}
    blocks = {f"{name}.{path}": block for name, part in lists.items() for path, block in part.named_children()}
    return blocks or {"": transformer}
