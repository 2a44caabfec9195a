"""Choice of the next computed step from the measured errors."""

import math

import pytest
import torch

from dit_accel.loop.closed_loop import WIDENING, ClosedLoop, Course, Gap
from dit_accel.loop.forecast import best_share, newton_weights, relative_error
from dit_accel.loop.interval import IntervalGap
from dit_accel.loop.tracker import StepMode
from dit_accel.presets import Preset, load_preset
from tests.pairs import every_pair

LETTERS = {StepMode.FULL: "F", StepMode.UPDATE: "U", StepMode.DISPATCH: "D"}


def modes(control: Gap) -> str:
    return "".join(LETTERS[control.mode(step)] for step in range(len(control.course.coordinates)))


def closed_loop(coordinates=range(40), weights=None, bends=None, **keys) -> Gap:
    """Without weights the errors of all steps count equally, and without bends all outputs curve equally."""
    schedule = {"control": "adaptive", "target_error": 0.05, "warmup": 0, "cooldown": 0, **keys}
    course = Course(coordinates, weights or [1.0] * len(coordinates), bends=bends)
    return Gap(Preset.model_validate({"schedule": schedule}), course)


def interval_after(control: Gap, step: int) -> int:
    """Steps from ``step`` to the next one that computes, or to the end of the run."""
    steps = len(control.course.coordinates)
    computing = (n for n in range(1, steps - step) if control.mode(step + n) is not StepMode.DISPATCH)
    return next(computing, steps - step)


def test_closed_loop_computes_until_it_has_observed():
    """Without a measured error every step computes, in full during the warm-up and at the end."""
    assert modes(closed_loop(range(8), warmup=3, cooldown=2)) == "FFFUUUFF"


def test_guided_damping_begins_once_a_step_has_two_branches():
    """It begins with the step after, alike for all branches; one branch in several steps is no guidance."""
    control = Gap(load_preset("balanced"), Course(range(8), [1.0] * 8))
    for step, branch in ((0, "first"), (1, "first"), (1, "second")):
        control.mode(step, branch)
        assert not control.damps
    control.mode(2, "first")
    assert control.damps
    assert Gap(load_preset("video-balanced"), Course(range(8), [1.0] * 8)).damps


def test_after_an_output_without_a_forecast_the_next_step_computes():
    """The change of the output to the next step is not measured yet, neither at the start nor after dropped records."""
    control = closed_loop()
    for step in (0, 5):
        assert control.observe(step, (), 0, math.inf) == step + 1


@pytest.mark.parametrize("latest", [1, 2, 5])
def test_an_interval_is_not_much_longer_than_the_one_before(latest):
    """Even a perfect forecast says little about steps that are many times farther away."""
    control = closed_loop(max_interval=12)
    control.observe(10, [10 - latest, 0], 0, 0.0)
    assert interval_after(control, 10) == min(WIDENING * latest, 12)


@every_pair(error=(1.0, 0.051, 0.021, 0.0051, 0.0006, 1e-6), gap=(1, 3), order=(0, 1, 2))
def test_closed_loop_follows_its_formula_at_even_spacing(error, gap, order):
    """The next UPDATE comes after the largest n <= max_interval with ``Σ_(i<n) e · C(i / g + D, D + 1) <= target``.

    With nodes g apart the remainder d · (d + g) · … · (d + D g) is that binomial coefficient of real d / g, but for
    factors that the error has too.
    """
    control = closed_loop(target_error=0.05, max_interval=12)
    control.observe(15, [15 - gap * (k + 1) for k in range(3)], order, error)

    def forecast_error(distance: int) -> float:
        return error * math.prod(distance / gap + k for k in range(order + 1)) / math.factorial(order + 1)

    together = [sum(map(forecast_error, range(n))) for n in range(1, 13)]
    farthest = max(n for n, error in enumerate(together, 1) if error <= 0.05)
    assert interval_after(control, 15) == min(farthest, WIDENING * gap)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_closed_loop_knows_the_errors_of_polynomials(order):
    """For polynomials one degree higher, on any spacing, the expected error of the farthest forecast is exact."""
    steps, recorded, here = [0.0, 1.0, 4.0, 5.0, 5.5, 7.0, 10.0, 11.0, 15.0, 16.0], [2, 1, 0], 4
    output = [t ** (order + 1) + 1.0 for t in steps]

    def error(at: int, nodes: list[int]) -> float:
        weights = newton_weights([steps[node] for node in nodes], steps[at])
        return abs(output[at] - sum(weight * output[node] for weight, node in zip(weights, nodes, strict=True)))

    measured = error(here, recorded[: order + 1])
    following = error(here + 3, [here, *recorded][: order + 1])
    for target, interval in ((0.999 * following, 3), (1.001 * following, 4)):
        control = closed_loop(steps, [float(step >= here + 3) for step in range(len(steps))], target_error=target)
        control.observe(here, [steps[node] for node in recorded], order, measured)
        assert interval_after(control, here) == interval


