"""The transformer and its training by rectified flow, on a bank of latents that stays on the device.

With clean latents x and noise n the model sees `x_s = (1 - s) x + s n` at noise level s in 0..1 and learns the velocity
`n - x`; all tokens count equally in the loss. Most levels follow FluxPipeline's schedule: a logit-normal whose mean is
the schedule's shift for the number of image tokens. The others are uniform, to cover the ends. The two small text
encoders are trained together with the transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextModel, T5EncoderModel

from .text_encoders import CLIP_WIDTH, T5_WIDTH
from .training import MasterWeights, Pace

PROMPT_DROPOUT = 0.1
UNIFORM_LEVELS = 0.15
LONG_TEXT = 512  # FluxPipeline's default padded length

# The schedule's shift at these numbers of image tokens, as in FLUX.1-dev but larger: noise levels above 0.85 decide the
# place and shape of a sticker of some thousand latent values, so half of all steps must be there.
SHIFT_TOKENS, SHIFT = (256, 4096), (1.2, 2.7)


@dataclass(frozen=True)
class Bank:
    """Training data: `latents` by image size, bf16 [N, tokens, 64], and token ids, int64 [N + 1, length].

    Row 0 of the ids is the empty prompt; image i has row i + 1.
    """

    latents: dict[int, torch.Tensor]
    clip_ids: torch.Tensor
    t5_ids: torch.Tensor

    def __len__(self) -> int:
        return len(self.t5_ids) - 1


class PromptedFlow(nn.Module):
    """Everything that learns by rectified flow: the transformer and both text encoders, called as in FluxPipeline."""

    def __init__(
        self,
        transformer: FluxTransformer2DModel,
        clip: CLIPTextModel,
        t5: T5EncoderModel,
        shift: tuple[float, float] = SHIFT,
    ) -> None:
        super().__init__()
        self.transformer, self.clip, self.t5, self.shift = transformer, clip, t5, shift

    def forward(
        self,
        noisy: torch.Tensor,
        levels: torch.Tensor,
        clip_ids: torch.Tensor,
        t5_ids: torch.Tensor,
        positions: torch.Tensor,
        guidance: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Predict the velocity, bf16 [B, tokens, 64], of `noisy` (same shape) at `levels` [B]; `positions` [tokens, 3].

        `guidance` [B] is for transformers that embed it.
        """
        return self.transformer(
            hidden_states=noisy,
            encoder_hidden_states=self.t5(t5_ids)[0],
            pooled_projections=self.clip(clip_ids).pooler_output,
            timestep=levels.bfloat16(),
            guidance=guidance,
            img_ids=positions,
            txt_ids=torch.zeros(t5_ids.shape[1], 3, device=noisy.device),
            return_dict=False,
        )[0]


def make_transformer(
    double_blocks: int, single_blocks: int, heads: int, *, guidance: bool = False
) -> FluxTransformer2DModel:
    """Build an untrained FLUX transformer with heads of 64, initialised so that every block starts as the identity."""
    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=double_blocks,
        num_single_layers=single_blocks,
        attention_head_dim=64,
        num_attention_heads=heads,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=guidance,
        axes_dims_rope=(8, 28, 28),
    )
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            modulates = name.endswith(("norm1.linear", "norm1_context.linear", "norm.linear", "norm_out.linear"))
            if modulates or name == "proj_out":
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return transformer


@torch.no_grad()
def encode_pictures(
    vae: AutoencoderKL, numbers: torch.Tensor, size: int, *, render: Callable, batch: int = 128
) -> torch.Tensor:
    """Render images [N, K] at `size` and encode them to normalised, packed latents, bf16 [N, (size / 16)^2, 64]."""
    shift, scale = vae.config.shift_factor, vae.config.scaling_factor
    packed = []
    for chunk in numbers.split(batch):
        pictures = render(chunk, size).bfloat16().contiguous(memory_format=torch.channels_last)
        latents = (vae.encode(pictures).latent_dist.mode() - shift) * scale
        packed.append(FluxPipeline._pack_latents(latents.contiguous(), *latents.shape))
    return torch.cat(packed)


