"""The transformer and its training by rectified flow on a bank of latents and text encodings that stays on the device.

With clean latents x and noise n the model sees `x_s = (1 - s) x + s n` at noise level s in 0..1 and learns the velocity
`n - x`, with the loss even over tokens. Levels follow the schedule that FluxPipeline will walk: a logit-normal whose
mean is the schedule's own shift for the number of image tokens, plus some uniform ones for the ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from torch import nn

from .rendering import render
from .text_encoders import CLIP_WIDTH, T5_WIDTH, TEXT_TOKENS
from .training import MasterWeights, Pace

PROMPT_DROPOUT = 0.1
UNIFORM_LEVELS = 0.15
LONG_TEXT = 512  # tokens that FluxPipeline pads to unless told otherwise
SHIFT_TOKENS, SHIFT = (256, 4096), (0.5, 1.15)  # FLUX.1-dev's schedule, also in the exported scheduler


@dataclass(frozen=True)
class Bank:
    """What training reads: `latents` by picture size bf16 [N, tokens, 64], `words` [N, 64, C] and `pooled` [N, P] bf16.

    Row 0 of `words` and `pooled` encodes the empty prompt; picture i has row i + 1.
    """

    latents: dict[int, torch.Tensor]
    words: torch.Tensor
    pooled: torch.Tensor


def make_transformer(double_blocks: int, single_blocks: int, heads: int) -> FluxTransformer2DModel:
    """An untrained FLUX transformer with heads of 64, initialised so that every block starts as the identity."""
    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=double_blocks,
        num_single_layers=single_blocks,
        attention_head_dim=64,
        num_attention_heads=heads,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=False,
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
def encode_pictures(vae: AutoencoderKL, numbers: torch.Tensor, size: int, *, batch: int = 128) -> torch.Tensor:
    """Draw pictures [N, K] at `size` and encode them to normalised, packed latents, bf16 [N, (size / 16)^2, 64]."""
    shift, scale = vae.config.shift_factor, vae.config.scaling_factor
    packed = []
    for chunk in numbers.split(batch):
        pictures = render(chunk, size).bfloat16().contiguous(memory_format=torch.channels_last)
        latents = (vae.encode(pictures).latent_dist.mode() - shift) * scale
        packed.append(FluxPipeline._pack_latents(latents.contiguous(), *latents.shape))
    return torch.cat(packed)


def train_transformer(
    transformer: FluxTransformer2DModel,
    bank: Bank,
    pace: Pace,
    *,
    masters: list[torch.Tensor],
    batches: dict[int, int],
    long_text_every: int = 16,
    average_decay: float = 0.999,
) -> list[torch.Tensor]:
    """Train in place and leave the averaged weights in the model.

    Args:
        transformer: bf16, on the bank's device.
        bank: latents and text.
        pace: the budget.
        masters: the weights to start from in float32, in the order of `transformer.parameters()`.
        batches: pictures per step, by picture size. Of four steps three are at the largest size.
        long_text_every: each so many steps the text is padded to LONG_TEXT instead, at a quarter of the batch and not
            compiled, so that the pipeline's default call works too.

    Returns:
        The averaged weights in float32, in the order of `transformer.parameters()`.
    """
    weights = MasterWeights(transformer, masters, weight_decay=0.01, average_decay=average_decay)
    device = bank.words.device
    generator = torch.Generator(device).manual_seed(2)
    positions = {size: image_positions(size, device) for size in batches}
    running: dict[str, torch.Tensor] = {}
    for size, long_text in _shapes(sorted(batches), long_text_every):
        if pace.spent >= 1:
            break
        batch = max(1, batches[size] // 4) if long_text else batches[size]
        rows = torch.randint(len(bank.latents[size]), (batch,), device=device, generator=generator)
        with torch.compiler.set_stance("force_eager" if long_text else "default"):
            loss = _flow_loss(transformer, bank, size, rows, long_text, positions[size], generator)
            loss.backward()
        weights.step(pace.rate)
        key = f"{size}px" + (" long" if long_text else "")
        running[key] = loss.detach() if key not in running else torch.lerp(running[key], loss.detach(), 0.05)
        pace.count(batch, lambda: {name: float(value) for name, value in running.items()}, every=100)
    weights.load_averages()
    return weights.averages


def fill_compile_cache(double_blocks: int, single_blocks: int, heads: int, batches: dict[int, int]) -> None:
    """Compile the blocks at every training shape, for the on-disk cache alone.

    Compiling takes about a minute; done by another process while the autoencoder trains, it is free.
    """
    device = torch.device("cuda")
    torch.backends.cuda.enable_cudnn_sdp(False)
    transformer = make_transformer(double_blocks, single_blocks, heads).to(device, torch.bfloat16)
    transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    latents = {size: torch.zeros(1, (size // 16) ** 2, 64, device=device, dtype=torch.bfloat16) for size in batches}
    words = torch.zeros(2, TEXT_TOKENS, T5_WIDTH, device=device, dtype=torch.bfloat16)
    bank = Bank(latents, words, torch.zeros(2, CLIP_WIDTH, device=device, dtype=torch.bfloat16))
    generator = torch.Generator(device).manual_seed(0)
    for size, batch in sorted(batches.items(), reverse=True):
        rows = torch.zeros(batch, device=device, dtype=torch.long)
        _flow_loss(transformer, bank, size, rows, False, image_positions(size, device), generator).backward()


def image_positions(size: int, device: torch.device) -> torch.Tensor:
    """FLUX's position ids of a square picture's tokens, float32 [tokens, 3]: zero, row, column."""
    side = torch.arange(size // 16, device=device, dtype=torch.float32)
    rows, columns = torch.meshgrid(side, side, indexing="ij")
    return torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).flatten(0, 1)


def draw_levels(count: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Noise levels in 0..1, float32 [count]."""
    device = generator.device
    slope = (SHIFT[1] - SHIFT[0]) / (SHIFT_TOKENS[1] - SHIFT_TOKENS[0])
    shift = SHIFT[0] + slope * (tokens - SHIFT_TOKENS[0])
    levels = torch.sigmoid(shift + torch.randn(count, device=device, generator=generator))
    uniform = torch.rand(count, device=device, generator=generator)
    chosen = torch.rand(count, device=device, generator=generator) < UNIFORM_LEVELS
    return torch.where(chosen, uniform, levels)


