"""The demo model's grammar, renderer, tokenizers and reader, and a training run at toy size."""

import json
import random
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from diffusers import FluxPipeline

from dit_accel import accelerate_pipeline
from dit_accel.tools.demo import demo_arguments, demo_path
from scripts.demo_training import distil
from scripts.demo_training.llama import make_llama_tokenizer
from scripts.demo_training.loading import load_demo
from scripts.demo_training.prompts import held_out_prompts
from scripts.demo_training.reading import agreement, read_pictures
from scripts.demo_training.rendering import pack_pictures, render
from scripts.demo_training.scenes import Group, Scene, describe, draw_picture, vocabulary
from scripts.demo_training.text_encoders import TEXT_TOKENS, make_clip_tokenizer, make_t5_encoder, make_t5_tokenizer
from scripts.demo_training.training import orthogonalise


@pytest.fixture(scope="module")
def pictures():
    rng = random.Random(4)
    return [draw_picture(rng, item.scene) for item in held_out_prompts(8, "tuning")]


def test_prompts_use_the_vocabulary_alone():
    rng = random.Random(2)
    assert {word.strip(",") for _ in range(300) for word in draw_picture(rng).prompt.split()} <= set(vocabulary())


@pytest.mark.parametrize(
    ("changes", "prompt"),
    [
        ({}, "a yellow ring"),
        ({"time": "night"}, "a yellow ring at night"),
        ({"place": "sea"}, "a yellow ring over a calm sea"),
        ({"position": "left"}, "a yellow ring on the left"),
    ],
    ids=["all", "but time", "but place", "but position"],
)
def test_a_short_prompt_leaves_out_what_goes_without_saying(changes, prompt):
    """An image shows green hills, noon and the middle unless its prompt says otherwise."""
    scene = Scene("hills", "noon", "single", "centre", (Group("ring", "yellow", "medium", "plain", 1),))
    prompts = {describe(replace(scene, **changes), random.Random(seed), short=True) for seed in range(60)}
    assert prompt in prompts
    plain = Scene("hills", "noon", "single", "centre", (Group("heart", "red", "medium", "plain", 2),))
    assert "two hearts" in {describe(plain, random.Random(seed), short=True) for seed in range(60)}


def test_the_reader_reads_drawn_pictures(pictures):
    """All attributes of rendered images are read correctly; other scenes do not match."""
    readings = read_pictures((render(pack_pictures(pictures), 256) + 1) / 2)
    scenes = [picture.scene for picture in pictures]
    assert agreement(readings, scenes)["all"] == 1.0 and agreement(readings, scenes[1:] + scenes[:1])["all"] < 0.2


def test_the_readme_s_prompt_shows_what_it_says():
    """A short prompt gets the default of all that it omits, with forecast steps too."""
    pipe = accelerate_pipeline(load_demo("demo-flux", "float32", "cpu"), "turbo")
    prompt = "two pink stars over the sea at sunset"
    generator, sizes = torch.Generator().manual_seed(0), {"height": 256, "width": 256, "num_inference_steps": 16}
    picture = pipe(prompt, generator=generator, output_type="pt", **sizes).images
    assert pipe.dit_accel.report().steps_by_mode["dispatch"] > 5
    scene = Scene("sea", "sunset", "single", "centre", (Group("star", "pink", "medium", "plain", 2),))
    found = agreement(read_pictures(picture), [scene])
    assert set(found.values()) == {1.0}, found


LLAMA = partial(make_llama_tokenizer, most_tokens=TEXT_TOKENS)


@pytest.mark.parametrize("make", [make_clip_tokenizer, make_t5_tokenizer, LLAMA], ids=["clip", "t5", "llama"])
def test_tokenizers_round_trip(make, tmp_path):
    """Saved and loaded again, a tokenizer gives the same tokens, which spell the prompt, and takes any text."""
    tokenizer = make(vocabulary())
    tokenizer.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    prompt = describe(held_out_prompts(1)[0].scene, random.Random(0))
    ids = loaded(prompt).input_ids
    assert ids == tokenizer(prompt).input_ids
    assert loaded.decode(ids, skip_special_tokens=True).replace(" ,", ",") == prompt
    assert loaded("Zèbres, 日本 & 7 okapis").input_ids


def test_text_encoding_knows_order_and_ignores_padding():
    """Swapping two colours changes the encoding of both shapes; a longer padding changes nothing before it."""
    tokenizer = make_t5_tokenizer(vocabulary())
    encoder = make_t5_encoder(tokenizer, seed=0)

    def encode(prompt, length=TEXT_TOKENS):
        ids = tokenizer(prompt, padding="max_length", max_length=length, return_tensors="pt").input_ids
        return encoder(ids)[0][0].detach()

    first, second = encode("a red circle above a blue square"), encode("a blue circle above a red square")
    for word in (2, 6):  # circle, square
        assert (first[word] - second[word]).norm() > 0.3 * first[word].norm()
    longer = encode("a red circle above a blue square", 128)
    torch.testing.assert_close(longer[:TEXT_TOKENS], first, atol=1e-4, rtol=0)
    torch.testing.assert_close(longer[-1], first[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)], ids=["square", "tall", "wide"])
def test_orthogonalised_steps_keep_directions_and_level_their_sizes(shape):
    """Singular values come near 1 while singular vectors stay, against float64's decomposition."""
    matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix[0].double(), full_matrices=False)
    values = torch.diagonal(left.T @ orthogonalise(matrix)[0].double() @ right.T)
    assert values.min() > 0.4 and values.max() < 1.4


def test_a_toy_distillation_yields_a_pipeline_of_few_steps(tmp_path, monkeypatch, train):
    """The student differs from the teacher, and its call takes the steps that it learned."""
    folder = tmp_path / "distilled"
    monkeypatch.setattr(sys, "argv", ["distil.py", "--smoke", "--steps", "4", "--output", str(folder)])
    distil.main()
    student = FluxPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    teacher = FluxPipeline.from_pretrained(demo_path("demo-flux"), dtype=torch.bfloat16)
    pairs = zip(student.transformer.parameters(), teacher.transformer.parameters(), strict=True)
    assert not all(one.equal(other) for one, other in pairs)
    assert demo_arguments(folder)["num_inference_steps"] == 4
    log = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    assert log["images"] == 2 and len(log["student, 4 steps"]["psnr"]) == 1
    student.set_progress_bar_config(disable=True)
    student("a red ball", height=32, width=32, num_inference_steps=4, max_sequence_length=64, output_type="latent")
    few, many = (distil.sigmas_of(student, steps, 32) for steps in (4, 48))  # each of a call's levels is the teacher's
    assert torch.allclose(few, student.scheduler.sigmas) and torch.allclose(many[::12], few)
