"""What has to be known of a model family: a page of facts, from which drivers and hooks work.

A family needs no subclass. It says which modules are blocks, which attentions they have, what a call's arguments tell
of tokens, and what a block costs; :mod:`dit_accel.models.families.sd3` is a short one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dit_accel.kernels.layout import TokenLayout
from dit_accel.loop.memory import ModelSize, SiteSize
from dit_accel.sparse.token_order import Grid

Arguments = dict[str, Any]  # of a transformer call, by name
LATENTS = ("hidden_states", "x")  # what transformers of diffusers call them; Z-Image's differs
FURTHER_LATENTS = ("audio_hidden_states", "sound_hidden_states")  # of models with several outputs


@dataclass(frozen=True)
class Tokens:
    """The joint sequence of a transformer call.

    Args:
        text: number of text tokens in it; 0 where the prompt is attended to apart.
        vision: of image or video tokens.
        text_first: whether text comes before them.
        grid: of the video's tokens, (frames, height, width); None for images.
        padding: where it lies. `text`: behind the text, and the family's ``text_mask`` says how much. `all`: behind all
            tokens, and the model's attention mask says how much. `mask`: anywhere in the text, and the model's
            attention mask says where. `sample`: nowhere, since attention runs over one sample after the other.
        text_asks: whether text has queries too; else it is among the keys alone.
    """

    text: int
    vision: int
    text_first: bool = True
    grid: Grid | None = None
    padding: Literal["text", "all", "mask", "sample"] = "text"
    text_asks: bool = True

    def seen(self, text: bool) -> Tokens:
        """Those of an attention that sees the text too, or does not."""
        return self if text else replace(self, text=0)

    def of_attention(self, queries: int, keys: int) -> Tokens | None:
        """Those that an attention over so many queries and keys has; None = it attends to something else."""
        text = keys - self.vision
        is_short = self.padding == "sample" and 0 <= text < self.text
        if queries != (keys if self.text_asks else self.vision) or not (is_short or text == self.text):
            return None
        return replace(self, text=text) if is_short else self

    def layout(self, block: int) -> TokenLayout:
        """The layout of an attention over them, in blocks of ``block`` tokens."""
        return TokenLayout(self.text, self.vision, block, text_first=self.text_first)


@dataclass(frozen=True)
class BlockWork:
    """FLOPs of one block of a plain call, by what they scale with.

    Args:
        tiles: attention over the block's own tokens, by its name in the block.
        rest: all else.
        rows: what only rows that compute need: projections of their queries and of their attention outputs.
        row_blocks: what only row-blocks need in which any head computes.
        bias: output projection of all rows, of which an UPDATE does a part once more for each older step that it
            remembers.
    """

    tiles: Mapping[str, float]
    rest: float
    rows: float = 0.0
    row_blocks: float = 0.0
    bias: float = 0.0

    @property
    def plain(self) -> float:
        return self.rows + self.row_blocks + sum(self.tiles.values()) + self.rest


@dataclass(frozen=True)
class Stack:
    """A list of like blocks in the transformer.

    Args:
        attribute: its name.
        features: tokens that level ``layer`` remembers of a block, as multiples of the joint sequence.
        crossed: of these, what level ``head`` remembers in any case.
        joint: whether a cached bias is of the joint sequence; else of vision tokens alone.
    """

    attribute: str
    features: int = 2
    crossed: int = 0
    joint: bool = False


@dataclass(frozen=True)
class OrderFacts:
    """Where an order of a video's tokens is put on and taken off; it enters with the first block's first argument.

    Args:
        tables: modules whose outputs hold something for each token: by module, the axis of tokens of each part.
        exit: module whose first argument, ``[B, S, C]``, has its order taken off.
    """

    tables: Mapping[str, Mapping[int, int]]
    exit: str


@dataclass(frozen=True)
class SplitFacts:
    """Where several devices split a call's tokens among them, beside the tables of :class:`OrderFacts`.

    Args:
        entrance: the first block.
        streams: its arguments with something for each token, ``[B, S, C]``.
        exit: module whose output, ``[B, S, C]``, is gathered.
    """

    entrance: str
    streams: tuple[str, ...]
    exit: str


class Attention(NamedTuple):
    """One attention of a block over the block's own tokens.

    Args:
        site: its name in reports, which is the block's for the first one of a block.
        block: the block's name.
        name: attribute of the block.
        module: what attends.
        sees_text: whether text is among the tokens.
    """

    site: str
    block: str
    name: str
    module: nn.Module
    sees_text: bool


@dataclass(frozen=True, eq=False)  # one object a family
class Family:
    """The facts of one model family.

    Args:
        name: in presets and reports.
        title: what people call it.
        model: name of diffusers' transformer class.
        stacks: its blocks, in the order in which they run.
        tokens: the joint sequence, from the transformer and the arguments of a call; see :func:`packed_tokens`.
        heads: attention heads and features of one, from the transformer.
        mlp: elements of the matrices of a block's MLP as multiples of the width's square, from the transformer.
        text_mlp: the same of what text tokens alone go through, from the transformer and the block; None = as ``mlp``.
        work: FLOPs of a block, from the transformer, the arguments, the joint sequence and the block; None = those of
            attentions and their projections, the first over the joint sequence, and of that MLP.
        attentions: names of a block's attentions over its own tokens, and whether text is among these.
        parts: names of a block's parts whose outputs level ``layer`` remembers, before their gates; none = its
            hand-written blocks do that.
        feeds: of some of these, what only feeds them in a block and need not run where they are forecast.
        text_mask: argument that says which text tokens count, int or bool ``[B, T]``; None = all do.
        cuts_padding: whether text behind the longest prompt of a batch may be left away.
        used: the part of an output ``[B, …]`` that the pipeline uses, on which forecasts are judged.
        order: for videos, where an order of tokens goes.
        first_frame_apart: whether the model tells the first frame's tokens by their place.
        names_transformer: whether names of blocks say whose they are, as a pipeline may have two transformers.
        split: where several devices split a call's tokens; None = as the transformer's class says, if it does.
        makes: `videos` get the video form of a plain preset; models of a family that makes both are told by their call.
        frames_per_second: of the videos that it was trained on, from a pipeline's configuration.
        words: parts of its models' ids in small letters, without "-", "_" and "."; an id's longest word decides.
        distilled: parts of ids, likewise, of its models that are distilled to few steps: the steps, where all have
            the same.
        sharing: how several GPUs share a call, as ``parallelize_pipeline`` names it, as far as tests hold it.
        fused: whether it has hand-written blocks, on a page of its name in ``models/fused``, and so level ``head``.
    """

    name: str
    title: str
    model: str
    stacks: tuple[Stack, ...]
    tokens: Callable[[nn.Module, Arguments], Tokens]
    heads: Callable[[nn.Module], tuple[int, int]] = lambda transformer: (
        transformer.config.num_attention_heads,
        transformer.config.attention_head_dim,
    )
    mlp: Callable[[nn.Module], float] = lambda transformer: 2 * getattr(transformer.config, "mlp_ratio", 4)
    text_mlp: Callable[[nn.Module, nn.Module], float] | None = None
    work: Callable[[nn.Module, Arguments, Tokens, nn.Module], BlockWork] | None = None
    attentions: Mapping[str, bool] = field(default_factory=lambda: {"attn": True})
    parts: tuple[str, ...] = ()
    feeds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    text_mask: str | None = None
    cuts_padding: bool = False
    used: Callable[[nn.Module, torch.Tensor, Arguments], torch.Tensor] = lambda _, output, __: output
    order: OrderFacts | None = None
    first_frame_apart: Callable[[nn.Module], bool] = lambda _: False
    names_transformer: bool = False
    split: SplitFacts | None = None
    makes: Literal["images", "videos", "both"] = "images"
    frames_per_second: Callable[[Mapping[str, Any]], float] = lambda _: 24.0
    words: tuple[str, ...] = ()
    distilled: Mapping[str, int | None] = field(default_factory=dict)
    sharing: tuple[str, ...] = ()
    fused: bool = False

    def blocks(self, transformer: nn.Module, name: str) -> dict[str, nn.Module]:
        """The transformer's blocks in order, by the names that reports give them.

        Args:
            name: the transformer's name in the pipeline.
        """
        prefix = f"{name}." if self.names_transformer else ""
        lists = {stack.attribute: getattr(transformer, stack.attribute) for stack in self.stacks}
        return {f"{prefix}{kind}.{i}": block for kind, blocks in lists.items() for i, block in enumerate(blocks)}

    def attentions_of(self, block: nn.Module, name: str) -> list[Attention]:
        """The attentions that a block of that name has; of the family's, some may be missing."""
        found = [(each, part_of(block, each), text) for each, text in self.attentions.items()]
        present = [(each, module, text) for each, module, text in found if module is not None]
        return [
            Attention(f"{name}.{each}" if place else name, name, each, module, sees_text)
            for place, (each, module, sees_text) in enumerate(present)
        ]

    def all_attentions(self, transformer: nn.Module, name: str) -> list[Attention]:
        """Those of all blocks; ``name`` as for :meth:`blocks`."""
        blocks = self.blocks(transformer, name).items()
        return [each for block_name, block in blocks for each in self.attentions_of(block, block_name)]

    def parts_of(self, block: nn.Module) -> tuple[dict[str, nn.Module], list[nn.Module]]:
        """What level ``layer`` remembers of a block, by name, and what only feeds it."""
        found = {part: module for part in self.parts if (module := part_of(block, part)) is not None}
        feeding = {name: part_of(block, name) for part in found for name in self.feeds.get(part, ())}
        return {part: module for part, module in found.items() if part not in feeding}, [*feeding.values()]

    def block_work(self, transformer: nn.Module, arguments: Arguments, tokens: Tokens, block: nn.Module) -> BlockWork:
        """FLOPs of a block."""
        if self.work is not None:
            return self.work(transformer, arguments, tokens, block)
        width, batch, joint = math.prod(self.heads(transformer)), batch_of(arguments), tokens.text + tokens.vision
        counts = {
            each.name: joint if each.sees_text else tokens.vision for each in self.attentions_of(block, self.name)
        }
        projection = 2 * batch * joint * width * width
        others = sum(counts.values()) - joint  # whose projections are their own
        mlp = self.mlp(transformer)
        of_text = mlp if self.text_mlp is None else self.text_mlp(transformer, block)
        of_mlp = 2 * batch * width**2 * (tokens.vision * mlp + tokens.text * of_text)
        return BlockWork(
            tiles={name: 4 * batch * count**2 * width for name, count in counts.items()},
            rest=2 * projection + of_mlp + 8 * batch * others * width**2,
            rows=2 * projection,
            bias=projection,
        )

    def size(self, transformer: nn.Module, arguments: Arguments, layout: TokenLayout, symbols: int) -> ModelSize:
        """What a call makes the transformer remember.

        Args:
            layout: of the joint sequence.
            symbols: bytes of what one block draws.
        """
        config, latents, tokens = transformer.config, latents_of(arguments), layout.tokens
        sites = [
            SiteSize(tokens if stack.joint else layout.vision, stack.features * tokens, stack.crossed * tokens)
            for stack in self.stacks
            for _ in getattr(transformer, stack.attribute)
        ]
        output, given = sum(each.numel() for each in latents), getattr(config, "in_channels", None)
        if given and (made := getattr(config, "out_channels", None)):
            patch = config.patch_size**2 if latents[0].dim() == 3 else 1
            output = output // given * made * patch
        heads, head_dim = self.heads(transformer)
        return ModelSize(
            output=output,
            itemsize=latents[0].element_size(),
            batch=batch_of(arguments),
            layout=layout,
            heads=heads,
            width=heads * head_dim,
            sites=tuple(sites),
            symbols=symbols,
        )