@pytest.mark.parametrize(
    "error, interval",
    [(math.nan, 1), (math.inf, 1), (1.0, 1), (0.0, 3), (0.05, 2)],
    ids=["nan", "infinite", "large", "zero", "on-target"],
)
def test_closed_loop_at_extreme_errors(error, interval):
    """After NaN the next step is computed; a perfect forecast reaches max_interval; an error at the target passes.

    Each UPDATE decides afresh, and without a distance to compare the next step is computed.
    """
    control = closed_loop(target_error=0.05, max_interval=3)
    control.observe(5, [4, 3], 1, error)
    assert interval_after(control, 5) == interval
    control.observe(5 + interval, [5, 4], 1, 0.0)
    assert interval_after(control, 5 + interval) == 3
    constant = closed_loop([3.0, 2.0, 2.0, 1.0])
    constant.observe(2, [2.0, 3.0], 1, error)
    assert interval_after(constant, 2) == 1


@pytest.mark.parametrize("errors", [(0.0, 0.012), (0.012, 0.0), (0.012, 0.0, 0.001)], ids=str)
def test_worst_error_of_a_step_decides(errors):
    control = closed_loop(target_error=0.05)
    for branch, error in enumerate(errors):
        control.observe(5, [4, 3], 1, error, outputs=branch)
    assert interval_after(control, 5) == 3  # 0.012, 0.036, 0.072, … one, two, three steps away, added up


@pytest.mark.parametrize("direction", [1, -1], ids=["ascending", "descending"])
def test_closed_loop_measures_distance_on_the_coordinate(direction):
    # From step 3 the others lie at distances 2, 4, 5, 14, 15 and 16. With e = 0.01 over a gap g at order 0 those of
    # forecasts may add up to 5 g: 2.25, 6.25, 11.25 or all. The step behind the last one in reach computes.
    for gap, interval in ((0.45, 2), (1.25, 3), (2.25, 4), (90.0, 7)):
        coordinates = [direction * x for x in (3.0 - gap, -100.0, -99.0, 3.0, 5.0, 7.0, 8.0, 17.0, 18.0, 19.0)]
        control = closed_loop(coordinates, target_error=0.05)
        control.observe(3, coordinates[:1], 0, 0.01)
        assert interval_after(control, 3) == interval


@pytest.mark.parametrize(
    "errors, order",
    [
        pytest.param({1: 0.04, 2: 0.01}, 2, id="smooth-output"),
        pytest.param({1: 0.012, 2: 0.022, 3: 0.042}, 1, id="rounding-noise"),
        pytest.param({1: 0.05, 2: 0.05}, 2, id="as-far-takes-the-higher"),
        pytest.param({1: 0.0, 2: 0.0}, 2, id="exact"),
        pytest.param({0: 0.3}, 0, id="one-degree-known"),
        pytest.param({1: math.nan, 2: math.nan}, 2, id="no-numbers"),
    ],
)
def test_closed_loop_goes_on_with_the_order_that_reaches_farthest(errors, order):
    """Reach is (0.05 / e) ** (1 / (D + 1)); within a tenth of the farthest the highest degree wins."""
    assert closed_loop().best_order(errors) == order


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_a_degree_between_two_reaches_as_far_as_the_higher(degree):
    """A forecast that follows half of the highest difference is compared with the whole one by its error alone."""
    for damped, whole in ((0.004, 0.002), (0.002, 0.004), (0.3, 0.2), (0.2, 0.3)):
        chosen = closed_loop().best_order({degree - 0.5: damped, degree: whole})
        assert chosen == (degree if whole < damped else degree - 0.5)


def test_closed_loop_adds_up_what_forecasts_move_the_latents():
    """e = 0.01 over one step at order 0: forecasts are off by 0.01, 0.02, 0.03, …, times the weight of their step."""
    for weight, interval in ((1.0, 2), (0.5, 3), (4.0, 1)):
        control = closed_loop(range(40), [1.0] * 6 + [weight] * 34, target_error=0.025)
        control.observe(5, [4], 0, 0.01)
        assert interval_after(control, 5) == interval


def test_closed_loop_expects_more_where_outputs_bend_more():
    """e = 0.01 over one step at order 0, a remainder that counts twice and from step 8 on four times as much."""
    for bends, interval in (([1.0] * 40, 3), ([2.0] * 40, 3), ([1.0] * 6 + [2.0] * 34, 2), ([1.0] * 7 + [4.0] * 33, 2)):
        control = closed_loop(target_error=0.045, bends=bends)
        control.observe(5, [4], 0, 0.01)
        assert interval_after(control, 5) == interval


