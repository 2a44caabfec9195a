"""Decodes that ranks share equal the decode of one rank; see :mod:`tests.stages.sharing_ranks`."""

from types import SimpleNamespace

import pytest

from dit_accel.stages.decode import BOUNDS, FUSED
from dit_accel.stages.sharing import LEAST_ROWS, Bands
from tests.forked import on_ranks, results_of_ranks
from tests.stages import ROUNDING

FAILURES = ("first norm", "a later frame", "narrow operands", "an image's moments", "a norm of frames")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of each rank, by check."""
    return results_of_ranks("tests.stages.sharing_ranks", 3, tmp_path_factory.mktemp("ranks"))


BANDS = ("wan 2.1", "qwen-image", "hunyuan", "hunyuan in parts", "hunyuan-image", "flux")


@pytest.mark.parametrize(
    ("check", "ranks", "case"),
    [
        *(("bands_of_two", 2, case) for case in BANDS),
        *(("bands_of_three", 3, case) for case in ("wan 2.2", "flux", "one row each")),
        *(("parts", 2, case) for case in ("image", "frames", "video")),
    ],
)
def test_ranks_make_the_output_of_one_rank(found, check, ranks, case):
    """Every rank has all of it, bit for bit; the first decode is each rank's own, because it is compared."""
    rows = [row[case] for row in on_ranks(found, check, ranks)]
    for outputs, remark in zip(zip(*rows, strict=True), (FUSED, f"{FUSED}, shared by {ranks} ranks"), strict=True):
        assert {item["remark"] for item in outputs} == {remark}
        assert max(item["error"] for item in outputs) < ROUNDING
        assert remark == FUSED or len({item["sum"] for item in outputs}) == 1


@pytest.mark.parametrize("case", FAILURES)
def test_ranks_decode_again_if_one_fails_in_its_rows(found, case):
    """No rank waits for it; it decodes by its own code, and later decodes are not shared."""
    well, failed = (row[case] for row in on_ranks(found, "failure_in_rows"))
    assert max(well["errors"] + failed["errors"]) < (min(BOUNDS.values()) if case == "narrow operands" else ROUNDING)
    assert well["remarks"] == [FUSED, FUSED]
    assert "out of luck" in failed["remarks"][0] and failed["remarks"][1] == FUSED


@pytest.mark.parametrize("case", ["images", "tiles"])
def test_ranks_with_other_latents_or_tiles_decode_their_own(found, case):
    for row in on_ranks(found, "differences"):
        assert all(item["remark"] == FUSED and item["error"] < ROUNDING for item in row[case])


def test_all_decode_by_themselves_if_one_cannot_share(found):
    well, other = (row["decodes"] for row in on_ranks(found, "one_that_cannot"))
    assert [item["remark"] for item in well] == [FUSED] * 2
    assert all("mid_block has hooks" in item["remark"] for item in other)


@pytest.mark.parametrize("case", ["latents", "without"])
def test_a_rank_that_wants_latents_keeps_no_other_waiting(found, case):
    """With or without an autoencoder. The others decode by themselves."""
    frames, latents = (row[case] for row in on_ranks(found, "pipelines"))
    assert frames == FUSED and latents is None


@pytest.mark.parametrize(
    ("shapes", "agrees"),
    [
        ({(1, 4, 2 * LEAST_ROWS, 64)}, True),
        ({(1, 4, 2 * LEAST_ROWS - 1, 99)}, False),
        ({(1, 4, 2 * LEAST_ROWS, 63)}, False),
        ({(9, 4, 2 * LEAST_ROWS, 63)}, False),
        ({(1, 4, 3, 2, 64), (1, 4, 3, 2 * LEAST_ROWS, 64)}, True),
        ({(1, 4, 1, 64), (1, 4, 2 * LEAST_ROWS, 64)}, False),
        (set(), False),
    ],
    ids=["least", "few rows", "few latents", "a batch", "a low tile", "one row", "none"],
)
def test_ranks_share_from_a_size_on(shapes, agrees):
    """The largest call decides; the lowest needs a row for each rank, and a batch is no reason."""
    ranks = SimpleNamespace(count=2, vote=lambda vote, about: vote)
    assert Bands(ranks, None, 2 * LEAST_ROWS * 64).agree(shapes, None) is agrees
