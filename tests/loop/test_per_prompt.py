"""schedule.per_prompt: in a batch each prompt has the same steps, output and work as alone."""

import inspect
import re

import diffusers
import pytest
import torch

from dit_accel import accelerate_pipeline, accelerated, load_preset
from dit_accel.loop.rows import join_rows, take_rows
from dit_accel.models import samples
from dit_accel.models.samples import arguments_of_rows, prompt_rows, why_not_divisible
from tests.models import tiny
from tests.tiny import same_weights, tiny_output, tiny_pipeline

STEPS = 16
PROMPTS = ["a red fox in the winter snow", "two", "a lighthouse above the sea at night, seen from far away"]
PRESET = load_preset("balanced", **{"schedule.per_prompt": True, "schedule.target_error": 0.06})


def generators(count):
    return [torch.Generator().manual_seed(11 * index) for index in range(count)]


def run(pipe, name, prompts, seeds, **overrides):
    """Latents, and the computed share of every step."""
    output = tiny_output(pipe, name, steps=STEPS, prompt=prompts, generator=seeds, **overrides)
    report = pipe.dit_accel.report()
    return output, torch.tensor(report.density[0]), report


def require_as_alone(together, density, alone):
    """Each prompt has the latents and the computed shares of its own call; returns these shares."""
    torch.testing.assert_close(together, torch.cat([output for output, *_ in alone]), rtol=1e-3, atol=1e-3)
    shares = torch.stack([share for _, share, *_ in alone])
    assert torch.equal(density, shares.mean(0))
    return shares


TARGETS = {"flux": 0.06, "wan": 0.15, "hunyuan": 0.06, "ltx": 0.06, "sd3": 0.15, "qwen-image": 0.2}
ALIKE = ("hunyuan", "flux-controlnet", "flux-ip-adapter")  # whose prompts differ too little to compute other steps


@pytest.mark.parametrize("name", {**TARGETS, **dict.fromkeys(ALIKE)})
def test_each_prompt_gets_what_it_gets_alone(name):
    """Guidance comes in calls of its own (Wan), in one batch that says so (LTX), in one that doesn't (SD3), or not.

    Qwen-Image takes shapes of its images in lists, and lists of a ControlNet's residuals and an IP adapter's
    embeddings are split too.
    """
    pipe = accelerate_pipeline(tiny_pipeline(name), PRESET, **{"schedule.target_error": TARGETS.get(name, 0.06)})
    together, density, report = run(pipe, name, PROMPTS, generators(3))
    alone = [run(pipe, name, prompt, seed) for prompt, seed in zip(PROMPTS, generators(3), strict=True)]
    shares = require_as_alone(together, density, alone)
    assert report.computed_fraction == pytest.approx(shares.mean().item())
    for place, (_, _, own) in enumerate(alone):
        of_batch = report.of_prompt(place)
        assert [step.mode for step in of_batch.steps] == [step.mode for step in own.steps]
        errors, expected = ([step.error for step in each.steps] for each in (of_batch, own))
        assert [error is None for error in errors] == [error is None for error in expected]
        assert [*filter(None, errors)] == pytest.approx([*filter(None, expected)], rel=0.05)
        assert of_batch.computed_fraction == pytest.approx(own.computed_fraction)
    assert name in ALIKE or len(shares.unique(dim=0)) > 1
    assert not any("computed together" in note for note in report.notes)


@pytest.mark.parametrize("name, target", [("krea2", 0.6), ("ideogram4", 0.2)])
def test_position_ids_do_not_keep_prompts_together(name, target):
    """All prompts of Krea 2 share them; Ideogram 4 has them for each image."""
    pipe, arguments = tiny.built(name)

    def run(rows):
        asked = {key: value[rows] if "prompt_embeds" in key else value for key, value in arguments.items()}
        if name == "ideogram4":
            asked["num_images_per_prompt"] = len(rows)
        seeds = [generators(2)[row] for row in rows]
        sizes = {"height": 96, "width": 96, "num_inference_steps": STEPS, "output_type": "latent"}
        (latents,) = pipe(**{**sizes, **asked, "generator": seeds}, return_dict=False)
        report = pipe.dit_accel.report()
        assert not any("computed together" in note for note in report.notes)
        return latents, torch.tensor(report.density[0])

    with accelerated(pipe, PRESET, **{"schedule.target_error": target}):
        together, density = run([0, 1])
        alone = [run([row]) for row in range(2)]
    require_as_alone(together, density, alone)
    assert 0.5 in density


def sd3_with_perturbed_attention():
    components = {name: part for name, part in tiny_pipeline("sd3").components.items() if part is not None}
    return diffusers.StableDiffusion3PAGPipeline(**components, pag_applied_layers=["blocks.1"]), None