def _flow_loss(
    transformer: FluxTransformer2DModel,
    bank: Bank,
    size: int,
    rows: torch.Tensor,
    long_text: bool,
    positions: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    clean = bank.latents[size][rows].float()
    noise = torch.randn(clean.shape, device=clean.device, generator=generator)
    levels = draw_levels(len(rows), clean.shape[1], generator)
    noisy = torch.lerp(clean, noise, levels[:, None, None]).bfloat16()
    dropped = torch.rand(len(rows), device=rows.device, generator=generator) < PROMPT_DROPOUT
    text_rows = torch.where(dropped, 0, rows + 1)
    words = bank.words[text_rows]
    if long_text:  # all padding far from the text has one encoding, the empty prompt's last
        padding = bank.words[0, -1].expand(len(rows), LONG_TEXT - words.shape[1], -1)
        words = torch.cat((words, padding), dim=1)
    velocity = transformer(
        hidden_states=noisy,
        encoder_hidden_states=words,
        pooled_projections=bank.pooled[text_rows],
        timestep=levels.bfloat16(),
        img_ids=positions,
        txt_ids=torch.zeros(words.shape[1], 3, device=rows.device),
        return_dict=False,
    )[0]
    return (velocity.float() - (noise - clean)).square().mean()


def _shapes(sizes: list[int], long_text_every: int) -> Iterator[tuple[int, bool]]:
    """Sizes without end, the largest in three steps of four, and whether the step's text is long."""
    step = 0
    while True:
        step += 1
        long_text = step % long_text_every == 0
        smaller = step % 4 == 2 or (long_text and step // long_text_every % 2 == 0)
        yield (sizes[0] if smaller else sizes[-1]), long_text
