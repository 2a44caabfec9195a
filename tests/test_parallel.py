"""Two processes that share a pipeline's work give the same result as one; see :mod:`tests.parallel_ranks`."""

import pytest
import torch

from dit_accel.stages.decode import FUSED
from tests.forked import on_ranks, results_of_ranks
from tests.parallel_ranks import FUSES, GRAPHS, ODD, SHARED

ROUNDING = 2e-6  # float32, relative, of latents after eight steps
GPU_ROUNDING = 1e-3  # of kernels that multiply float32 as TF32
CASES = [(family, preset) for family, presets in SHARED.items() for preset in presets]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of each rank, by check; both run all checks, in one go."""
    return results_of_ranks("tests.parallel_ranks", 2, tmp_path_factory.mktemp("ranks"))


def require_as_alone(first, second):
    """Both ranks end with the result and decisions of one process."""
    assert first["error"] < ROUNDING and first["sum"] == second["sum"]
    assert first["modes"] == second["modes"] == first["alone"]
    assert first["errors"] == second["errors"]


@pytest.mark.parametrize(
    ("family", "case"), [*CASES, *((family, f"{presets[-1]}, accelerated first") for family, presets in SHARED.items())]
)
def test_tokens_shared_by_two_ranks_make_what_one_makes(found, family, case):
    """With any preset, and parallelism or acceleration first; no block falls back.

    Each rank expects the memory that it takes: outputs whole, and of symbols and residuals its own share, up to bits of
    a byte. Symbols are computed where a rank has all tokens of its heads; both report the highest computed share.
    """
    first, second = (rank[case] for rank in on_ranks(found, family))
    require_as_alone(first, second)
    assert first["fallbacks"] == [] and first["computed"] == second["computed"]
    assert (first["computed"] < 0.999) == case.startswith(("balanced", "sparse"))
    for rank in (first, second):
        assert rank["held"] == pytest.approx(rank["expected"], rel=1e-2)


@pytest.mark.parametrize(("case", "preset"), [(case, preset) for case in ODD for preset in ODD[case]])
def test_any_number_of_tokens_and_heads_can_be_shared(found, case, preset):
    """37 tokens of text, 45 of video, or three heads, on two ranks; estimates are of the rank with most heads."""
    first, second = (rank[f"{case}, {preset}"] for rank in on_ranks(found, "any_size"))
    require_as_alone(first, second)
    assert first["fallbacks"] == [] and first["held"] == pytest.approx(first["expected"], rel=1e-2)


@pytest.mark.parametrize(("family", "preset"), [(family, preset) for family in FUSES for preset in FUSES[family]])
def test_fused_blocks_exchange_tokens_for_heads(found, family, preset):
    """Fused kernels run in every step, as on a GPU; HunyuanVideo's prompt has an odd number of tokens here."""
    first, second = (rank[f"{family}, {preset}"] for rank in on_ranks(found, "fused"))
    require_as_alone(first, second)


@pytest.mark.parametrize(("family", "preset", "blocks"), GRAPHS)
def test_a_rank_replays_graphs_beside_one_that_runs_as_ever(found, family, preset, blocks):
    """Communication stays between graphs, so that ranks meet whether they replay or not."""
    replaying, other = (rows[f"{family}, {preset}, {blocks} blocks"] for rows in on_ranks(found, "graphs"))
    assert replaying["equal"] and other["equal"]
    assert replaying["parts"] > 4 and replaying["replays"] > 0 == other["replays"]
    assert not replaying["notes"]


def test_calls_of_uneven_shares_are_not_captured_and_later_ones_are(found):
    for rank in on_ranks(found, "graphs"):
        uneven, even = rank["after uneven calls"]["notes"]
        assert "can't be divided evenly" in uneven[0] and not even and rank["after uneven calls"]["replays"] > 0


def test_forecast_steps_exchange_nothing(found):
    first, second = on_ranks(found, "silence")
    assert first == second
    for mode, exchanges in zip(first["modes"], first["exchanges"], strict=True):
        assert (exchanges == 0) == (mode == "dispatch")


def test_ranks_with_different_outputs_decide_alike(found):
    """The largest error that a rank has measured counts on all of them."""
    first, second = on_ranks(found, "rounding")
    assert "dispatch" in first["modes"] and first == second


