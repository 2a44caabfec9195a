"""Storage forms of caches, their expected memory, and their adaptation to a budget."""

import pytest
import torch

from dit_accel import accelerate_pipeline, accelerated, load_preset, restore_pipeline
from dit_accel.errors import MemoryBudgetError
from dit_accel.kernels.layout import TokenLayout
from dit_accel.loop.accounts import Accounts
from dit_accel.loop.branch import BranchState, Call
from dit_accel.loop.forecast import History
from dit_accel.loop.memory import GIB, MemoryPlan, ModelSize, SiteSize, estimate, plan_memory
from dit_accel.loop.report import RunReport
from dit_accel.loop.storage import PLAIN, Storage, StoredHistory
from dit_accel.loop.timing import stopwatch
from dit_accel.loop.tracker import StepMode, Tick
from dit_accel.models.families.family import Family
from dit_accel.models.transformer import TransformerDriver
from tests.levels import HEADS, LAYERS
from tests.tiny import tiny_inputs, tiny_output, tiny_pipeline

STEPS = 7
TEXT = 37
OUTPUT = load_preset("exact", schedule={"warmup": 2, "interval": 3})
CLOSED_LOOP = load_preset("balanced", schedule={"warmup": 2, "target_error": 0.5})
ADAPTIVE = {"schedule": {"control": "adaptive", "warmup": 2, "target_error": 0.5}}  # measures outputs at every level
GUIDED = {"negative_prompt": "blurred", "true_cfg_scale": 3.0}
ROWS = "no attention history of text blocks"
FLOAT8 = "float8 histories"
OFFLOAD = "attention history in host memory"


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline("flux")


def run(pipe, preset, **arguments):
    """One accelerated call: its latents and its report; the pipeline is plain again afterwards."""
    with accelerated(pipe, preset):
        return pipe(**tiny_inputs("flux", steps=STEPS, **arguments))[0], pipe.dit_accel.report()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def held(kept) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in (*kept.tensors(), *kept.host_tensors()))


