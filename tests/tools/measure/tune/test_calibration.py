"""Thresholds of single layers: records, error and sparsity of each layer, and the choice within bounds."""

import pytest
import torch

from dit_accel import load_preset
from dit_accel.kernels.layout import TokenLayout
from dit_accel.presets import Skip
from dit_accel.sparse.token_order import token_order
from dit_accel.tools.measure.capture import Site
from dit_accel.tools.measure.tune import calibration
from dit_accel.tools.measure.tune.calibration import LEAST_SPARSITY, Candidate, Recorder, choose, layers_of, measure
from tests.models.tiny import pipeline
from tests.tiny import tiny_output

BLOCKS = {"size": 64}
SPARGE = {"policy": "sparge", "steps": "all"}


def preset(model: str = "wan", skip: dict = SPARGE, **overrides):
    schedule = {"control": "adaptive", "target_error": 0.1, "warmup": 2}
    sections = {"model": model, "schedule": schedule, "skip": skip, "blocks": BLOCKS}
    return load_preset("balanced", **sections, **overrides)


def recorded(settings, memory=calibration.MEMORY) -> Recorder:
    """Records of six steps of two prompts."""
    recorder = Recorder(settings, 6, 2, memory)
    for prompt in range(2):
        with recorder.tap(pipeline("wan"), prompt):
            tiny_output(pipeline("wan"), "wan", steps=6, seed=prompt, height=96, width=80)
    return recorder


@pytest.fixture(scope="module")
def raster() -> Recorder:
    return recorded(preset())


def test_samples_are_spread_over_the_run(raster):
    """Every block is recorded as often, at later steps that differ, for one branch of two; policy none takes none."""
    assert list(raster.samples) == ["transformer.blocks.0", "transformer.blocks.1"]
    for samples in raster.samples.values():
        assert sorted(sample.site.step for sample in samples) == [2, 3, 4, 5]
        assert [sample.progress * 6 for sample in samples] == [sample.site.step for sample in samples]
    settings = preset(skip={**SPARGE, "layers": {"transformer.blocks.0": {"policy": "none"}}})
    assert list(recorded(settings).samples) == ["transformer.blocks.1"]


def size_of(recorder: Recorder) -> int:
    return sum(x.nbytes for samples in recorder.samples.values() for sample in samples for x in sample.tensors)


