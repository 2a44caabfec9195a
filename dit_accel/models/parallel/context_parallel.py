"""Context parallelism of diffusers: every rank runs a share of the tokens, and attention needs all tokens.

Ulysses: before attention the ranks exchange tokens for heads, and after it heads for tokens. In between a rank has all
tokens of its share of the heads; there symbols are computed and tiles skipped. The exchange also sorts the tokens: each
rank's share has some text and some image tokens, so they arrive mixed, and symbols need text in one piece.
"""

from __future__ import annotations  # a torch without distributed has no ProcessGroup

from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dit_accel.errors import UnsupportedError
from dit_accel.models.families.family import Family, Tokens

RING = "ring attention passes keys in parts, so no tiles can be skipped: use ulysses_degree instead"


def config_of(transformer: nn.Module) -> Any:
    """Return diffusers' ``ContextParallelConfig`` of a transformer; None = it runs on one device."""
    return getattr(getattr(transformer, "_parallel_config", None), "context_parallel_config", None)


def shares_layers(transformer: nn.Module) -> bool:
    """Return True if each of several devices has a part of every layer (diffusers' tensor parallelism)."""
    return getattr(getattr(transformer, "_parallel_config", None), "tensor_parallel_config", None) is not None


def split_plan(transformer: nn.Module, family: Family | None) -> Any:
    """Return what ``enable_parallelism`` splits and gathers, from the transformer's class or its family's facts.

    Blocks may mask padding by position. With split tokens only the hooks of an accelerated transformer correct this.

    Raises:
        UnsupportedError: a given image replaces the first frame, and blocks find its tokens by position.
    """
    of_class = getattr(transformer, "_cp_plan", None)
    if of_class is not None or family is None or family.split is None:
        return of_class
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    if family.first_frame_apart(transformer):
        why = f"this {family.title} finds tokens of the given image by their position: run it on one device"
        raise UnsupportedError(f"context parallelism splits the video's tokens, and {why}")
    facts, tables = family.split, family.order.tables if family.order is not None else {}
    plan: dict[str, Any] = {
        module: {part: ContextParallelInput(axis, split_output=True) for part, axis in parts.items()}
        for module, parts in tables.items()
    }
    plan[facts.entrance] = {name: ContextParallelInput(1, expected_dims=3) for name in facts.streams}
    plan[facts.exit] = ContextParallelOutput(1, expected_dims=3)
    return plan


def parallel_degree(transformer: nn.Module) -> int:
    """Number of devices that share the tokens of a call."""
    config = config_of(transformer)
    return 1 if config is None else config.ring_degree * config.ulysses_degree


def exchanges_sizes(transformer: nn.Module) -> bool:
    """Return True if devices that share the present call ask for each other's numbers of tokens (Ulysses Anything)."""
    config = config_of(transformer)
    return config is not None and config.ulysses_anything


def agreed(transformer: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
    """Return the maximum over ranks of measured numbers, float32 ``[N]``, so that all ranks make the same decisions."""
    if (config := config_of(transformer)) is None:
        return numbers
    numbers = numbers.nan_to_num(nan=torch.inf, posinf=torch.inf)  # so that no forecast is accepted
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=config._flattened_mesh.get_group())
    return numbers


