"""Methods measured on a tiny pipeline: each runs and leaves nothing behind; a method that does is detected."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers import FlowMatchEulerDiscreteScheduler

from dit_accel.errors import UnsupportedError
from dit_accel.presets import load_preset
from dit_accel.tools.measure.compare import PEERS, Bench, Method, Prompt, our_methods, peer_methods, runs, spread
from dit_accel.tools.measure.compare.report import speedup_of
from dit_accel.tools.measure.metrics import IDENTICAL
from dit_accel.tools.measure.timing import transformer_clock
from scripts.research.pareto import fixed_schedules
from tests.models.tiny import built
from tests.tiny import tiny_inputs, tiny_pipeline

STEPS = 6


def make_bench(
    name: str = "flux", load=None, prompts=("a red fox",), repeats=1, begin=lambda *_: None, plain_steps=3, **changes
) -> Bench:
    call = tiny_inputs(name, **{"steps": STEPS, "height": 32, "width": 32, **changes})
    arguments = {key: value for key, value in call.items() if key not in ("prompt", "generator", "output_type")}
    drawn, tuning = [Prompt(prompt, 0) for prompt in prompts], Prompt("snow", 1)
    return Bench(load or (lambda: tiny_pipeline(name)), arguments, drawn, tuning, begin, repeats, plain_steps)


@pytest.fixture(scope="module")
def bench():
    return make_bench()


@pytest.fixture(scope="module")
def guided_bench():
    return make_bench("wan")


@contextmanager
def nothing(subject):
    yield {}


NOTHING = Method("nothing", "nothing", nothing)


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_runs_and_leaves_nothing_behind(bench, peer):
    """It computes no more than a plain run, and the pipeline need not be loaded again afterwards."""
    methods, left_out = peer_methods(bench.pipe, STEPS, [peer])
    if left_out:
        pytest.skip(left_out[peer])
    assert len(methods) >= 3 and len({method.name for method in methods}) == len(methods)
    pipe, row = bench.pipe, bench.measure(methods[0])
    assert "error" not in row and not row["reloaded"], row
    assert 0 < row["computed_fraction"] <= 1 and row["seconds"] > 0 and row["fraction_from"] == "leaves"
    assert bench.pipe is pipe and isinstance(pipe.scheduler, FlowMatchEulerDiscreteScheduler)


@pytest.mark.parametrize("peer", ["pab", "sea-cache", "mag-cache", "meancache", "dmd"])
def test_a_peer_takes_guidance_in_two_branches(guided_bench, peer):
    """If branches run one after the other, methods with one state keep one state per branch."""
    assert guided_bench.subject.branches == 2
    row = guided_bench.measure(spread(peer_methods(guided_bench.pipe, STEPS, [peer])[0], 1)[0])
    assert "error" not in row and not row["reloaded"], row


def test_the_sound_of_a_video_is_compared_too(monkeypatch):
    """A plain run has the same sound, fewer steps have another, and a sound of NaN is an error."""
    pipe, arguments = built("ltx2")
    arguments = {**arguments, "num_inference_steps": 4, "num_frames": 5}
    bench = Bench(lambda: pipe, arguments, [Prompt(None, 0)], Prompt(None, 1), repeats=1)
    assert len(bench._plain[0]["frames"]) == 5
    row = bench.measure(NOTHING)
    assert (row["si_sdr_db"], row["rms_ratio_db"]) == (IDENTICAL, 0.0)

    @contextmanager
    def shorter(subject):
        yield {"num_inference_steps": 2}

    row = bench.measure(Method("shorter", "shorter", shorter))
    assert row["si_sdr_db"] < 80 and 0 < abs(row["rms_ratio_db"]) < 20
    monkeypatch.setattr(runs, "audio_quality", lambda output, plain: {"si_sdr_db": float("nan")})
    assert "not finite" in bench.measure(NOTHING)["error"]


def test_text_counts_where_the_plain_image_has_some(monkeypatch):
    """Prompts without text are left out of the mean; without any text a row has no value."""
    found = iter([0.5, None, None, None])
    monkeypatch.setattr(runs, "text_kept", lambda: lambda output, plain: next(found))
    bench = make_bench(prompts=("a sign", "a red fox"))
    assert bench.unavailable["text_kept"] is None
    assert bench.measure(NOTHING)["text_kept"] == 0.5 and "text_kept" not in bench.measure(NOTHING)


@pytest.mark.parametrize("factor", [2.0, float("nan")], ids=["other", "nan"])
def test_changed_weights_make_the_pipeline_load_again(factor):
    """Repeated first steps show changes that no attribute shows."""
    loaded = []
    bench = make_bench(load=lambda: loaded.append("flux") or tiny_pipeline("flux"))

    @contextmanager
    def vandal(subject):
        with torch.no_grad():
            subject.pipe.transformer.proj_out.weight.mul_(factor)
        yield {}

    assert bench.measure(Method("vandal", "vandal", vandal))["reloaded"]
    assert len(loaded) == 2
    row = bench.measure(NOTHING)
    assert (row["computed_fraction"], row["psnr_db"], row["reloaded"]) == (1.0, IDENTICAL, False) and bench.repeatable


def test_a_method_that_fails_is_a_row_with_its_error(bench):
    """An attribute left on a block is named and taken off; plain runs are as before without a reload."""

    @contextmanager
    def failing(subject):
        subject.pipe.transformer.transformer_blocks[0].forward = None
        yield {"height": "tall"}

    row = bench.measure(Method("failing", "failing", failing))
    assert "TypeError" in row["error"] and "psnr_db" not in row
    assert row["left_behind"] == {"forward": 1} and not row["reloaded"]


def test_our_presets_and_a_sweep_of_the_target(bench):
    """Closed-loop presets are ours, fixed schedules on our engine other methods; no counter watches their layers."""
    methods = our_methods(bench.pipe, ["turbo", "flux-flashomni-paper", "flux-taylorseer"], "balanced")
    assert [method.ours for method in methods[:3]] == [True, False, False]
    assert all(method.ours and "target_error=" in method.name for method in methods[3:])
    assert not any(method.ours for method in fixed_schedules(bench.pipe))
    transformer, watched = bench.pipe.transformer, []
    hook = transformer.register_forward_hook(lambda *_: watched.append("forward" in vars(transformer.x_embedder)))
    rows = [bench.measure(method) for method in methods[:2]]
    hook.remove()
    assert [row["fraction_from"] for row in rows] == ["report"] * 2 and watched and not any(watched), rows
    with pytest.raises(UnsupportedError, match="is for wan models"):
        our_methods(bench.pipe, ["wan21-sparge"])


def test_a_digest_tells_what_a_preset_holds(bench):
    """Any value that has an effect changes it, name and description do not; rows carry it."""

    def digest(**changes):
        return our_methods(bench.pipe, [load_preset("balanced", **changes)])[0].digest

    assert digest(description="another") == digest() != digest(**{"schedule.warmup": 7})
    assert len({method.digest for method in our_methods(bench.pipe, [], "balanced")}) > 3
    assert bench.measure(Method("nothing", "nothing", nothing, digest="held"))["digest"] == "held"


@pytest.fixture
def paces(monkeypatch):
    """Seconds of a transformer's call, which a fake clock takes from this list, run by run."""
    paces: list[float] = []

    @contextmanager
    def fake_clock(pipe):
        with transformer_clock(pipe) as clock:
            fake = SimpleNamespace(calls=0, seconds=0.0)
            yield fake
        fake.calls, fake.seconds = clock.calls, clock.calls * paces.pop(0)

    monkeypatch.setattr(runs, "transformer_clock", fake_clock)
    return paces