def train_flow(
    model: PromptedFlow,
    masters: list[torch.Tensor],
    bank: Bank,
    pace: Pace,
    *,
    batches: dict[int, int],
    long_text_every: int = 16,
    average_decay: float = 0.999,
) -> list[torch.Tensor]:
    """Train in place and leave the averaged weights in the model.

    Args:
        model: bf16, on the bank's device.
        masters: its weights in float32, in the order of `trained_weights(model)`.
        bank: latents and text.
        pace: the budget.
        batches: images per step, by image size. Three of four steps use the largest size.
        long_text_every: period in steps at which text is padded to LONG_TEXT instead, with a quarter of the batch and
            not compiled, so that the pipeline's default call works too.

    Returns:
        The averaged weights in float32, in the order of `trained_weights(model)`.
    """
    weights = MasterWeights(model, masters, average_decay=average_decay)
    device = bank.t5_ids.device
    generator = torch.Generator(device).manual_seed(2)
    positions = {size: image_positions(size, device) for size in batches}
    running: dict[str, torch.Tensor] = {}
    for size, long_text in _shapes(sorted(batches), long_text_every):
        if pace.spent >= 1:
            break
        batch = max(1, batches[size] // 4) if long_text else batches[size]
        rows = torch.randint(len(bank.latents[size]), (batch,), device=device, generator=generator)
        with torch.compiler.set_stance("force_eager" if long_text else "default"):
            loss = _flow_loss(model, bank, size, rows, long_text, positions[size], generator)
            loss.backward()
        weights.step(pace.rate)
        key = f"{size}px" + (" long" if long_text else "")
        running[key] = torch.lerp(running.get(key, loss.detach()), loss.detach(), 0.05)
        pace.count(batch, lambda: {name: float(value) for name, value in running.items()}, every=200)
    weights.load_averages()
    return weights.averages


def compile_blocks(flow: PromptedFlow) -> None:
    """Compile the transformer's repeated blocks, in place."""
    flow.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)


def image_positions(size: int, device: torch.device) -> torch.Tensor:
    """FLUX's position ids of a square image's tokens, float32 [tokens, 3]: zero, row, column."""
    side = torch.arange(size // 16, device=device, dtype=torch.float32)
    rows, columns = torch.meshgrid(side, side, indexing="ij")
    return torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).flatten(0, 1)


def draw_levels(
    count: int, tokens: int, generator: torch.Generator, shift: tuple[float, float] = SHIFT
) -> torch.Tensor:
    """Random noise levels in 0..1, float32 [count]; `shift` at the two numbers SHIFT_TOKENS."""
    device = generator.device
    slope = (shift[1] - shift[0]) / (SHIFT_TOKENS[1] - SHIFT_TOKENS[0])
    mean = shift[0] + slope * (tokens - SHIFT_TOKENS[0])
    levels = torch.sigmoid(mean + torch.randn(count, device=device, generator=generator))
    uniform = torch.rand(count, device=device, generator=generator)
    chosen = torch.rand(count, device=device, generator=generator) < UNIFORM_LEVELS
    return torch.where(chosen, uniform, levels)


def _flow_loss(
    model: PromptedFlow,
    bank: Bank,
    size: int,
    rows: torch.Tensor,
    long_text: bool,
    positions: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    clean = bank.latents[size][rows].float()
    noise = torch.randn(clean.shape, device=clean.device, generator=generator)
    levels = draw_levels(len(rows), clean.shape[1], generator, model.shift)
    guidance = None
    if model.transformer.config.guidance_embeds:  # it acts as contrast, because there is no distillation
        guidance = 1 + 4 * torch.rand(len(rows), device=rows.device, generator=generator)
        clean = clean * (0.7 + 0.1 * guidance)[:, None, None]
    noisy = torch.lerp(clean, noise, levels[:, None, None]).bfloat16()
    dropped = torch.rand(len(rows), device=rows.device, generator=generator) < PROMPT_DROPOUT
    text_rows = torch.where(dropped, 0, rows + 1)
    t5_ids = bank.t5_ids[text_rows]
    if long_text:
        t5_ids = F.pad(t5_ids, (0, LONG_TEXT - t5_ids.shape[1]))  # with T5's padding token, 0
    velocity = model(noisy, levels, bank.clip_ids[text_rows], t5_ids, positions, guidance)
    return (velocity.float() - (noise - clean)).square().mean()


def _shapes(sizes: list[int], long_text_every: int) -> Iterator[tuple[int, bool]]:
    """Yield sizes without end, the largest in three of four steps, and whether the step's text is long."""
    step = 0
    while True:
        step += 1
        long_text = step % long_text_every == 0
        smaller = step % 4 == 2 or (long_text and step // long_text_every % 2 == 0)
        yield (sizes[0] if smaller else sizes[-1]), long_text
