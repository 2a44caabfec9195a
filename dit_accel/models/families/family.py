"""Facts that describe a model family to drivers and hooks.

A family needs no subclass. Its facts name the blocks and their attentions, read the tokens from a call's arguments, and
count the FLOPs of a block. :mod:`dit_accel.models.families.sd3` is a short example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dit_accel.kernels.layout import Grid, TokenLayout
from dit_accel.loop.memory import ModelSize, SiteSize
from dit_accel.models.samples import TextLengths

Arguments = dict[str, Any]  # of a transformer call, by name
# Names of the argument in diffusers' transformers; "x" is Z-Image's, "vision_tokens" is Cosmos 3's.
LATENTS = ("hidden_states", "x", "vision_tokens")
FURTHER_LATENTS = ("audio_hidden_states", "sound_hidden_states", "sound_tokens", "action_tokens")  # of more outputs
TIMESTEPS = ("timestep", "timesteps", "t")  # names of the argument; "timesteps" is HiDream's, "t" is Z-Image's
TIMES_OF_PARTS = ("_timestep", "_timesteps")  # ends of the names in models without these, as Cosmos 3's


@dataclass(frozen=True)
class Tokens:
    """The joint sequence of a transformer call.

    Padding may be behind the ``text``, whose length the family's ``text_mask`` gives; behind ``all`` tokens, or
    anywhere in the text (``mask``), as the attention mask says; or nowhere: one ``sample`` after the other.
    """

    text: int  # number of tokens; 0 if the prompt has its own cross-attention
    vision: int  # image or video tokens
    text_first: bool = True
    grid: Grid | None = None  # of a video's tokens: frames, height, width
    padding: Literal["text", "all", "mask", "sample"] = "text"
    text_asks: bool = True  # False: text has keys and no queries
    split_as_one: bool = False  # devices share text and vision together, text first, not apart

    def seen(self, text: bool) -> Tokens:
        return self if text else replace(self, text=0)

    def of_attention(self, queries: int, keys: int) -> Tokens | None:
        """Return the tokens of an attention with these numbers of queries and keys; None = other tokens."""
        text = keys - self.vision
        is_short = self.padding == "sample" and 0 <= text < self.text
        if queries != (keys if self.text_asks else self.vision) or not (is_short or text == self.text):
            return None
        return replace(self, text=text) if is_short else self

    def layout(self, block: int) -> TokenLayout:
        return TokenLayout(self.text, self.vision, block, self.text_first, self.grid)


@dataclass(frozen=True)
class BlockWork:
    """FLOPs of one block in a plain call, split by what can be skipped."""

    tiles: Mapping[str, float]  # attention over the block's own tokens, by its name in the block
    rest: float
    rows: float = 0.0  # of computed rows alone: projections of their queries and of their attention outputs
    row_blocks: float = 0.0  # of a row-block in which any head computes
    bias: float = 0.0  # output projection of all rows; an UPDATE repeats a part of it for each older step

    @property
    def plain(self) -> float:
        return self.rows + self.row_blocks + sum(self.tiles.values()) + self.rest


@dataclass(frozen=True)
class Load:
    """A call for which a family's ``work`` counts the FLOPs of a block."""

    transformer: nn.Module
    arguments: Arguments
    tokens: Tokens

    @property
    def batch(self) -> int:
        return batch_of(self.arguments)

    @property
    def width(self) -> int:
        return width_of(self.transformer)

    @property
    def joint(self) -> int:
        return self.tokens.text + self.tokens.vision

    def one_attention(self, name: str, pairs: float, projection: float, rest: float) -> BlockWork:
        """FLOPs with one attention, whose queries' ``projection`` costs as much as that of its output."""
        return BlockWork(tiles={name: pairs}, rest=rest, rows=2 * projection, bias=projection)

    def beside_prompt(self, name: str, tokens: int, prompt: int, width: int, mlp: float) -> BlockWork:
        """FLOPs of self-attention over vision tokens, cross-attention to a prompt, and an MLP."""
        projection = 2 * self.batch * tokens * width * width
        return BlockWork(
            tiles={name: 4 * self.batch * tokens**2 * width},
            # Keys and values of the tokens, and of the prompt; cross-attention; the MLP.
            rest=(2 + mlp) * projection + 4 * self.batch * width * prompt * (width + tokens),
            rows=projection,
            row_blocks=3 * projection,  # queries of both attentions, and the output of cross-attention
            bias=projection,
        )