def latents_of(arguments: Arguments) -> list[torch.Tensor]:
    """The tensors of a call's latents, which may come in a list of samples; none where no argument has their name."""
    latents = next((arguments[name] for name in LATENTS if name in arguments), None)
    return [leaf for leaf in pytree.tree_leaves(latents) if isinstance(leaf, torch.Tensor)]


def batch_of(arguments: Arguments) -> int:
    """Samples in a call."""
    return len(next(arguments[name] for name in LATENTS if name in arguments))


def part_of(block: nn.Module, name: str) -> nn.Module | None:
    """A block's part by its name, which may have dots; None = the block has none."""
    return reduce(lambda module, each: getattr(module, each, None), name.split("."), block)


def packed_tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    """Text, then image tokens that come in one by one."""
    return Tokens(arguments["encoder_hidden_states"].shape[1], arguments["hidden_states"].shape[1])


def width_of(transformer: nn.Module) -> int:
    """Features of a token inside the blocks."""
    return transformer.config.num_attention_heads * transformer.config.attention_head_dim


def work_beside_prompt(name: str, batch: int, tokens: int, prompt: int, width: int, mlp: float) -> BlockWork:
    """Self-attention over vision tokens, cross-attention to a prompt, and an MLP.

    Args:
        name: of the self-attention.
        tokens, prompt: how many of each.
        mlp: as the facts of a :class:`Family` have it.
    """
    projection = 2 * batch * tokens * width * width
    return BlockWork(
        tiles={name: 4 * batch * tokens**2 * width},
        # Keys and values; those of the prompt, and the attention to them; the MLP.
        rest=(2 + mlp) * projection + 4 * batch * width * prompt * (width + tokens),
        rows=projection,
        row_blocks=3 * projection,  # queries of both attentions, and the output of cross-attention
        bias=projection,
    )
