"""Several pipelines and threads over one transformer: each run is its own, and one restore serves all of them."""

import copy
import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import diffusers
import pytest
import torch

from dit_accel import accelerate_pipeline, accelerate_transformer, report, restore_pipeline
from dit_accel.errors import UnsupportedError
from dit_accel.models.hooks import find_hook
from tests.levels import CLOSED_LOOP, LAYERS
from tests.models.test_transformer import recorded_calls
from tests.tiny import tiny_output, tiny_pipeline

FAMILIES = ("flux", "sd3", "wan", "qwen-image", "hunyuan")
STEPS = 8


def twin_of(pipe):
    """Another pipeline over the same models with a scheduler and tokenizers of its own, which threads can't share."""
    original = {
        key: copy.deepcopy(part) for key, part in pipe.components.items() if key.startswith(("scheduler", "tokenizer"))
    }
    twin = type(pipe)(**{**pipe.components, **original})
    twin.set_progress_bar_config(disable=True)
    return twin


def in_threads(jobs):
    """Results, or exceptions, of some functions that run in parallel threads."""

    def work(job):
        try:
            return job()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(work, jobs))


def run_of(pipe, name, seed):
    """A run that differs from the others in its noise and its number of steps."""
    return lambda: tiny_output(pipe, name, steps=STEPS + seed, seed=seed)


def equal(some, others):
    return [torch.equal(a, b) for a, b in zip(some, others, strict=True)]


RUNS = [(name, CLOSED_LOOP, 2) for name in FAMILIES] + [("flux", "exact", 2), ("flux", LAYERS, 8)]
every_run = pytest.mark.parametrize(("name", "preset", "count"), RUNS, ids=[*FAMILIES, "exact", "eight-at-level-layer"])


@every_run
def test_threads_get_what_each_gets_alone(name, preset, count):
    """Runs side by side decide and record apart, so that each gives the bits that it gives alone."""
    first = tiny_pipeline(name)
    jobs = [run_of(item, name, seed) for seed, item in enumerate([first, *(twin_of(first) for _ in range(count - 1))])]
    accelerate_pipeline(first, preset)
    alone = [job() for job in jobs]
    assert all(equal(in_threads(jobs), alone))
    if preset == "exact":
        restore_pipeline(first)
        assert all(equal([job() for job in jobs], alone))