def sana_with_perturbed_attention():
    """Called with embeddings, for which three prompts stand here."""
    plain, arguments = tiny.built("SanaPipeline")
    pipe = diffusers.SanaPAGPipeline(**same_weights(plain).components, pag_applied_layers=["blocks.1"])
    names = [name for name in inspect.signature(pipe.__call__).parameters if name in arguments]
    return pipe, {name: arguments[name] for name in names}


PERTURBED = {"sd3": (sd3_with_perturbed_attention, 0.15), "sana": (sana_with_perturbed_attention, 0.9)}


def of_rows(embeddings, rows):
    """Embeddings of some of three prompts, which differ by their scale."""
    scales = torch.tensor([1.0, -0.6, 0.3])[rows]
    return {
        name: value if not isinstance(value, torch.Tensor) else each_scaled(name, value, scales)
        for name, value in embeddings.items()
    }


def each_scaled(name, value, scales):
    value = value.repeat(len(scales), *(1,) * (value.ndim - 1))
    return value * scales.view(-1, *(1,) * (value.ndim - 1)) if name == "prompt_embeds" else value


@pytest.mark.parametrize("seeds", [(0, 1, 2), (5, 5, 5)], ids=["own-seeds", "one-seed"])
@pytest.mark.parametrize("guidance", [4.5, 1.0], ids=["three-parts", "two-parts"])
@pytest.mark.parametrize("name", PERTURBED)
def test_parts_of_perturbed_attention_guidance_stay_together(name, guidance, seeds):
    """Each prompt gets the same result as alone, with unconditional, conditional and perturbed part in one batch."""
    build, target = PERTURBED[name]
    pipe, embeddings = build()
    accelerate_pipeline(pipe, PRESET, **{"schedule.target_error": target}).set_progress_bar_config(disable=True)

    def run(rows):
        asked = {"prompt": [PROMPTS[row] for row in rows], "negative_prompt": [""] * len(rows)}
        if embeddings is not None:
            asked = of_rows(embeddings, rows)
        asked |= {"height": 64, "width": 64, "num_inference_steps": STEPS, "guidance_scale": guidance, "pag_scale": 3.0}
        noise = [torch.Generator().manual_seed(seeds[row]) for row in rows]
        latents = pipe(**asked, generator=noise, output_type="latent", return_dict=False)[0]
        report = pipe.dit_accel.report()
        assert not any("computed together" in note for note in report.notes)
        return latents, torch.tensor(report.density[0])

    together, density = run([0, 1, 2])
    require_as_alone(together, density, [run([row]) for row in range(3)])
    assert density.mean() < 1


@pytest.fixture(scope="module")
def flux():
    return tiny_pipeline("flux")


def test_prompts_share_computed_steps_otherwise(flux):
    """Without the option the batch computes whenever one prompt needs it, so more than the mean of the prompts."""
    with accelerated(flux, PRESET, **{"schedule.per_prompt": False}):
        shared = run(flux, "flux", PROMPTS, generators(3))[2].computed_fraction
    with accelerated(flux, PRESET):
        apart = run(flux, "flux", PROMPTS, generators(3))[2].computed_fraction
    assert apart < shared


def test_pictures_of_one_prompt_go_their_own_ways(flux):
    """num_images_per_prompt: every image is a separate sample."""
    with accelerated(flux, PRESET):
        together, density, _ = run(flux, "flux", PROMPTS[0], generators(2), num_images_per_prompt=2)
        alone = [run(flux, "flux", PROMPTS[0], seed) for seed in generators(2)]
    require_as_alone(together, density, alone)


def test_other_batches_and_aborted_runs_leave_nothing(flux):
    def stop(pipe, step, timestep, tensors):
        if step == STEPS // 2:
            raise KeyboardInterrupt
        return tensors

    with accelerated(flux, PRESET):
        fresh = run(flux, "flux", PROMPTS[:2], generators(2))[0]
        run(flux, "flux", PROMPTS, generators(3))
        assert torch.equal(run(flux, "flux", PROMPTS[:2], generators(2))[0], fresh)
        with pytest.raises(KeyboardInterrupt):
            run(flux, "flux", PROMPTS[::-1][:2], generators(2), callback_on_step_end=stop)
        assert torch.equal(run(flux, "flux", PROMPTS[:2], generators(2))[0], fresh)


def test_a_call_that_cannot_be_divided_computes_together(flux, monkeypatch):
    """If an argument's content is unknown, the batch's worst error decides, and the report says why."""
    monkeypatch.setattr(samples, "BATCHED", samples.BATCHED - {"pooled_projections"})
    with accelerated(flux, PRESET):
        _, density, report = run(flux, "flux", PROMPTS[:2], generators(2))
    assert set(density.tolist()) == {0.0, 1.0} and report.of_prompt(1) is report
    assert len(report.notes) == 1 and report.notes[0].startswith("prompts of a batch computed together")