# Forms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 5, 3, 32), (1, 300, 128), (7,)], ids=str)
def test_float8_rounds_to_a_sixteenth_of_each_value(dtype, shape):
    """However different the magnitudes of lines are, a value moves by half a step of e4m3, in scaled units."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values *= 10.0 ** torch.linspace(-3, 3, values.numel()).view(shape)
    values = values.to(dtype)
    kept = Storage(float8=True).keep(values)
    restored = kept.read()
    assert (restored.shape, restored.dtype) == (values.shape, dtype)
    lines = -(-values.numel() // 128)
    assert held(kept) == lines * (128 + 4)
    assert Storage(float8=True).bytes(values.numel(), values.element_size()) == values.numel() + 4 * lines
    for start in range(0, values.numel(), 128):
        line = values.flatten()[start : start + 128].double()
        moved = (restored.flatten()[start : start + 128].double() - line).abs()
        subnormal, finest = line.abs().max() / 448 * 2.0**-10, torch.finfo(dtype)
        rounding = line.abs() * (2.0**-4 + 2 * finest.eps) + finest.smallest_normal * finest.eps
        assert (moved <= torch.maximum(rounding, subnormal)).all()


def test_float8_error_is_that_of_its_mantissa():
    """Random features come back with 2.6% of error (rms), and zeros as zeros."""
    values = torch.randn(64, 3072, generator=torch.Generator().manual_seed(0))
    assert distance(Storage(float8=True).keep(values).read(), values) == pytest.approx(0.026, abs=0.001)
    assert not Storage(float8=True).keep(torch.zeros(3, 100)).read().any()


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("float8", [False, True], ids=["plain", "float8"])
def test_rows_left_out_take_no_memory(float8, offload):
    values = torch.randn(2, 10, 4, 32, generator=torch.Generator().manual_seed(0))
    kept = Storage(float8, offload, rows=(3, 9)).keep(values)
    restored = kept.read()
    assert restored.shape == values.shape
    assert torch.equal(restored[:, 3:9], Storage(float8).keep(values[:, 3:9]).read())
    assert held(kept) == Storage(float8).bytes(2 * 6 * 4 * 32, 4)
    assert bool(kept.host_tensors()) == offload and bool(kept.tensors()) != offload


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("float8", [False, True], ids=["plain", "float8"])
def test_copies_beside_the_computation_arrive_whole(float8):
    """Data copied from the device comes back unchanged, although its memory was reused and its stream was busy."""
    values = [torch.randn(1, 4096, 24, 128, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    expected = [Storage(float8).keep(value).read() for value in values]
    kept = []
    for value in values:
        torch.cuda._sleep(10_000_000)
        kept.append(Storage(float8, offload=True).keep(value.clone()))
        torch.full_like(value, torch.nan)  # takes the clone's memory as soon as it is free
    assert all(tensor.is_pinned() for each in kept for tensor in each.host_tensors())
    for index, each in enumerate(kept):
        if index + 1 < len(kept):
            kept[index + 1].fetch()
        torch.full_like(values[0], torch.nan)
        assert torch.equal(each.read(), expected[index])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offload_holds_few_layers_at_a_time():
    """The host requests all layers at once, but the device never holds more than a few of them."""
    layers, size = 24, 32 * 2**20
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, kept = torch.cuda.memory_allocated(), []
    for _ in range(layers):
        torch.cuda._sleep(10_000_000)
        kept.append(Storage(offload=True).keep(torch.zeros(1, size, device="cuda", dtype=torch.uint8)))
    for index, each in enumerate(kept):
        if index + 1 < layers:
            kept[index + 1].fetch()
        torch.cuda._sleep(10_000_000)
        each.read()
    assert torch.cuda.max_memory_allocated() - before <= 3 * size


def test_history_goes_on_in_another_form():
    history = StoredHistory(3)
    values = [torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    for i in range(3):
        history.record(float(i), (values[i], -values[i]))
    history.adopt(2, Storage(float8=True))
    assert history.coordinates == (2.0, 1.0)
    history.record(3.0, (values[3], -values[3]))
    assert history.coordinates == (3.0, 2.0)
    for (restored, negative), value in zip(history.values, (values[3], values[2]), strict=True):
        assert torch.equal(restored, Storage(float8=True).keep(value).read()) and torch.equal(negative, -restored)
    history.adopt(0, PLAIN)
    history.record(4.0, (values[4],))
    assert (len(history), history.tensors()) == (0, [])


class Recorded:
    """A loop, or the records of a block, that counts its calls."""

    order = 2.0

    def __init__(self):
        self.calls = []

    def adopt(self, *plan):
        self.calls.append("adopt")

    def fetch(self):
        self.calls.append("fetch")


def test_a_branch_changes_all_its_records_and_fetches_the_next():
    """A plan of less memory holds for the loops of all prompts and for all blocks, once."""
    loops, blocks = [Recorded(), Recorded()], {name: Recorded() for name in ("first", "second", "third")}
    branch = BranchState("cond", (), ModelSize(), MemoryPlan(2), loops, sites=blocks)
    for _ in range(2):
        branch.adopt(MemoryPlan(1))
    assert [each.calls for each in (*loops, *blocks.values())] == [["adopt"]] * 5
    fetched = []
    for name in (None, "first", "second", "third"):
        for each in blocks.values():
            each.calls.clear()
        branch.fetch_after(name)
        fetched.append([other for other, each in blocks.items() if each.calls])
    assert fetched == [["first"], ["second"], ["third"], []]


# In a pipeline


@pytest.mark.parametrize(
    "preset, overrides, arguments",
    [
        pytest.param(OUTPUT, {}, {}, id="output"),
        pytest.param(CLOSED_LOOP, {}, GUIDED, id="output-closed-loop-two-branches"),
        pytest.param(LAYERS, {}, {}, id="layer"),
        pytest.param(LAYERS, {"memory.history_dtype": "float8"}, {"prompt": ["a", "b"]}, id="layer-float8-batch"),
        pytest.param(LAYERS, ADAPTIVE, GUIDED, id="layer-closed-loop-two-branches"),
        pytest.param(HEADS, ADAPTIVE, {}, id="head-closed-loop"),
        pytest.param(HEADS, {}, {}, id="head"),
        pytest.param(HEADS, {"forecast.order": 0}, {}, id="head-reuse"),
        pytest.param(HEADS, {"forecast.order": 2, "skip.policy": "none"}, {}, id="head-second-order-no-tiles"),
        pytest.param(HEADS, {"reuse.degrade_below": 0.5}, {}, id="head-degrading"),
        pytest.param(HEADS, {"memory.history_dtype": "float8"}, {"prompt": ["a", "b"]}, id="head-float8-batch"),
        pytest.param(HEADS, {"memory.offload": True}, GUIDED, id="head-offload-two-branches"),
        pytest.param(
            HEADS, {"memory": {"history_dtype": "float8", "offload": True, "budget_gib": 1.0}}, {}, id="head-all"
        ),
    ],
)
def test_estimate_is_what_the_caches_take(pipe, preset, overrides, arguments):
    """The estimate from sizes before the first block runs equals the tensors' final memory.

    It is exact to the byte, except that float8 pads each tensor to 128 values.
    """
    _, report = run(pipe, load_preset(preset, **overrides), **arguments)
    assert report.steps_by_mode.keys() >= {"dispatch"} and report.fallbacks == []
    slack = 5e-3 if FLOAT8 in report.memory_measures else 0.0
    assert report.estimated_bytes == pytest.approx(report.cache_bytes, rel=slack, abs=0)


WIDER = ("flux-fill", "flux-control", "flux-kontext", "wan-i2v", "hunyuan-i2v-concat", "sd3")  # inputs than outputs


@pytest.mark.parametrize(
    "name, preset",
    [
        *(
            (name, load_preset(preset, model=model))
            for name, model in (("wan22", "wan"), ("hunyuan", "hunyuan_video"))
            for preset in (OUTPUT, LAYERS, HEADS)
        ),
        *((name, OUTPUT) for name in WIDER),
    ],
)
def test_estimate_of_a_pipeline_is_exact(name, preset):
    """Of Wan 2.2's two transformers one keeps outputs at a time; a given image may come with the latents."""
    with accelerated(tiny_pipeline(name), preset) as pipe:
        tiny_output(pipe, name, steps=STEPS)
        report = pipe.dit_accel.report()
    assert report.steps_by_mode["dispatch"] > 0 and report.fallbacks == []
    assert report.cache_bytes == report.estimated_bytes > 0


