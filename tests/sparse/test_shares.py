"""Shares of tiles that heads take: what each loses, measured on a few rows, and how best to share out their mean."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from dit_accel import accelerated, load_preset
from dit_accel.errors import PresetError
from dit_accel.kernels import attention, lower
from dit_accel.kernels.layout import TokenLayout
from dit_accel.presets import Skip
from dit_accel.sparse import policies
from dit_accel.sparse import site as sparse_site
from dit_accel.sparse.probe import probed_rows
from dit_accel.sparse.shares import SHARES, allotted, errors_of_shares
from tests.tiny import tiny_output, tiny_pipeline


@pytest.mark.parametrize("means", [False, True], ids=["dropped", "means"])
def test_errors_are_those_of_whole_sparse_attention(means):
    """Of each head and share, on the rows measured: as if attention had run whole under the share's tiles."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 700, 3, 16, generator=generator) for _ in range(3))
    q[:, :, 1] *= 4  # a head that looks at few keys
    layout, config = TokenLayout(60, 640, 64), Skip(policy="sparge", top_k=0.5)
    rows = probed_rows(layout, 4, 0)

    def draw(share):
        return policies.draw(q, k, layout, config.model_copy(update={"top_k": share}))

    def attend(symbols):
        return attention(q, k, v, lower(symbols), tile_means=means)

    dense = attention(q, k, v, policies.plan(q, k, Skip(), layout=layout))
    errors = errors_of_shares(dense, draw, attend, rows)
    assert errors.shape == (3, len(SHARES))
    measured = torch.zeros(700, dtype=torch.bool)
    for row in rows:
        measured[row] = True
    for place, share in enumerate(SHARES):
        missed = (attend(draw(share)) - dense)[:, measured].square().sum((1, 3))
        expected = (missed / dense[:, measured].square().sum((1, 2, 3))[:, None]).mean(0)
        torch.testing.assert_close(errors[:, place], expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("mean", [0.1, 0.3, 0.5, 0.9])
def test_heads_share_tiles_so_that_least_is_lost(mean):
    """No choice of as many tiles is better than that of three convex curves, up to one step of one head."""
    shares = torch.tensor([*SHARES, 1.0])
    curves = torch.stack([scale * (1 - shares) ** power for scale, power in ((1.0, 1), (0.1, 2), (0.01, 3))])
    (chosen,) = allotted(curves[:, :-1].tolist(), mean, [1.0]).tolist()

    def lost(choice):
        return sum(curves[head, place].item() for head, place in enumerate(choice))

    places = [shares.tolist().index(pytest.approx(share)) for share in chosen]
    assert sum(chosen) <= 3 * mean + 1e-6
    others = itertools.product(range(len(shares)), repeat=3)
    as_many = [other for other in others if sum(shares[list(other)]) <= sum(chosen) + 1e-6]
    assert lost(places) <= min(map(lost, as_many)) + 1e-9


def test_heads_that_lose_nothing_leave_their_tiles_to_others():
    chosen = allotted([[0.0] * len(SHARES), [(1.0 - share) ** 2 for share in SHARES]], 0.5, [1.0])
    assert chosen.tolist() == [pytest.approx([SHARES[0], SHARES[-1]])]


@pytest.mark.parametrize("mean", [0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("weights", [(2.0, 1.0, 0.5), (0.3, 4.0, 1.0), (1.0, 1.5, 1.0)], ids=str)
def test_steps_share_tiles_so_that_least_is_lost(mean, weights):
    """No choice of as many tiles loses less of ``Σ_i w_i² e(s_i)``, over all that three steps of a head can choose."""
    shares = [*SHARES, 1.0]
    for power in (1.5, 2, 4):
        curve = [(1.0 - share) ** power for share in shares]
        chosen = allotted([curve[:-1]], mean, weights)[:, 0].tolist()
        places = [shares.index(pytest.approx(share)) for share in chosen]

        def lost(choice, curve=curve):
            return sum(weight**2 * curve[place] for weight, place in zip(weights, choice, strict=True))

        as_many = (
            other
            for other in itertools.product(range(len(shares)), repeat=3)
            if sum(shares[place] for place in other) <= sum(chosen) + 1e-6
        )
        assert sum(chosen) <= 3 * mean + 1e-6
        assert lost(places) <= min(map(lost, as_many)) * 1.02  # weights are rounded to a fortieth of a decade


def test_a_step_that_counts_nothing_keeps_least():
    together = allotted([[(1.0 - share) ** 2 for share in SHARES]], 0.5, [2.0, 1.0, 0.0])
    assert together[0] > together[1] > together[2] == pytest.approx(SHARES[0])


@pytest.mark.parametrize("curve", [[0.0] * len(SHARES), [float("nan")] * len(SHARES)], ids=["zero", "nan"])
def test_odd_measurements_keep_the_mean(curve):
    """Also of errors that are no numbers, and of a mean below what is measured."""
    for mean in (0.01, SHARES[0], 0.33, 1.0):
        shares = allotted([curve] * 4, mean, [1.0])
        assert shares.shape == (1, 4) and shares.min() > 0 and shares.mean() <= mean + 1e-6


# In a pipeline


STEPS = 6
PRESET = {
    "skip": {"policy": "sparge", "steps": "all", "top_k": 0.5, "density": "adaptive"},
    "schedule.warmup": 2,
    "blocks.size": 64,
}


@pytest.mark.parametrize("level", ["output", "layer", "head"])
@pytest.mark.parametrize("name, model", [("flux", "flux"), ("hunyuan", "hunyuan_video"), ("wan", "wan")])
def test_steps_up_to_the_last_dense_one_are_those_of_a_plain_run(name, model, level, monkeypatch):
    """It measures and leaves nothing out; from the next on heads keep shares of their own, alike in every run."""
    drawn = []

    def draw(*arguments, **options):
        drawn.append(options.get("shares"))
        return policies.draw(*arguments, **options)

    monkeypatch.setattr(sparse_site, "policies", SimpleNamespace(draw=draw))
    pipe = tiny_pipeline(name)
    plain = tiny_output(pipe, name, steps=STEPS)
    schedule = {"schedule.control": "interval", "schedule.interval": 2, "forecast.level": level}
    preset = load_preset(load_preset("exact", model=model, **schedule), **PRESET)
    with accelerated(pipe, preset):
        first = tiny_output(pipe, name, steps=STEPS)
        attended = [step.attended for step in pipe.dit_accel.report().steps]
        again = tiny_output(pipe, name, steps=STEPS)
    assert torch.equal(first, again)
    assert attended[:2] == [1.0, 1.0] and all(share < 1 for share in attended[2::2])
    own = [shares for shares in drawn if shares is not None]
    assert own and all(0 < shares.mean() <= 1 for shares in own)
    assert torch.equal(tiny_output(pipe, name, steps=STEPS), plain)


def test_a_second_transformer_measures_in_its_first_step():
    """It has no warm-up of its own."""
    pipe = tiny_pipeline("wan22")
    with accelerated(pipe, load_preset(load_preset("exact", model="wan"), **PRESET)):
        tiny_output(pipe, "wan22", steps=STEPS)
        attended = [step.attended for step in pipe.dit_accel.report().steps]
    assert attended.count(1.0) == 3


def test_shares_need_a_mean():
    with pytest.raises(PresetError, match="top_k, which is not set"):
        load_preset("exact", model="wan", skip={"policy": "sparge", "steps": "all", "density": "adaptive"})
