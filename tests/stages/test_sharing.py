"""Decodes that ranks share equal the decode of one rank; see :mod:`tests.stages.sharing_ranks`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dit_accel.stages.decode import FUSED
from tests.stages import ROUNDING

REPOSITORY = Path(__file__).parents[2]
ROWS = (
    *("wan-2.1", "wan-2.2", "qwen-image", "hunyuan-video", "hunyuan-video in parts"),
    *("hunyuan-image", "image"),
)
FAILURES = (
    *("first norm", "a norm", "a later frame", "last norm"),
    *("an image's moments", "a norm of frames"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of each rank, by check."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.stages.sharing_ranks", folder]
    made = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def on(found, check, ranks=2):
    """Results of the check's ranks, none of which failed."""
    rows = [rank[check] for rank in found[:ranks]]
    assert not any("failed" in row for row in rows), rows
    return rows


def shared_by(ranks):
    return f"{FUSED}, shared by {ranks} ranks"


def require_shared(found, check, case, ranks, expected):
    """Every rank has the whole output: shared ones bit for bit, all within rounding of the output of one rank."""
    rows = [row[case] for row in on(found, check, ranks)]
    for outputs in zip(*rows, expected, strict=True):
        *outputs, remark = outputs
        assert {each["remark"] for each in outputs} == {remark}
        assert max(each["error"] for each in outputs) < ROUNDING
        assert remark == FUSED or len({each["sum"] for each in outputs}) == 1


@pytest.mark.parametrize(
    ("check", "ranks", "case"),
    [*(("bands_of_two", 2, case) for case in ROWS), *(("bands_of_three", 3, case) for case in ("wan-2.2", "image"))],
)
def test_bands_of_rows_make_the_video_of_one_rank(found, check, ranks, case):
    """Also of odd heights; the first decode of a shape is each rank's own, because it is compared."""
    require_shared(found, check, case, ranks, [FUSED, shared_by(ranks)])


def test_a_band_may_have_one_row(found):
    require_shared(found, "bands_of_three", "one row each", 3, [FUSED, shared_by(3)])


def test_rows_of_tiles_are_shared(found):
    """Once tiles of this size have been compared."""
    require_shared(found, "tiles_of_bands", "tiles", 2, [FUSED, shared_by(2)])


def test_few_rows_are_not_shared(found):
    require_shared(found, "too_few_rows", "wan", 2, [FUSED, FUSED])


def test_few_latents_are_not_shared(found):
    require_shared(found, "few_latents", "image", 2, [FUSED, FUSED])


@pytest.mark.parametrize("case", ["image", "video"])
def test_rows_of_each_tile_are_shared(found, case):
    require_shared(found, "tiles", case, 2, [FUSED, shared_by(2)])


@pytest.mark.parametrize("case", FAILURES)
def test_ranks_decode_again_if_one_fails_in_its_rows(found, case):
    """No rank waits for it; it decodes by its own code, and later decodes are not shared."""
    well, failed = (row[case] for row in on(found, "failure_in_rows"))
    assert max(well["errors"] + failed["errors"]) < ROUNDING
    assert well["remarks"] == [FUSED, FUSED]
    assert "out of luck" in failed["remarks"][0] and failed["remarks"][1] == FUSED


@pytest.mark.parametrize("case", ["images", "videos"])
def test_ranks_with_other_latents_decode_their_own(found, case):
    for row in on(found, "other_latents"):
        assert [(each["remark"], each["error"]) for each in row[case]] == [(FUSED, 0.0)] * 2


def test_ranks_with_other_tiles_decode_their_own(found):
    for row in on(found, "other_tiles"):
        assert [(each["remark"], each["error"]) for each in row["images"]] == [(FUSED, 0.0)] * 2


@pytest.mark.parametrize("case", ["images", "videos"])
def test_all_decode_by_themselves_if_one_cannot_share(found, case):
    well, other = (row[case] for row in on(found, "one_that_cannot"))
    assert [each["remark"] for each in well] == [FUSED] * 2
    assert all("mid_block has hooks" in each["remark"] for each in other)


def test_ranks_share_the_decode_of_a_pipeline(found):
    first, second = (row["frames"] for row in on(found, "pipelines"))
    assert first == second and first["remark"] == shared_by(2)
    assert first["sums"][0] == pytest.approx(first["sums"][1])


@pytest.mark.parametrize("case", ["latents", "without"])
def test_a_rank_that_wants_latents_keeps_no_other_waiting(found, case):
    """With or without an autoencoder. The others decode by themselves."""
    frames, latents = (row[case] for row in on(found, "pipelines"))
    assert frames["remark"] == FUSED and latents["remark"] is None