def test_outputs_of_an_unknown_model_are_expected_as_large_as_all_latents():
    """A second output, such as audio, is recorded too."""
    arguments = {"hidden_states": torch.zeros(2, 3), "audio_hidden_states": torch.zeros(5), "timestep": torch.ones(1)}
    assert TransformerDriver.size(None, arguments) == ModelSize(output=11, itemsize=4)


def test_estimate_knows_the_models_dtype():
    """A pipeline in bfloat16 remembers half as much, and the estimate says so."""
    _, report = run(tiny_pipeline("flux").to(torch.bfloat16), LAYERS)
    _, full = run(tiny_pipeline("flux"), LAYERS)
    assert report.cache_bytes == report.estimated_bytes == full.cache_bytes / 2


@pytest.mark.parametrize("arguments", [{}, GUIDED], ids=["one-branch", "two-branches"])
def test_offload_changes_no_bit(pipe, arguments):
    """Attention outputs move from the device's account to the host's, and the image stays the same."""
    plain, before = run(pipe, HEADS, **arguments)
    offloaded, after = run(pipe, load_preset(HEADS, **{"memory.offload": True}), **arguments)
    assert torch.equal(plain, offloaded) and after.memory_measures == [OFFLOAD]
    assert after.host_bytes == before.cache_bytes - after.cache_bytes > 0 and before.host_bytes == 0


