"""Interface between a family of pipelines and the training of a demo model."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import nn

from .exporting import paint
from .prompts import HeldOutPrompt

LATENT_CHANNELS = 16
SHIFT = 7.0  # of the videos' noise schedule; noise levels above 0.9 decide the motion, so most steps must be there

Texts = tuple[torch.Tensor, ...]  # token ids and masks of prompts, int64 [N, length] each


class Family:
    """Parts of a family at demo size; `small` asks for toy sizes. A family has

    `make_vae(small=)`: an untrained autoencoder;
    `make_tokenizers(words)`, `tokenizers_of(pipe)`: tokenizers that know `words`, and those of a pipeline;
    `tokenize(tokenizers, prompts)`: the Texts of prompts as in the pipeline;
    `lengthen(text)`: the same padded to the pipeline's default length;
    `make_flow(tokenizers, small=)`, `flow_of(pipe)`: everything that learns by rectified flow, with the transformer as
    `.transformer`; takes noisy latents, their noise levels in 0..1 [N] and Texts, and returns velocities;
    `mean_level(latents)`: mean of the log-odds of the schedule's noise levels;
    `compile_blocks(flow)`: compiles the transformer's repeated blocks in place;
    `assemble(vae, flow, tokenizers)`: the pipeline of these parts.
    """

    name: str


class Shape(NamedTuple):
    """Shape of a video: `frames`, 4 n + 1 of them, of `size` pixels a side."""

    frames: int
    size: int


class VideoFamily(Family):
    """A family of videos [N, 3, F, H, W] in -1..1, F = 4 n + 1; latents are [N, LATENT_CHANNELS, n + 1, H / 8, W / 8].

    `encode(vae, clips)`: mean and log variance of the latents, side by side along the channels; equal to `vae.encode`,
    but in one pass and with gradients;
    `decode(vae, latents)`: equal to `vae.decode`, but not clamped;
    `set_statistics(vae, mean, deviation)`: sets those of the latents in `vae`, float32 [LATENT_CHANNELS] each;
    `normalise(vae, latents)`: the encoder's latents as the transformer's.
    """

    call: ClassVar[dict[str, Any]]  # arguments of a call except sizes and steps
    guidance_argument: str  # name of the argument that scales classifier-free guidance
    longer: ClassVar[dict[Shape, int]] = {}  # more training shapes, with videos per step
    long_text_every: int | None = None  # steps from one with lengthened text to the next; None if it is no different

    @contextmanager
    def quick_training(self, vae: nn.Module) -> Iterator[None]:
        """Use equivalent operations in the autoencoder that train faster, within the block."""
        yield

    def mean_level(self, latents: torch.Tensor) -> float:
        return math.log(SHIFT)

    def compile_blocks(self, flow: nn.Module) -> None:
        """Compile blocks; if that fails they run uncompiled, which is slower."""
        torch._dynamo.config.suppress_errors = True
        flow.transformer.compile_repeated_blocks(dynamic=False)

    def paint(
        self,
        pipe: DiffusionPipeline,
        prompts: list[HeldOutPrompt],
        shape: Shape,
        *,
        steps: int,
        guidance: float | None = None,
        batch: int = 16,
    ) -> torch.Tensor:
        """Sample videos with the pipeline, float32 [N, 3, F, H, W] in 0..1 on the CPU, each with its seed."""
        call = {key: value for key, value in self.call.items() if key != "negative_prompt"}
        if guidance is not None:
            call[self.guidance_argument] = guidance
        call |= {"height": shape.size, "width": shape.size, "num_frames": shape.frames, "num_inference_steps": steps}
        painted = paint(pipe, prompts, batch=batch, per_prompt={"negative_prompt": ""}, **call)
        return painted.transpose(1, 2).contiguous()


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Build the schedule that all video families are trained for."""
    return FlowMatchEulerDiscreteScheduler(shift=SHIFT)


@torch.no_grad()
def init_transformer(transformer: nn.Module, zero: tuple[str, ...]) -> None:
    """Initialise all linear layers uniformly, without biases; layers whose names end in one of `zero` start at zero."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            if name.endswith(zero):
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