def test_level_head_runs_densely_where_tokens_are_shared(found):
    """Every block computes in every step, and the report says why."""
    first, second = on_ranks(found, "level_head")
    assert first["error"] < ROUNDING and first["sum"] == second["sum"] and "dispatch" in first["modes"]
    assert {item["reason"] for item in first["fallbacks"]} == {
        "level head needs all heads of a token on one GPU, and context parallelism distributes them"
    }


def test_a_run_after_one_that_was_left_equals_a_fresh_one(found):
    require_as_alone(*on_ranks(found, "exception"))


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_ranks_decode_the_latents_of_a_pipeline_together(found, family):
    """Once their shape is known; never what a callback decodes."""
    for row in on_ranks(found, "decoding"):
        assert row[family]["remarks"] == [FUSED, f"{FUSED}, shared by 2 ranks", FUSED, FUSED]
        assert max(row[family]["errors"]) < 2e-5 and set(row[family]["previews"]) <= {FUSED}


@pytest.mark.parametrize("case", [f"wan, {preset}" for preset in ("exact", "balanced", "layer", "residual")])
def test_branches_on_two_ranks_make_what_one_makes(found, case):
    """Each rank computes its own branch; the second one's first call determines the shape to receive."""
    first, second = (rank[case] for rank in on_ranks(found, "branches"))
    require_as_alone(first, second)
    assert [first["calls"], second["calls"]] == [first["plain_calls"] // 2, first["plain_calls"] // 2 + 1]


@pytest.mark.parametrize("case", ["flux, balanced", "qwen-image, balanced"])
def test_pipelines_with_true_guidance_share_their_branches(found, case):
    """Prompts of other lengths, and outputs that the pipeline cuts before it has called for the other branch."""
    first, second = (rank[case] for rank in on_ranks(found, "branches"))
    require_as_alone(first, second)
    assert max(first["calls"], second["calls"]) <= first["plain_calls"] // 2 + 1


def test_branches_have_the_dtype_of_their_own_run(found):
    """Runs of the same shapes in another dtype, before and after each other, equal one process."""
    first, second = on_ranks(found, "branch_kinds")
    for case, row in first.items():
        assert row["error"] < (2e-2 if "bfloat16" in case else ROUNDING), case
        assert row["sum"] == second[case]["sum"] and row["modes"] == second[case]["modes"] == row["alone"]


def test_prompts_that_decide_apart_share_their_branches(found):
    """Each rank computes its branch of all prompts of a step; a new number of prompts costs one more call."""
    first, second = on_ranks(found, "branches_per_prompt")
    require_as_alone(first, second)
    assert max(first["calls"], second["calls"]) < first["plain_calls"]
    assert first["calls"] + second["calls"] <= first["plain_calls"] + 2


def test_a_branch_that_is_called_twice_in_a_step_waits_for_nobody(found):
    """Outputs are exchanged in the order of the calls, even if the loop drops some."""
    first, second = on_ranks(found, "branch_called_twice")
    assert first["shared"] == second["shared"] == first["alone"]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("count", "got 4 × 1 and 2: start as many with torchrun"),
        ("plan", "ulysses must be 1 for SD3Transformer2DModel"),
        ("heads", "2 devices can't share the 1 attention heads of pipe.transformer"),
        ("twice", "pipe.transformer is parallel already"),
    ],
)
def test_what_cannot_be_shared_says_so(found, case, expected):
    assert expected in on_ranks(found, "refusals")[0][case]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_make_what_one_makes(tmp_path):
    """Over NCCL, with the kernels of GPUs: even and uneven numbers of tokens and heads, branches, shared decodes."""
    names = ("flux", "wan", "hunyuan", "qwen-image", "any_size", "branches", "decoding")
    found = results_of_ranks("tests.parallel_ranks", 2, tmp_path, *names, RANKS_DEVICE="cuda")
    for name in names[:-1]:
        first, second = on_ranks(found, name)
        assert {case: row["error"] < GPU_ROUNDING for case, row in first.items()} == dict.fromkeys(first, True)
        assert [row["sum"] for row in first.values()] == [row["sum"] for row in second.values()]
    for row in on_ranks(found, "decoding"):
        assert all(max(of_family["errors"]) < GPU_ROUNDING for of_family in row.values())