@pytest.mark.parametrize("preset, bound", [(LAYERS, 0.65), (HEADS, 0.35)], ids=["layer", "head"])
def test_float8_histories_err_less_than_forecasts(pipe, preset, bound):
    """Rounding cached values changes the result less than forecasting does, and takes less than half the memory."""
    plain = pipe(**tiny_inputs("flux", steps=STEPS))[0]
    exact, before = run(pipe, preset)
    rounded, after = run(pipe, load_preset(preset, **{"memory.history_dtype": "float8"}))
    assert 0 < distance(rounded, exact) < bound * distance(exact, plain)
    assert after.memory_measures == [FLOAT8] and after.cache_bytes < before.cache_bytes / 2


def test_rows_of_text_blocks_are_never_read(pipe):
    """A budget just below the plain histories' memory skips those rows, and the image stays the same."""
    plain, before = run(pipe, HEADS)
    trimmed, after = run(pipe, load_preset(HEADS, **{"memory.budget_gib": (before.cache_bytes - 1) / GIB}))
    assert torch.equal(plain, trimmed) and after.memory_measures == [ROWS]
    assert after.cache_bytes == after.estimated_bytes < before.cache_bytes


def test_later_branch_converts_what_is_there(pipe):
    """If only the second branch breaks the budget, the first one's records are rounded then."""
    _, single = run(pipe, HEADS)
    late, report = run(pipe, load_preset(HEADS, **{"memory.budget_gib": 1.3 * single.cache_bytes / GIB}), **GUIDED)
    assert report.memory_measures == [ROWS, FLOAT8] and report.cache_bytes < 1.3 * single.cache_bytes
    early, _ = run(pipe, load_preset(HEADS, **{"memory.history_dtype": "float8"}), **GUIDED)
    assert distance(late, early) < 1e-6


@pytest.mark.parametrize("level", ["output", "layer", "head"])
def test_lower_order_is_that_of_the_preset(pipe, level):
    preset = {"output": OUTPUT, "layer": LAYERS, "head": HEADS}[level]
    forms = {} if level == "output" else {"memory.history_dtype": "float8"}
    expected, report = run(pipe, load_preset(preset, **{"forecast.order": 0}, **forms))
    forced, after = run(pipe, load_preset(preset, **{"memory.budget_gib": report.cache_bytes / GIB}))
    assert torch.equal(forced, expected) and after.memory_measures[-1] == "order 0 instead of 1"
    assert after.cache_bytes == report.cache_bytes


def test_over_budget_is_refused_before_blocks_run(pipe):
    """The error comes before the first block does, with numbers and ways out, and leaves nothing behind."""
    plain = pipe(**tiny_inputs("flux", steps=STEPS))[0]
    calls = []
    watch = pipe.transformer.transformer_blocks[0].norm1.register_forward_hook(lambda *_: calls.append(1))
    accelerate_pipeline(pipe, HEADS, **{"memory.budget_gib": 1e-6})
    try:
        with pytest.raises(MemoryBudgetError) as caught:
            pipe(**tiny_inputs("flux", steps=STEPS))
        assert calls == []
        expected, _ = run(pipe, HEADS)  # another preset in its place, at once
        assert torch.equal(expected, run(pipe, HEADS)[0])
    finally:
        watch.remove()
        restore_pipeline(pipe)
    message = str(caught.value)
    for words in ("budget_gib is 1e-06", "1 branch need", "no measures", ROWS, FLOAT8, OFFLOAD, "order 0"):
        assert words in message
    for way_out in ("Raise the budget", "forecast.level to output", "smaller image"):
        assert way_out in message
    assert torch.equal(pipe(**tiny_inputs("flux", steps=STEPS))[0], plain)


def test_caches_beyond_the_budget_are_noted(pipe, monkeypatch):
    """If memory exceeds the expectation and the budget, the report says so, once."""
    monkeypatch.setattr(Family, "size", lambda *_: ModelSize())
    _, report = run(pipe, load_preset(OUTPUT, **{"memory.budget_gib": 1e-6}))
    assert report.notes == ["caches took more memory than estimated, and more than memory.budget_gib"]