class Exchange:
    """Exchange of tokens for heads between the ranks of a group that share one sequence.

    ``order`` of its vision tokens, int64 ``[S]``, is that of arranged tokens; None = unchanged.
    """

    def __init__(
        self, group: dist.ProcessGroup, tokens: Tokens, order: torch.Tensor | None, device: torch.device
    ) -> None:
        self.tokens = tokens
        self._group = group
        self._ranks = dist.get_world_size(group)
        text, vision = (_shares(count, self._ranks) for count in (tokens.text, tokens.vision))
        if tokens.split_as_one:
            ends = [0, *accumulate(_shares(tokens.text + tokens.vision, self._ranks))]
            text = [min(end, tokens.text) - min(start, tokens.text) for start, end in pairwise(ends)]
            vision = [end - start - part for (start, end), part in zip(pairwise(ends), text, strict=True)]
        self._counts = [sum(share) for share in zip(text, vision, strict=True)]  # of each rank
        self._count = self._counts[dist.get_rank(group)]
        arranged = _arrangement(tokens, text, vision, order)
        is_arranged = torch.equal(arranged, torch.arange(len(arranged)))
        self._arranged = None if is_arranged else arranged.to(device)
        self._received = None if is_arranged else arranged.argsort().to(device)

    def divides(self, heads: int) -> bool:
        return heads % self._ranks == 0

    def to_heads(self, *tensors: torch.Tensor, arranged: bool = True) -> tuple[torch.Tensor, ...]:
        """Exchange the rank's own tokens ``[B, S / n, H, D]`` for all tokens of its heads ``[B, S, H / n, D]``.

        If ``arranged``, text is in one piece, and vision tokens are in their order; otherwise tokens are as they
        arrive, for attention that does not depend on the order.
        """
        words, dtype = in_words(*tensors), tensors[0].dtype
        batch, count, heads, size = words[0].shape
        send = words[0].new_empty(self._ranks, count, len(tensors), batch, heads // self._ranks, size)
        for place, tensor in enumerate(words):
            send[:, :, place].copy_(tensor.unflatten(2, (self._ranks, -1)).permute(2, 1, 0, 3, 4))
        received = self._exchanged(send.flatten(0, 1), self._counts, [count] * self._ranks)
        if arranged and self._arranged is not None:
            received = received.index_select(0, self._arranged)
        return tuple(part.transpose(0, 1) for part in received.view(dtype).unbind(1))

    def to_tokens(self, x: torch.Tensor, arranged: bool = True) -> torch.Tensor:
        """Exchange all tokens of the rank's heads ``[B, S, H / n, D]`` back for its own tokens ``[B, S / n, H, D]``."""
        (words,) = in_words(x)
        send = (self.as_received(words) if arranged else words).transpose(0, 1).contiguous()
        received = self._exchanged(send, [self._count] * self._ranks, self._counts)
        return received.unflatten(0, (self._ranks, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3).view(x.dtype)

    def _exchanged(self, send: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        """Exchange tokens between ranks; ``received`` and ``sent`` are the numbers of tokens from and to each."""
        # A functional collective, at which dit_accel.models.graphs.collectives can cut captures.
        from torch.distributed import _functional_collectives as functional  # fails in torch without distributed

        return functional.wait_tensor(functional.all_to_all_single(send, received, sent, self._group))

    def arrange(self, x: torch.Tensor) -> torch.Tensor:
        """Sort tokens from diffusers' own exchange: text in one piece, and vision tokens in their order."""
        return x if self._arranged is None else x.index_select(1, self._arranged)

    def as_received(self, x: torch.Tensor, axis: int = 1) -> torch.Tensor:
        """Undo :meth:`arrange`."""
        return x if self._received is None else x.index_select(axis, self._received)


class Exchanges:
    """Creates the exchange of a transformer's calls, and keeps the latest one."""

    def __init__(self) -> None:
        self._latest: tuple[Any, torch.Tensor | None, Exchange | None] = None, None, None

    def of(
        self, transformer: nn.Module, tokens: Tokens, order: torch.Tensor | None, device: torch.device
    ) -> Exchange | None:
        """Return the exchange for a call over these tokens; None = the transformer runs on one device, or in a ring."""
        config = config_of(transformer)
        if config is None or config.ring_degree > 1:
            return None
        key, (latest, of_order, _) = (config, tokens, device), self._latest
        if latest != key or of_order is not order:
            self._latest = key, order, Exchange(config._ulysses_mesh.get_group(), tokens, order, device)
        return self._latest[2]


def gathered(hook: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a call before ``hook`` split them; every rank must call this."""
    from diffusers.hooks.context_parallel import EquipartitionSharder, PartitionAnythingSharder

    config, facts = hook.parallel_config, hook.module_forward_metadata
    anything = config.ulysses_anything or config.ring_anything
    unshard = PartitionAnythingSharder.unshard_anything if anything else EquipartitionSharder.unshard

    def whole(x: Any, plan: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [whole(item, part) for item, part in zip(x, plan, strict=True)]
        is_split = isinstance(x, torch.Tensor) and not plan.split_output and plan.expected_dims in (None, x.dim())
        return unshard(x, plan.split_dim, config._flattened_mesh) if is_split else x

    args, kwargs = list(args), dict(kwargs)
    for name, plan in hook.metadata.items():
        if isinstance(name, str):
            value, is_keyword, index = facts._get_parameter_from_args_kwargs(name, args, kwargs)
            if is_keyword:
                kwargs[name] = whole(value, plan)
            else:
                args[index] = whole(value, plan)
    return tuple(args), kwargs


def in_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """View tensors as 8-byte elements if all allow it: reordering 2-byte elements takes three times as long."""

    def has_words(x: torch.Tensor) -> bool:
        steps = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
        return x.stride(-1) == 1 and all(step * x.element_size() % 8 == 0 for step in steps)

    return tuple(x.view(torch.int64) for x in tensors) if all(map(has_words, tensors)) else tensors


def _shares(count: int, ranks: int) -> list[int]:
    """Number of tokens of ``count`` that each rank gets, as ``torch.tensor_split`` divides them."""
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def _arrangement(tokens: Tokens, text: list[int], vision: list[int], order: torch.Tensor | None) -> torch.Tensor:
    """Index of each token of the arranged sequence among the received tokens, int64 ``[S]``."""
    of_text, of_vision = torch.arange(tokens.text), torch.arange(tokens.vision)
    if tokens.text_first:
        of_vision += tokens.text
    else:
        of_text += tokens.vision
    shares = zip(of_text.split(text), of_vision.split(vision), strict=True)
    received = torch.cat([part for share in shares for part in (share if tokens.text_first else share[::-1])])
    arranged = received.argsort()
    if order is not None:
        arranged[of_vision] = arranged[of_vision][order]
    return arranged