@pytest.mark.parametrize(
    ("fast", "plain", "prompts"),
    [
        ((0.5, 40.0, 0.5), (1.0, 1.0, 1.0), ("a red fox",)),
        ((0.5, 0.5, 0.5), (1.0, 40.0, 1.0), ("a red fox", "snow", "a boat")),
        ((0.5, 1.0, 2.0), (1.0, 2.0, 4.0), ("a red fox",)),
    ],
    ids=["run-disturbed", "plain-disturbed", "machine-slows-down"],
)
def test_a_speedup_is_of_runs_in_turn(paces, fast, plain, prompts):
    """Plain steps follow each run, which all count, those for quality too; one disturbed time changes no speed-up."""
    begun = []
    paces += [1.0] * 3  # of the plain run and its first steps
    bench = make_bench(prompts=prompts, repeats=3, begin=lambda name, share: begun.append((name, share)))
    paces += [pace for pair in zip(fast, plain, strict=True) for pace in pair]
    begun.clear()
    row = bench.measure(NOTHING)
    assert begun == [("nothing", 1 / 3), ("plain", 0.0)] * 3
    assert row["seconds_each"] == [STEPS * pace for pace in fast] and row["seconds"] == STEPS * sorted(fast)[1]
    assert row["plain_seconds_each"] == [STEPS * pace for pace in plain]
    assert speedup_of(row).median == 2.0


def test_a_run_that_compiles_kernels_is_not_timed(paces, monkeypatch):
    """The first of a setting, as on a GPU; later runs make up for it, and a setting that is warm needs none more."""
    monkeypatch.setattr(Bench, "_is_cold", lambda bench, method: method.name not in bench._warm)
    shares = []
    paces += [1.0] * 3
    bench = make_bench(repeats=2, begin=lambda what, share: shares.append(share))
    paces += [99.0, 1.0, *(0.5, 1.0) * 2]
    shares.clear()
    assert bench.measure(NOTHING)["seconds_each"] == [3.0, 3.0] and shares == [1 / 3, 0.0] * 3
    paces += (0.5, 1.0) * 2
    assert bench.retime(NOTHING)["seconds_each"] == [3.0, 3.0] and not paces


def test_settings_are_spread_over_a_sweep():
    """The first and the last are among them; one is from the middle."""
    sweep = [Method("s", str(i), nothing) for i in range(10)]
    assert [method.name for method in spread(sweep, 4)] == ["0", "3", "6", "9"]
    assert [method.name for method in spread(sweep, 1)] == ["5"]
    assert spread(sweep, None) == spread(sweep, 12) == sweep


def test_a_pipeline_that_moves_weights_is_hooked_anew_by_each_call(pipe):
    """As with offload: new hooks are no changes that a method left, and plain runs are timed whole."""

    def hook():
        remove_hook_from_module(pipe.transformer)
        cpu_offload_with_hook(pipe.transformer, "cpu")

    pipe.maybe_free_model_hooks = hook
    hook()
    bench, calls = make_bench(load=lambda: pipe, plain_steps=None), []
    pipe.transformer.register_forward_hook(lambda *_: calls.append(1))
    row = bench.measure(*our_methods(pipe, ["balanced"]))
    assert row["left_behind"] == {} and not row["reloaded"] and len(calls) == 2 * STEPS, row