def test_memory_bounds_the_heads_that_are_kept(raster):
    """With room for one head of three, the samples of a block have one each, and together all three."""
    size = size_of(raster)
    bounded = recorded(preset(), memory=size // 3)
    for block, samples in bounded.samples.items():
        assert {sample.tensors[0].shape[2] for sample in samples} == {1}
        heads = [
            next(h for h in range(3) if torch.equal(all_heads.tensors[0][:, :, h : h + 1], one.tensors[0]))
            for all_heads, one in zip(raster.samples[block], samples, strict=True)
        ]
        assert set(heads) == {0, 1, 2}
    assert size_of(bounded) <= size // 3


def test_tokens_lie_in_the_presets_order(raster):
    hilbert = recorded(preset(**{"blocks.token_order": "hilbert"}))
    order = token_order("hilbert", (3, 12, 10), 64)
    for block, samples in raster.samples.items():
        for expected, actual in zip(samples, hilbert.samples[block], strict=True):
            assert all(torch.equal(b, a[:, order]) for a, b in zip(expected.tensors, actual.tensors, strict=True))


def sample_of(q, k, v, layout, progress=0.5):
    return calibration._Sample(Site("blocks.0", 3, layout, None, None), (q, k, v), progress)


def recorder_of(*samples):
    recorder = Recorder(preset(), 6, 1)
    recorder.samples["blocks.0"] = list(samples)
    return recorder


def naive(q, k, v, skip: Skip, block: int) -> tuple[float, float]:
    """Error and sparsity of SpargeAttn's tiles, computed independently in float64 for one head."""
    q, k, v = (x[0, :, 0].double() for x in (q, k, v))
    pool = (
        torch.stack([part.mean(0) for part in q.split(block)]),
        torch.stack([part.mean(0) for part in (k - k.mean(0)).split(block)]),
    )
    probabilities = (pool[0] @ pool[1].T / q.shape[1] ** 0.5).softmax(-1)
    keep = torch.zeros_like(probabilities, dtype=torch.bool)
    for row, masses in enumerate(probabilities):
        total = 0.0
        for tile in masses.argsort(descending=True):
            if total >= 1 - skip.tau_kv:
                break
            keep[row, tile] = True
            total += masses[tile].item()
    scores = q @ k.T / q.shape[1] ** 0.5
    dense = scores.softmax(-1) @ v
    tokens = keep.repeat_interleave(block, 0).repeat_interleave(block, 1)[: len(q), : len(q)]
    sparse = scores.masked_fill(~tokens, -torch.inf).softmax(-1) @ v
    return ((sparse - dense).abs().sum() / dense.abs().sum()).item(), 1 - keep.double().mean().item()


def test_errors_and_sparsities_are_those_of_a_naive_loop():
    """Each candidate's figures on two attentions are the means of the float64 results."""
    generator, layout = torch.Generator().manual_seed(0), TokenLayout(0, 300, 64)
    samples = []
    for scale in (3.0, 1.0):
        q, k, v = (torch.randn(1, 300, 1, 32, generator=generator) for _ in range(3))
        shift = torch.randn(1, 5, 1, 32, generator=generator).repeat_interleave(64, 1)[:, :300]
        samples.append((q + scale * shift, k, v))
    recorder = recorder_of(*(sample_of(*tensors, layout) for tensors in samples))
    candidates = dict(measure(recorder, preset(), torch.device("cpu")))["blocks.0"]
    assert len(candidates) > 5
    for candidate in candidates:
        skip = Skip(policy="sparge", **candidate.changes)
        errors, sparsities = zip(*(naive(*tensors, skip, 64) for tensors in samples), strict=True)
        assert candidate.error == pytest.approx(sum(errors) / 2, abs=1e-5)
        assert candidate.sparsity == pytest.approx(sum(sparsities) / 2, abs=1e-6)


def test_at_level_head_thresholds_are_those_of_the_step():
    """A mass that has grown to a quarter by mid-run leaves out there what a quarter of it does everywhere."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 256, 1, 16, generator=generator) + offset for offset in (0, 0, 3))
    q = q + 6 * torch.randn(1, 4, 1, 16, generator=generator).repeat_interleave(64, 1)
    recorder = recorder_of(sample_of(q, k, v, TokenLayout(0, 256, 64), progress=0.5))
    head = preset(skip={"policy": "sparge"}, **{"forecast.level": "head", "reuse.ramp": 2.0})
    cpu = torch.device("cpu")
    ramped, plain = (dict(measure(recorder, settings, cpu))["blocks.0"] for settings in (head, preset()))
    errors, ramped_errors = ({item.changes["tau_kv"]: item.error for item in items} for items in (plain, ramped))
    assert ramped_errors[0.2] == errors[0.05] < errors[0.2]


@pytest.mark.parametrize(
    ("skip", "keys"),
    [
        ({**SPARGE, "top_k": 0.5}, {"top_k"}),
        ({**SPARGE, "similarity": 0.5}, {"tau_kv", "similarity"}),
        ({**SPARGE, "pv_threshold": -5.0}, {"tau_kv", "pv_threshold"}),
        ({"policy": "sla", "steps": "all"}, {"critical"}),
        ({"policy": "fg_attn", "steps": "all"}, {"key_threshold"}),
        ({"policy": "static", "steps": "all", "pattern": "causal"}, set()),
    ],
    ids=["top_k", "similarity", "pv_threshold", "sla", "fg_attn", "static"],
)
def test_every_policys_own_thresholds_are_tried(skip, keys):
    """Candidates change only those keys, are valid, and skip something."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 192, 1, 16, generator=generator) + offset for offset in (0, 0, 3))
    settings = preset(skip=skip)
    recorder = recorder_of(sample_of(q, k, v, TokenLayout(0, 192, 64)))
    ((block, candidates),) = measure(recorder, settings, torch.device("cpu"))
    assert candidates
    assert {key for item in candidates for key in item.changes} - {"negligible"} == keys
    for bound in (0.05, 0.4):
        layers = layers_of(choose({block: candidates}, bound, 1.2))
        assert load_preset(settings, **{"skip.layers": layers}).skip.at(block) is not None
    assert max(item.sparsity for item in candidates) > 0.1 or skip.get("similarity")


def candidate(error, sparsity, **changes):
    return Candidate(changes, error, sparsity)


def test_bounds_choose_the_sparsest_candidate_that_they_allow():
    """The sparsest candidate within l1 is chosen; a layer that can't save anything under it skips nothing."""
    curves = {
        "a": [candidate(0.01, 0.1, tau_kv=0.1), candidate(0.04, 0.3, tau_kv=0.2), candidate(0.2, 0.9, tau_kv=0.3)],
        "b": [candidate(0.3, 0.5, tau_kv=0.1)],
        "c": [candidate(0.01, 0.001, tau_kv=0.1)],
        "d": [candidate(0.01, LEAST_SPARSITY, tau_kv=0.1)],
    }
    none = {"policy": "none"}
    assert layers_of(choose(curves, 0.05, 1.0)) == {"a": {"tau_kv": 0.2}, "b": none, "c": none, "d": {"tau_kv": 0.1}}
    assert layers_of(choose(curves, 0.3, 1.0))["b"] == {"tau_kv": 0.1}, "an error of exactly the bound"


def test_pv_threshold_is_chosen_under_its_own_bound():
    """After the tiles, the largest λ for these very tiles whose error l2 allows."""
    curves = {
        "a": [
            candidate(0.04, 0.3, tau_kv=0.2, pv_threshold=None),
            candidate(0.045, 0.3, tau_kv=0.2, pv_threshold=-9.0),
            candidate(0.055, 0.3, tau_kv=0.2, pv_threshold=-5.0),
            candidate(0.08, 0.3, tau_kv=0.2, pv_threshold=-3.0),
            candidate(0.06, 0.4, tau_kv=0.3, pv_threshold=None),
            candidate(0.01, 0.1, tau_kv=0.1, pv_threshold=-3.0),
        ]
    }
    assert layers_of(choose(curves, 0.05, 1.2))["a"] == {"tau_kv": 0.2, "pv_threshold": -5.0}
    assert layers_of(choose(curves, 0.05, 1.0))["a"] == {"tau_kv": 0.2, "pv_threshold": -9.0}