@pytest.mark.parametrize("moves", [[1.0] * 8, [1.0] * 8 + [1e-3] * 2, [0.5**step for step in range(8)]])
@pytest.mark.parametrize("error, computed", [(0.0, 8), (0.004, 8), (0.005, 7), (math.nan, 5)])
def test_the_last_step_computes_where_an_error_would_stay(error, computed, moves):
    """Nothing corrects the last gap: of the errors 1, 2 and 3 times e twice as much must be within the target.

    Steps after it whose outputs move the result by a thousandth correct nothing. Moves may shrink step by step.
    """
    coordinates, weights = [0.0, 1.0, 4.0, 4.5, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0][: len(moves)], [1.0] * 8 + moves[8:]
    control = closed_loop(coordinates, target_error=0.05)
    control.course = Course(coordinates, weights, [[0.0] * len(moves), moves])
    assert min(control.observe(4, [4], 0, error), 8) == computed


@pytest.mark.parametrize("changed", [0, 1], ids=["first", "second"])
def test_an_output_of_another_shape_begins_anew(changed):
    """Of several outputs any may change; records of the shape before forecast neither."""
    loop, shapes = ClosedLoop(closed_loop(), 2), [(1, 4), (1, 6)]
    for step in range(3):
        loop.observe(step, tuple(map(torch.ones, shapes)), lambda tensor: tensor)
    shapes[changed] = (1, 8)
    loop.observe(3, tuple(map(torch.ones, shapes)), lambda tensor: tensor)
    assert len(loop.outputs) == 1 and [each.shape for each in loop.forecast(4)] == shapes
    loop.restart()
    assert not loop.forecast_steps and not len(loop.outputs)


def test_the_share_of_the_slope_is_that_of_all_tensors():
    output, newest = [torch.tensor([2.0]), torch.tensor([2.0, 8.0])], [torch.zeros(1), torch.ones(2)]
    linear = [torch.ones(1), torch.tensor([2.0, 3.0])]
    assert float(best_share(output, newest, linear)) == pytest.approx((2 * 1 + 1 * 1 + 7 * 2) / (1 + 1 + 4))


def test_an_error_is_that_of_the_worst_sample():
    """Of two samples of different norms; samples of zeros that are forecast exactly have none."""
    value = torch.tensor([[4.0, 3.0], [0.6, 0.8], [0.0, 0.0]])
    forecast = torch.tensor([[4.0, 2.0], [0.6, 0.5], [0.0, 0.0]])
    assert float(relative_error(value, forecast)) == pytest.approx(0.3)
    assert float(relative_error(value.flip(0), forecast.flip(0))) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "keys, sequence",
    [
        ({"warmup": 2, "interval": 3, "cooldown": 1}, "FFUDDUDDUF"),
        ({"warmup": 0, "interval": 4, "cooldown": 0}, "UDDDUDDDUD"),
        ({"warmup": 3, "interval": 2, "cooldown": 3}, "FFFUDUDFFF"),
        ({"warmup": 2, "interval": 1, "cooldown": 1}, "FFFFFFFFFF"),
        ({"warmup": 8, "interval": 5, "cooldown": 4}, "FFFFFFFFFF"),
        ({"warmup": 20, "interval": 5, "cooldown": 0}, "FFFFFFFFFF"),
    ],
    ids=["paper", "bare", "long-end", "every-step", "overlap", "long-warmup"],
)
def test_interval_repeats_its_interval(keys, sequence):
    """Warm-up, then one UPDATE and interval − 1 DISPATCH steps, then the final steps; interval 1 computes all."""
    preset = Preset.model_validate({"schedule": {"control": "interval", **keys}})
    assert modes(IntervalGap(preset, Course(range(10), [1.0] * 10))) == sequence


@pytest.mark.parametrize(
    "name, computed",
    [
        ("flux-taylorseer", [0, 1, 2, 7, 12, 17, 22, 27, 32, 37, 42, 47]),
        ("hunyuan-taylorseer", range(0, 50, 5)),
        ("wan21-taylorseer", range(0, 50, 5)),
        ("flux-fora", range(0, 50, 5)),
    ],
)
def test_presets_of_papers_compute_the_published_steps(name, computed):
    """The computed steps of 50 are those of TaylorSeer's published code at N = 5."""
    control = IntervalGap(load_preset(name), Course(range(50), [1.0] * 50))
    assert [step for step, letter in enumerate(modes(control)) if letter != "D"] == list(computed)