def test_rows_of_a_prompt():
    """Every sample is a prompt, and every pair if both guidance branches are in one batch."""
    latents = torch.randn(4, 2, 3)
    doubled = latents[:2].repeat(2, 1, 1)
    assert prompt_rows("cond", latents) == prompt_rows(None, latents) == [(0,), (1,), (2,), (3,)]
    assert prompt_rows("cond_uncond", doubled) == prompt_rows(None, doubled) == [(0, 2), (1, 3)]
    assert prompt_rows("cond", doubled) == [(0,), (1,), (2,), (3,)]  # two prompts from the same two seeds
    assert prompt_rows("cond", latents[:1]) == prompt_rows("cond_uncond", doubled[::2]) == [None]
    assert prompt_rows("cond_uncond", latents[:3]) == [(0,), (1,), (2,)]  # without guidance, whatever the name
    thrice, same = latents[:2].repeat(3, 1, 1), latents[:1].repeat(6, 1, 1)
    assert prompt_rows(None, thrice) == prompt_rows(None, thrice, 3) == [(0, 2, 4), (1, 3, 5)]
    assert prompt_rows("cond_uncond", same) == prompt_rows(None, same, 2) == [(0, 3), (1, 4), (2, 5)]
    assert prompt_rows(None, same, 3) == [(0, 2, 4), (1, 3, 5)]
    assert prompt_rows(None, same) == prompt_rows(None, latents, 3) == [None]  # no information, so all together


def test_arguments_of_rows():
    """Nested tensors with an entry a sample are divided; ids, one entry for all and plain values are not."""
    arguments = {
        "hidden_states": torch.arange(3.0)[:, None],
        "timestep": torch.tensor(5.0),
        "img_ids": torch.zeros(3, 3),  # as many tokens as samples
        "position_ids": torch.zeros(3, 3),
        "controlnet_block_samples": [torch.arange(3.0), torch.zeros(1, 2)],
        "joint_attention_kwargs": {"scale": 0.5, "ip_adapter_image_embeds": (torch.arange(3.0),)},
        "guidance": None,
        "img_shapes": [[(1, 2, 2)], [(1, 3, 3)], [(1, 4, 4)]],
    }
    assert why_not_divisible(arguments) is None
    part = arguments_of_rows(arguments, (2, 0))
    assert part["hidden_states"].tolist() == [[2.0], [0.0]]
    assert part["controlnet_block_samples"][0].tolist() == [2.0, 0.0]
    assert part["joint_attention_kwargs"]["ip_adapter_image_embeds"][0].tolist() == [2.0, 0.0]
    assert part["img_shapes"] == [[(1, 4, 4)], [(1, 2, 2)]]
    assert arguments_of_rows({**arguments, "img_shapes": [[(1, 2, 2)]]}, (2, 0))["img_shapes"] == [[(1, 2, 2)]]
    assert all(part[name] is arguments[name] for name in ("timestep", "img_ids", "position_ids", "guidance"))
    assert part["controlnet_block_samples"][1] is arguments["controlnet_block_samples"][1]


@pytest.mark.parametrize(
    "argument, complaint",
    [
        ({"new_condition": torch.zeros(3, 2)}, "argument new_condition"),
        ({"new_sizes": [[(1, 2, 2)]] * 3}, "argument new_sizes"),
        ({"img_shapes": [[(1, 2, 2)]] * 2}, "argument img_shapes has 2 entries in a batch of 3"),
        ({"guidance": torch.zeros(2)}, r"shape \[2\] in a batch of 3"),
    ],
    ids=["unknown-tensor", "unknown-list", "another-list", "another-batch"],
)
def test_arguments_that_cannot_be_divided(argument, complaint):
    """An argument that may not have one entry per sample keeps the batch together."""
    assert re.search(complaint, why_not_divisible({"hidden_states": torch.zeros(3, 1), **argument}))


def test_rows_taken_and_joined_are_the_batch():
    batch, rows = torch.randn(5, 2), [(4, 1), (0,), (3, 2)]
    assert torch.equal(join_rows([take_rows(batch, each) for each in rows], rows), batch)


def test_prompts_of_unequal_length_keep_their_padding_where_tiles_are_left_out():
    """Rows that compute separately use the lengths of their own prompts."""
    tiles = {"policy": "sparge", "steps": "all", "top_k": 1.0}
    preset = load_preset(PRESET, model="qwen_image", skip=tiles, **{"schedule.target_error": 0.2})
    pipe = accelerate_pipeline(tiny_pipeline("qwen-image"), preset)
    together, density, report = run(pipe, "qwen-image", PROMPTS, generators(3))
    alone = [run(pipe, "qwen-image", prompt, seed) for prompt, seed in zip(PROMPTS, generators(3), strict=True)]
    require_as_alone(together, density, alone)
    assert len({tuple(step.mode for step in report.of_prompt(place).steps) for place in range(3)}) > 1
    assert report.fallbacks == []