@every_run
def test_a_pipeline_called_from_a_callback_is_a_run_of_its_own(name, preset, count):
    """Neither the run in whose callback it runs nor those within change the other's result."""
    pipe = tiny_pipeline(name)
    twin = twin_of(pipe)
    accelerate_pipeline(pipe, preset)
    alone = [tiny_output(item, name, steps=STEPS, seed=seed) for seed, item in enumerate((pipe, twin))]
    inner = []

    def callback(_, step, timestep, tensors):
        if step in range(4, 4 + count // 2):
            inner.append(tiny_output(twin, name, steps=STEPS, seed=1))
        return tensors

    outer = tiny_output(pipe, name, steps=STEPS, seed=0, callback_on_step_end=callback)
    assert torch.equal(outer, alone[0]) and all(torch.equal(item, alone[1]) for item in inner) and inner
    assert len(pipe.dit_accel.report().steps) == STEPS


@torch.no_grad()
def test_loops_in_threads_have_steps_of_their_own(pipe):
    transformer, (arguments, *_) = pipe.transformer, recorded_calls(pipe, "flux")
    timesteps = [1 - step / 20 for step in range(20)]

    @torch.no_grad()
    def loop(scale):
        latents = arguments["hidden_states"] * scale
        for timestep in timesteps:
            changes = {"hidden_states": latents, "timestep": torch.tensor([timestep]), "return_dict": False}
            latents = latents - 0.05 * transformer(**arguments | changes)[0]
        return latents

    accelerate_transformer(transformer, CLOSED_LOOP, timesteps)
    jobs = [lambda scale=scale: loop(scale) for scale in (0.5, 1.0, 2.0)]
    assert all(equal(in_threads(jobs), [job() for job in jobs]))


@pytest.mark.parametrize("accelerated, restored", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_any_of_several_pipelines_restores_all(pipe, accelerated, restored):
    """Whichever pipeline is accelerated or restored, the plain bits are back on both, and nothing is left on either."""
    other = diffusers.FluxImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    pipes = pipe, other

    def outputs():
        return [tiny_output(pipe, "flux", steps=STEPS), tiny_output(other, "flux-img2img", steps=12)]

    plain, left = outputs(), [set(vars(item)) for item in (*pipes, pipe.transformer, pipe.vae)]
    accelerate_pipeline(pipes[accelerated], CLOSED_LOOP)
    assert not any(equal(outputs(), plain))
    restore_pipeline(pipes[restored])
    assert all(equal(outputs(), plain))
    assert [set(vars(item)) for item in (*pipes, pipe.transformer, pipe.vae)] == left


def test_pipelines_that_were_both_accelerated_carry_one_acceleration(pipe):
    """The latest preset applies to both, each has a report of its runs, and one restore removes it from both."""
    twin = twin_of(pipe)
    plain = [run_of(item, "flux", 0)() for item in (pipe, twin)]
    accelerate_pipeline(pipe, "exact")
    accelerate_pipeline(twin, CLOSED_LOOP)
    assert pipe.dit_accel is twin.dit_accel and pipe.dit_accel.preset == CLOSED_LOOP
    assert not any(equal([run_of(item, "flux", 0)() for item in (pipe, twin)], plain))
    restore_pipeline(pipe)
    assert not hasattr(pipe, "dit_accel") and not hasattr(twin, "dit_accel")
    assert all(equal([run_of(item, "flux", 0)() for item in (pipe, twin)], plain))


def test_a_pipeline_made_later_reports_its_own_runs(pipe):
    """It has the acceleration of its transformer, and may replace its preset for both."""
    accelerate_pipeline(pipe, "turbo")
    other = diffusers.FluxImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    tiny_output(pipe, "flux", steps=STEPS)
    tiny_output(other, "flux-img2img", steps=8)
    assert [len(report(item).steps) for item in (pipe, other, pipe.transformer)] == [STEPS, 6, 6]
    accelerate_pipeline(other, CLOSED_LOOP)
    assert pipe.dit_accel is other.dit_accel


def test_sharing_a_part_never_leaves_another_part_plain():
    """A pipeline over one of two transformers runs with both, and can't take it out of their acceleration."""
    both = tiny_pipeline("wan22")
    one = type(both)(**{**both.components, "transformer_2": None})
    one.set_progress_bar_config(disable=True)
    plain = tiny_output(one, "wan", steps=STEPS)
    acceleration = accelerate_pipeline(both, CLOSED_LOOP).dit_accel
    expected = tiny_output(one, "wan", steps=STEPS)
    for refused in (lambda: accelerate_pipeline(one), lambda: accelerate_transformer(one.transformer)):
        with pytest.raises(UnsupportedError, match=r"by a WanPipeline that shares it and also has transformer_2"):
            refused()
    assert both.dit_accel is acceleration and not hasattr(one, "dit_accel")
    assert torch.equal(tiny_output(one, "wan", steps=STEPS), expected) and not torch.equal(expected, plain)
    restore_pipeline(one)
    assert not hasattr(both, "dit_accel") and torch.equal(tiny_output(one, "wan", steps=STEPS), plain)


@pytest.mark.parametrize("first", ["copy", "original"])
def test_a_shallow_copy_is_left_as_the_original_was(pipe, first):
    """Restoring a copy removes everything inherited from an accelerated original, before or after it is restored."""
    plain, left = call(pipe), set(vars(pipe))
    accelerate_pipeline(pipe, CLOSED_LOOP)
    twin = copy.copy(pipe)
    for item in (twin, pipe) if first == "copy" else (pipe, twin):
        restore_pipeline(item)
    assert set(vars(twin)) == set(vars(pipe)) == left
    assert torch.equal(call(twin), plain) and torch.equal(call(pipe), plain)


def call(pipe):
    return tiny_output(pipe, "flux", steps=STEPS)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_pipeline_may_go_while_another_stays(gone):
    """A deleted pipeline is freed, and the other one continues and can be restored."""
    pipes = [tiny_pipeline("flux")]
    pipes.append(twin_of(pipes[0]))
    plain = call(pipes[0])
    accelerate_pipeline(pipes[0], CLOSED_LOOP)
    expected, _ = [call(item) for item in pipes]
    reference = weakref.ref(pipes.pop(gone))
    gc.collect()
    assert reference() is None and torch.equal(call(pipes[0]), expected)
    restore_pipeline(pipes[0])
    assert torch.equal(call(pipes[0]), plain)


def test_a_transformer_outlives_its_pipeline():
    """A call from elsewhere is refused with a solution, the report stays readable, and restoring gives plain calls."""
    pipe, calls = tiny_pipeline("flux"), []
    accelerate_pipeline(pipe, CLOSED_LOOP)
    hook = pipe.transformer.register_forward_pre_hook(lambda *call: calls.append(call[1:]), with_kwargs=True)
    call(pipe)
    hook.remove()
    transformer, acceleration, (args, kwargs) = pipe.transformer, pipe.dit_accel, calls[0]
    del pipe
    gc.collect()
    assert len(acceleration.report().steps) == STEPS
    with torch.no_grad(), pytest.raises(UnsupportedError, match="was deleted"):
        transformer(*args, **kwargs)
    acceleration.restore()
    with torch.no_grad():
        assert transformer(*args, **kwargs)[0].isfinite().all()


CHANGES = {
    "restore": restore_pipeline,
    "restore twin": lambda pipe: restore_pipeline(twin_of(pipe)),
    "own restore": lambda pipe: pipe.dit_accel.restore(),
    "accelerate": lambda pipe: accelerate_pipeline(pipe, "quality"),
    "accelerate twin": lambda pipe: accelerate_pipeline(twin_of(pipe), "exact"),
    "in order": lambda pipe: accelerate_pipeline(restore_pipeline(pipe), "exact"),
    "accelerate transformer": lambda pipe: accelerate_transformer(pipe.transformer),
    "reset": lambda pipe: pipe.dit_accel.reset(),
    "report": lambda pipe: report(twin_of(pipe)),
    "delete": lambda pipe: delattr(pipe, "dit_accel"),
}
PLACES = ("block", "callback", "text_encoder_2", "block", "decoder")


@pytest.mark.parametrize(
    ("change", "place", "thread"),
    [
        *zip(CHANGES, itertools.cycle(PLACES), itertools.repeat("other")),
        ("restore", "callback", "other"),
        *(("restore", place, "own") for place in ("block", "callback")),
        ("accelerate", "block", "own"),
        ("reset", "callback", "own"),
    ],
)
def test_a_run_ends_well_if_a_thread_changes_the_acceleration(change, place, thread):
    """The run's own one, or another, for which it does not wait: the rest of the run is good, the change applies, and
    restoring leaves nothing.
    """
    pipe, calls, errors = tiny_pipeline("flux"), [], []
    plain, left = call(pipe), set(vars(pipe))
    accelerate_pipeline(pipe, LAYERS if change == "restore" else CLOSED_LOOP)

    def changing():
        try:
            CHANGES[change](pipe)
        except Exception as error:
            errors.append(error)

    def interfere(*arguments):
        calls.append(place)
        if len(calls) == (3 if place in ("block", "callback") else 1):
            in_threads([changing]) if thread == "other" else changing()
        return arguments[-1] if place == "callback" else None

    if place == "callback":
        output = tiny_output(pipe, "flux", steps=STEPS, callback_on_step_end=interfere)
    else:
        blocks = pipe.transformer.single_transformer_blocks
        module = {"block": blocks[0].attn, "decoder": pipe.vae.decoder.conv_in}.get(place, pipe.text_encoder_2)
        handle = module.register_forward_pre_hook(interfere)
        output = tiny_output(pipe, "flux", steps=STEPS, output_type="pt" if place == "decoder" else "latent")
        handle.remove()
    assert calls and not errors
    assert place == "decoder" or (output - plain).norm() < 0.1 * plain.norm()
    if "restore" in change:
        assert find_hook(pipe.transformer) is None and set(vars(pipe)) == left
    elif change in ("accelerate", "accelerate twin", "in order"):
        name = "quality" if change == "accelerate" else "exact"
        assert find_hook(pipe.transformer).acceleration.preset.name == name
    restore_pipeline(pipe)
    assert torch.equal(call(pipe), plain) and set(vars(pipe)) == left