@dataclass(frozen=True)
class Stack:
    """A list of blocks of one kind in the transformer, under the name ``attribute``."""

    attribute: str
    features: int = 2  # tokens that level `layer` remembers of a block, as multiples of the joint sequence
    crossed: int = 0  # part of `features` that level `head` always remembers
    joint: bool = False  # True: a cached bias covers the joint sequence, and not vision tokens only


@dataclass(frozen=True)
class OrderFacts:
    """Modules where a video's tokens are reordered, from the first block's first argument on, and restored."""

    tables: Mapping[str, Mapping[int, int]]  # by module whose outputs have an entry for each token: axis of each part
    exit: str  # its first argument, [B, S, C], is restored to raster order


@dataclass(frozen=True)
class SplitFacts:
    """Modules where several devices split a call's tokens, in addition to the tables of :class:`OrderFacts`."""

    entrance: str  # the first block
    streams: tuple[str, ...]  # its arguments with an entry for each token, [B, S, C]
    exit: str  # its output, [B, S, C], is gathered


class Attention(NamedTuple):
    """One attention of a block over the block's own tokens."""

    site: str  # name in reports; the first attention of a block has the block's name
    block: str
    name: str
    module: nn.Module
    sees_text: bool


@dataclass(frozen=True, eq=False)  # one object a family
class Family:
    """The facts of one model family. Functions get the transformer first."""

    name: str  # in presets and reports
    title: str  # the model's common name
    model: str  # diffusers' transformer class
    # The joint sequence of a call, from the transformer and the call's arguments, and the blocks in their order.
    stacks: tuple[Stack, ...]
    tokens: Callable[[nn.Module, Arguments], Tokens]
    # The number of attention heads, and the features of one.
    heads: Callable[[nn.Module], tuple[int, int]] = lambda transformer: (
        transformer.config.num_attention_heads,
        transformer.config.attention_head_dim,
    )
    # The features of a token between attentions, which level `layer` remembers; None = those of all heads.
    width: Callable[[nn.Module], int] | None = None
    # The weights of a block's MLP as a multiple of the width's square, and of its MLP for text; None = the same.
    mlp: Callable[[nn.Module], float] = lambda transformer: 2 * getattr(transformer.config, "mlp_ratio", 4)
    text_mlp: Callable[[nn.Module, nn.Module], float] | None = None
    # FLOPs of a block; None = its MLPs, attentions (the first one over the joint sequence) and their projections.
    work: Callable[[Load, nn.Module], BlockWork] | None = None
    # A block's attentions over its own tokens, and True where these include text.
    attentions: Mapping[str, bool] = field(default_factory=lambda: {"attn": True})
    # Parts whose outputs level `layer` remembers, before their gates; none = the hand-written blocks remember them.
    parts: tuple[str, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)  # how often a block calls a part, if more than once
    # By part, other parts that only feed it and need not run when it is forecast.
    feeds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    text_mask: str | None = None  # argument that marks the text tokens that count, int or bool [B, T]; None = all do
    # Arguments and prompts' lengths without padding that no token reads; None = padding stays.
    cut: Callable[[Arguments, TextLengths], tuple[Arguments, TextLengths]] | None = None
    # The part of an output [B, …] that the pipeline uses; forecasts are compared on it.
    used: Callable[[nn.Module, torch.Tensor, Arguments], torch.Tensor] = lambda _, output, __: output
    order: OrderFacts | None = None
    first_frame_apart: Callable[[nn.Module], bool] = lambda _: False  # the model finds its tokens by their place
    names_transformer: bool = False  # block names begin with the transformer's, because a pipeline may have two
    split: SplitFacts | None = None  # None = the plan of the transformer's class, if it has one
    # A plain preset takes its video form for videos; if a family makes both, the call decides.
    makes: Literal["images", "videos", "both"] = "images"
    frames_per_second: Callable[[Mapping[str, Any]], float] = lambda _: 24.0  # of training, from a pipeline's config
    # Parts of its models' ids in lower case, without "-", "_" and ".", if not its name; an id's longest word decides.
    # Models that are distilled to few steps have a word in `distilled`, with the number of steps if all have the same.
    words: tuple[str, ...] = ()
    distilled: Mapping[str, int | None] = field(default_factory=dict)
    steps: int | None = None  # of its pipeline, by default
    guided: Mapping[str, Any] = field(default_factory=dict)  # arguments of a call that switch guidance on
    unguided: float | None = None  # `guidance_scale` that switches it off, for distilled models; None = it has none
    sharing: tuple[str, ...] = ()  # tested ways to share a call by several GPUs: arguments of `parallelize_pipeline`
    is_modular: bool = False  # diffusers has it as a modular pipeline alone, which the command line can't load
    several_images: tuple[str, ...] = ()  # pipelines whose `image` may be several references; else a list is a batch
    streamed: tuple[str, ...] = ()  # pipelines that decode a video chunk by chunk, in its order, between runs
    computes_in: str | None = None  # argument with the dtype of the features between blocks; None = the latents
    fused: Literal["layer", "head"] | None = None  # deepest level of its blocks in `models/fused`; None = it has none

    @property
    def words_of_ids(self) -> tuple[str, ...]:
        return self.words or (self.name.replace("_", ""),)

    def blocks(self, transformer: nn.Module, name: str) -> dict[str, nn.Module]:
        """Return the transformer's blocks in order, by their names in reports."""
        prefix = f"{name}." if self.names_transformer else ""
        lists = {stack.attribute: getattr(transformer, stack.attribute) for stack in self.stacks}
        return {f"{prefix}{kind}.{i}": block for kind, blocks in lists.items() for i, block in enumerate(blocks)}

    def attentions_of(self, block: nn.Module, name: str) -> list[Attention]:
        """Return the attentions of a block; some of the family's may be missing in it."""
        found: list[Attention] = []
        for item, sees_text in self.attentions.items():
            if (module := part_of(block, item)) is not None:
                found.append(Attention(f"{name}.{item}" if found else name, name, item, module, sees_text))
        return found

    def all_attentions(self, transformer: nn.Module, name: str) -> list[Attention]:
        """Return the attentions of all blocks; ``name`` as for :meth:`blocks`."""
        blocks = self.blocks(transformer, name).items()
        return [item for block_name, block in blocks for item in self.attentions_of(block, block_name)]

    def parts_of(self, block: nn.Module) -> tuple[dict[str, nn.Module], list[nn.Module]]:
        """Return the parts of a block that level ``layer`` remembers, by name, and the modules that only feed them."""
        found = {part: module for part in self.parts if (module := part_of(block, part)) is not None}
        feeding = {name: part_of(block, name) for part in found for name in self.feeds.get(part, ())}
        return {part: module for part, module in found.items() if part not in feeding}, [*feeding.values()]

    def block_work(self, transformer: nn.Module, arguments: Arguments, tokens: Tokens, block: nn.Module) -> BlockWork:
        if self.work is not None:
            return self.work(Load(transformer, arguments, tokens), block)
        width, batch, joint = math.prod(self.heads(transformer)), batch_of(arguments), tokens.text + tokens.vision
        found = self.attentions_of(block, self.name)
        counts = {item.name: joint if item.sees_text else tokens.vision for item in found}
        projection = 2 * batch * joint * width * width
        others = sum(counts.values()) - joint  # tokens of further attentions, which have their own projections
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
        """Size of everything that a call makes the transformer remember."""
        config, latents, tokens = transformer.config, latents_of(arguments), layout.tokens
        heads, head_dim = self.heads(transformer)
        width = heads * head_dim
        whole = tokens * (width if self.width is None else self.width(transformer))
        sites = [
            SiteSize(tokens if stack.joint else layout.vision, stack.features * whole // width, stack.crossed * tokens)
            for stack in self.stacks
            for _ in getattr(transformer, stack.attribute)
        ]
        output, in_channels = sum(item.numel() for item in latents), getattr(config, "in_channels", None)
        if in_channels and (out_channels := getattr(config, "out_channels", None)):
            patch = config.patch_size**2 if latents[0].dim() == 3 else 1
            output = output // in_channels * out_channels * patch
        return ModelSize(
            output=output + sum(item.numel() for item in further_latents_of(arguments)),
            itemsize=latents[0].element_size(),
            batch=batch_of(arguments),
            layout=layout,
            heads=heads,
            width=width,
            sites=tuple(sites),
            symbols=symbols,
        )


def latents_of(arguments: Arguments) -> list[torch.Tensor]:
    """Return the latents of a call, a tensor or a list of samples; empty if no argument has their name."""
    return tensors_in(next((arguments[name] for name in LATENTS if name in arguments), None))


def further_latents_of(arguments: Arguments) -> list[torch.Tensor]:
    """Return the latents of a call for outputs other than the first, such as audio."""
    return tensors_in([arguments[name] for name in arguments if name in FURTHER_LATENTS])


def tensors_in(nested: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def timestep_names(names: Collection[str]) -> list[str]:
    """Return the names of arguments that hold timesteps: TIMESTEPS, or the timesteps of parts if there is none."""
    return [name for name in TIMESTEPS if name in names] or [name for name in names if name.endswith(TIMES_OF_PARTS)]


def batch_of(arguments: Arguments) -> int:
    return len(next(arguments[name] for name in LATENTS if name in arguments))


def part_of(block: nn.Module, name: str) -> nn.Module | None:
    """Return a block's part by its name, which may have dots; None = the block has none."""
    part: Any = block
    for item in name.split("."):
        part = getattr(part, item, None)
    return part


def packed_tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    """Tokens of a call whose text and image latents come in as tokens, text first."""
    return Tokens(arguments["encoder_hidden_states"].shape[1], arguments["hidden_states"].shape[1])


def masked_tokens(transformer: nn.Module, arguments: Arguments) -> Tokens:
    """Tokens of :func:`packed_tokens`, with padding in the text that a mask marks."""
    return replace(packed_tokens(transformer, arguments), padding="mask")


def video_tokens(sizes: Sequence[int], patches: Sequence[int], text: int = 0, **facts: Any) -> Tokens:
    """Tokens of a video whose frames, height and width are divided into patches, with further facts."""
    grid = tuple(size // patch for size, patch in zip(sizes, patches, strict=True))
    return Tokens(text, math.prod(grid), grid=grid, **facts)


def image_tokens(transformer: nn.Module, arguments: Arguments, text: int | None = None, **facts: Any) -> Tokens:
    """Tokens of latents ``[B, C, H, W]`` in patches, and of text, None = of the prompt, with further facts."""
    text = arguments["encoder_hidden_states"].shape[1] if text is None else text
    sides = arguments["hidden_states"].shape[2:]
    return Tokens(text, math.prod(side // transformer.config.patch_size for side in sides), **facts)


def heads_of_width(transformer: nn.Module) -> tuple[int, int]:
    """Heads of a configuration that has their number and the width of all."""
    config = transformer.config
    return config.num_attention_heads, config.hidden_size // config.num_attention_heads


def width_of(transformer: nn.Module) -> int:
    return transformer.config.num_attention_heads * transformer.config.attention_head_dim