@pytest.mark.parametrize("below, noted", [(0, False), (1, True)], ids=["equal", "beyond"])
def test_caches_may_fill_the_budget(below, noted):
    tensor = torch.zeros(2**10, dtype=torch.float32)
    report = RunReport("preset", "any", ["block"], density=[[]])
    accounts = Accounts(report, (tensor.nbytes - below) / GIB)
    accounts.start_step(tick := Tick(object(), 0, 1, [900.0], [0.9]))
    branch = BranchState("cond", (), ModelSize(), MemoryPlan(0), [History(1)])
    branch.loops[0].record(0.0, (tensor,))
    call = Call("transformer", StepMode.UPDATE, (StepMode.UPDATE,), tick, None, branch, True, report, stopwatch())
    accounts.take_call(call, [branch])
    assert bool(report.notes) is noted and report.cache_bytes == tensor.nbytes


# Without a model


def video(tokens: int, text: int, layers: int, heads: int) -> ModelSize:
    """A video transformer in bfloat16 with heads of 128, whose blocks all see text and video as one sequence."""
    layout = TokenLayout(text, tokens, text_first=False)
    site = SiteSize(stream=layout.tokens, features=2 * layout.tokens)
    return ModelSize(4 * tokens, 2, 1, layout, heads, 128 * heads, (site,) * layers)


HUNYUAN_33K = video(32_760, 256, 60, 24)
HUNYUAN_118K = video(118_800, 256, 60, 24)
WAN_14B_76K = video(75_600, 0, 40, 40)


@pytest.mark.parametrize(
    "size, gib",
    [(HUNYUAN_33K, 11.35), (HUNYUAN_118K, 40.9), (WAN_14B_76K, 28.84)],
    ids=["hunyuan-33k", "hunyuan-118k", "wan-14b-76k"],
)
def test_one_attention_output_of_all_layers(size, gib):
    """At order 1 the history is one bfloat16 output a layer, the cached biases two."""
    preset = load_preset("flux-flashomni-paper", **{"skip.policy": "none"})
    on_device, on_host = estimate(preset, MemoryPlan(1, offload=True), size)
    assert on_host / GIB == pytest.approx(gib, rel=2e-3)
    assert on_device / GIB == pytest.approx(2 * gib, rel=5e-3)  # and some symbols
    assert sum(estimate(preset, MemoryPlan(1), size)) == on_device + on_host


def test_measures_come_in_order_as_the_budget_shrinks():
    """Every budget is met by the first measures that suffice, from leaving rows out to lower orders."""
    preset = load_preset("flux-flashomni-paper", **{"forecast.order": 2})
    branches, seen = [HUNYUAN_33K] * 2, []
    for budget in range(120, 0, -1):
        try:
            plan = plan_memory(load_preset(preset, **{"memory.budget_gib": budget}), branches)
        except MemoryBudgetError:
            break
        assert plan.device_bytes <= budget * GIB
        if not seen or plan.measures != seen[-1]:
            seen.append(plan.measures)
    all_three = (ROWS, FLOAT8, OFFLOAD)
    assert seen == [
        (),
        (ROWS,),
        (ROWS, FLOAT8),
        all_three,
        (*all_three, "order 1 instead of 2"),
        (FLOAT8, "order 0 instead of 2"),  # without attention history the other two save nothing
    ]


def test_measures_that_save_nothing_are_not_taken():
    """Wan's sequence has no text, so skipping text rows is no measure."""
    plans = [
        plan_memory(load_preset("flux-flashomni-paper", **{"memory.budget_gib": budget}), [WAN_14B_76K]).measures
        for budget in (80.0, 40.0, 20.0)
    ]
    assert plans == [(FLOAT8,), (FLOAT8, OFFLOAD), (FLOAT8, "order 0 instead of 1")]


def test_no_budget_means_no_measures():
    assert plan_memory(load_preset("flux-flashomni-paper"), [HUNYUAN_118K] * 2).measures == ()
    asked = plan_memory(load_preset("flux-flashomni-paper", **{"memory.offload": True}), [HUNYUAN_118K] * 2)
    assert asked.measures == (OFFLOAD,) and asked.host_bytes > 0
