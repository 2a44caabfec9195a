from itertools import pairwise

import pytest
import torch

from dit_accel.loop.trajectory import Trajectory
from tests.pairs import every_pair

STEPS = 12
SIGMAS = [1 - step / STEPS for step in range(STEPS + 1)]
FORMS = {  # latents, and how much of them an output covers
    "tokens": ((2, 96, 16), (2, 96, 16)),
    "image": ((1, 4, 20, 28), (1, 4, 20, 28)),
    "video": ((1, 4, 3, 12, 20), (1, 4, 3, 12, 20)),
    "reference-tokens": ((1, 160, 16), (1, 96, 16)),
    "masks-in-channels": ((1, 9, 20, 28), (1, 4, 20, 28)),
    "variances": ((1, 4, 20, 28), (1, 8, 20, 28)),
}


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def replacements(edit, latents=(2, 96, 16), outputs=(2, 96, 16), dtype=torch.float32, branches=2, order=1):
    """Return the steps at which a run of Euler's steps, or of multistep ones, finds replaced latents.

    ``edit`` changes the moving part of the latents after a step, in place, as some pipelines do.
    """
    trajectory, whole, found, slopes = Trajectory(), drawn(latents, 0).to(dtype), [], []
    moving = tuple(map(slice, map(min, latents, outputs)))
    for step, (sigma, after) in enumerate(pairwise(SIGMAS)):
        if trajectory.is_replaced(step, [whole], 0.5 / max(1 - sigma, 1e-3)):
            found.append(step)
        made = [(drawn(outputs, 1 + b) + step / STEPS * drawn(outputs, 5 + b)).to(dtype) for b in range(branches)]
        for output in made:
            trajectory.leave([output])
        slopes.append(sum(weight * each for weight, each in zip((3.0, -2.0), made, strict=False))[moving].float())
        slope = slopes[-1] if order == 1 or step == 0 else 1.5 * slopes[-1] - 0.5 * slopes[-2]
        whole[moving] = edit(step, after, whole[moving].float() + (after - sigma) * slope).to(dtype)
    return found


def line(sigma, shape, seed=20):
    return (1 - sigma) * drawn(shape, seed) + sigma * drawn(shape, seed + 1)


def pasted(share, steps):
    def edit(step, sigma, latents):
        flat = latents.flatten(1)
        if step in steps:
            flat[:, : round(share * flat.shape[1])] = line(sigma, flat.shape)[:, : round(share * flat.shape[1])]
        return flat.view_as(latents)

    return edit


@every_pair(form=FORMS, dtype=(torch.float32, torch.bfloat16), branches=(1, 2), order=(1, 2))
def test_only_replaced_latents_are_found(form, dtype, branches, order):
    """A scheduler's own steps are no replacement; a tenth of the latents that is replaced once is one."""
    latents, outputs = form
    form = {"latents": latents, "outputs": outputs, "dtype": dtype, "branches": branches, "order": order}
    assert replacements(lambda *at: at[-1], **form) == [] and replacements(pasted(0.1, [6]), **form) == [7]


@pytest.mark.parametrize("step", range(1, STEPS - 1))
def test_each_step_and_each_sample_is_compared(step):
    def edit(at, sigma, latents):
        latents[1, :48] = pasted(1.0, [step])(at, sigma, latents.clone())[1, :48]
        return latents

    assert replacements(pasted(1.0, [step])) == replacements(edit) == [step + 1]


def test_a_call_with_a_part_of_the_batch_counts():
    """As in LTX-2: both parts of guidance are a batch, and a call with perturbed attention gets the latents once."""
    trajectory, latents, found = Trajectory(), drawn((1, 96, 16), 0), []
    for step, (sigma, after) in enumerate(pairwise(SIGMAS)):
        pair, perturbed = drawn((2, 96, 16), 1), drawn((1, 96, 16), 2 + step)
        found.append(trajectory.is_replaced(step, [latents.repeat(2, 1, 1)], 1.0))
        trajectory.leave([pair])
        trajectory.leave([perturbed])
        latents = latents + (after - sigma) * (3 * pair[:1] - 2 * pair[1:] + (5.0 if step == 6 else 0.1) * perturbed)
    assert not any(found)


EDITS = {
    "noise": lambda step, sigma, latents: latents + 0.02 * drawn(latents.shape, 50 + step),
    "blend": lambda step, sigma, latents: latents + 0.1 * (line(sigma, latents.shape) - latents) * (step > 0),
    "clamp": lambda step, sigma, latents: latents.clamp(-4, 4),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_at_every_step_are_no_replacement(edit):
    assert len(replacements(edit)) <= 1  # where they begin


def test_a_paste_at_every_step_is_a_replacement_where_it_begins():
    assert replacements(pasted(0.5, range(5, STEPS))) == [6]


def test_a_second_stream_may_be_replaced():
    trajectory, video, audio = Trajectory(), drawn((1, 32, 8), 0), drawn((1, 16, 8), 1)
    found = []
    for step in range(6):
        audio = drawn((1, 16, 8), 9) if step == 4 else audio
        found.append(trajectory.is_replaced(step, [video, audio], 1.0))
        outputs = drawn((1, 32, 8), 2 + step), drawn((1, 16, 8), 20 + step)
        trajectory.leave(outputs)
        video, audio = video - 0.1 * outputs[0], audio - 0.1 * outputs[1]
    assert found == [False] * 4 + [True, False]


@pytest.mark.parametrize("how", ["step-left-out", "second-call", "no-output", "another-shape", "other-dimensions"])
def test_latents_without_a_step_before_are_not_compared(how):
    trajectory = Trajectory()
    for step in range(4):
        trajectory.is_replaced(step, [drawn((1, 32, 8), 0) - 0.1 * step], 1.0)
        if how != "no-output" or step < 3:
            trajectory.leave([torch.ones(1, 32, 8) if how != "other-dimensions" else torch.ones(1, 256)])
    other = drawn((1, 40 if how == "another-shape" else 32, 8), 1)
    assert not trajectory.is_replaced({"step-left-out": 5, "second-call": 3}.get(how, 4), [other], 1.0)
