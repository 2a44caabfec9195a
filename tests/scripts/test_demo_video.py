"""The video demo models' parts, and a training run of each family at toy size."""

import random
import re
from dataclasses import replace

import pytest
import torch

from scripts.demo_training import clips
from scripts.demo_training.clip_prompts import vocabulary
from scripts.demo_training.family import LATENT_CHANNELS, Shape
from scripts.demo_training.flow import Bank, flow_loss, train_flow
from scripts.demo_training.hunyuan import Hunyuan
from scripts.demo_training.llama import OFFSETS, make_llama_encoder, make_llama_tokenizer
from scripts.demo_training.text_encoders import TEXT_TOKENS
from scripts.demo_training.training import Pace, put_in_bf16, trained_weights
from scripts.demo_training.video_demo import VideoDemo, latent_statistics
from scripts.demo_training.wan import Wan

FAMILIES = pytest.mark.parametrize("family", [Wan(), Hunyuan()], ids=["wan", "hunyuan"])
FRAMES = 17  # from here on HunyuanVideo's autoencoder decodes in overlapping pieces


@pytest.fixture
def drawn():
    rng = random.Random(0)
    return clips.render_clips(clips.pack([clips.draw_clip(rng) for _ in range(2)]), frames=FRAMES, size=32)


def make_vae(family):
    """A toy autoencoder whose biases and norms are not at their initial values."""
    torch.manual_seed(0)
    vae = family.make_vae(small=True)
    for weight in vae.parameters():
        if weight.ndim == 1 or len(weight) == weight.numel():
            torch.nn.init.normal_(weight, mean=0.5, std=0.3)
    return vae


def gradients(family, vae, drawn, latents):
    latents = latents.clone().requires_grad_()
    loss = 0
    for values in (family.encode(vae, drawn), family.decode(vae, latents)):
        loss += (values * torch.linspace(-1, 2, values[0].numel()).view(values[0].shape)).square().mean()
    return torch.autograd.grad(loss, [latents, *vae.parameters()])


@FAMILIES
def test_training_runs_the_autoencoder_as_the_pipeline_does(family, drawn):
    """Encoding and decoding in one pass, as in training, equals the pipeline's own calls piece by piece."""
    vae = make_vae(family).requires_grad_(False)
    latents = torch.randn(2, LATENT_CHANNELS, 1 + FRAMES // 4, 4, 4, generator=torch.Generator().manual_seed(0))
    encoded, decoded = vae.encode(drawn).latent_dist.parameters, vae.decode(latents).sample
    assert decoded.std() > 0.01
    with family.quick_training(vae):
        torch.testing.assert_close(family.encode(vae, drawn), encoded, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(family.decode(vae, latents).clamp(-1, 1), decoded.clamp(-1, 1), atol=1e-4, rtol=1e-4)


@FAMILIES
def test_quicker_operations_have_the_same_gradients(family, drawn):
    """The operations that training puts in place of the autoencoder's own differ in speed alone."""
    vae = make_vae(family)
    latents = torch.randn(2, LATENT_CHANNELS, 1 + FRAMES // 4, 4, 4, generator=torch.Generator().manual_seed(0))
    expected = gradients(family, vae, drawn, latents)
    with family.quick_training(vae):
        actual = gradients(family, vae, drawn, latents)
    for gradient, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-3 * float(other.abs().max()) + 1e-7, rtol=0)


@FAMILIES
def test_statistics_whiten_latents_and_change_no_picture(family, drawn):
    """With statistics set, normalised latents are (x - mean) / deviation, and decoding gives the same videos."""
    vae = make_vae(family).requires_grad_(False)
    mean, deviation = latent_statistics(family, vae, drawn)
    plain = vae.encode(drawn).latent_dist.mode()
    decoded = vae.decode(plain).sample
    family.set_statistics(vae, mean, deviation)
    latents = vae.encode(drawn).latent_dist.mode()
    normalised = family.normalise(vae, latents)
    expected = (plain - mean.view(-1, 1, 1, 1)) / deviation.view(-1, 1, 1, 1)
    torch.testing.assert_close(normalised, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(vae.decode(latents).sample, decoded, atol=1e-3, rtol=1e-3)


@FAMILIES
def test_tokenizers_hold_each_word_whole(family):
    tokenizers = family.make_tokenizers(vocabulary())
    for item in clips.held_out_prompts(5):
        mask = family.tokenize(tokenizers, [item.prompt])[1][0]
        words = item.prompt.replace(",", " ,").split()
        assert int(mask.sum()) == len(words) + 1  # and the token that begins or ends a text
        assert bool(mask[: len(words) + 1].all())
    mask = family.tokenize(tokenizers, [""])[1]
    assert int(mask.sum()) == 1  # the empty prompt says something


def test_llama_tells_each_word_its_neighbours():
    """An untrained Llama's first layer lets head h look at the word OFFSETS[h] before, nearly alone."""
    tokenizer = make_llama_tokenizer(vocabulary(), most_tokens=TEXT_TOKENS)
    encoder = make_llama_encoder(tokenizer, seed=0)
    encoder.set_attn_implementation("eager")
    ids = tokenizer([clips.held_out_prompts(1)[0].prompt], return_tensors="pt").input_ids
    attention = encoder(ids, output_attentions=True).attentions[0][0]
    for head, offset in enumerate(OFFSETS):
        assert attention[head].diagonal(-offset).min() > 0.98


@FAMILIES
def test_a_flow_learns_which_clip_a_prompt_asks_for(family):
    """On a bank of two constant videos the loss falls and prompts matter; only weights zero by design stay zero."""
    torch.manual_seed(0)
    tokenizers = family.make_tokenizers(vocabulary())
    flow = family.make_flow(tokenizers, small=True)
    masters = put_in_bf16(flow, torch.device("cpu"))
    before = [weight.clone() for weight in masters]
    text = family.tokenize(tokenizers, ["", "a red circle turns", "a blue square rests"])
    latents, shape = torch.ones(2, LATENT_CHANNELS, 2, 4, 4, dtype=torch.bfloat16), Shape(5, 32)
    bank = Bank({shape: torch.stack((latents[0], -latents[1]))}, text)
    pace = Pace("flow", 60, 5e-3, most_steps=90)
    demo = VideoDemo(family, small=True)
    demo.sizes, demo.longer = replace(demo.sizes, batches={shape: 4}), []
    averages = train_flow(family, flow, masters, bank, pace, demo.turns(), seed=0)
    assert pace.losses[0]["loss 5 frames"] > 1.5
    with torch.no_grad():
        loss = flow_loss(family, flow, bank, shape, 64, torch.Generator().manual_seed(9))
        noisy, levels = torch.zeros(2, LATENT_CHANNELS, 2, 4, 4).bfloat16(), torch.full((2,), 0.95)
        velocity = flow(noisy, levels, *(values[1:] for values in text)).float().mean(dim=(1, 2, 3, 4))
    assert loss < 1.0 and velocity[0] < -0.5 < 0.5 < velocity[1]
    names = [name for name, _ in trained_weights(flow)]
    still = {name for name, weight, other in zip(names, averages, before, strict=True) if torch.equal(weight, other)}
    assert {name for name in still if not re.search(r"\.(q|k|q_proj|k_proj)\.", name)} == set()
