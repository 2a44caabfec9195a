"""Decodes that ranks share equal the decode of one rank; see :mod:`tests.stages.sharing_ranks`."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dit_accel.stages.decode import FUSED
from dit_accel.stages.rows import Rows
from dit_accel.stages.sharing import LEAST_ROWS, Bands
from tests.stages import ROUNDING

REPOSITORY = Path(__file__).parents[2]
FAILURES = (
    *("first norm", "a norm", "a later frame", "last norm"),
    *("an image's moments", "a norm of frames"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of each rank, by check."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.stages.sharing_ranks", folder]
    output = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert output.returncode == 0, output.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def on(found, check, ranks=2):
    """Results of the check's ranks, none of which failed."""
    rows = [rank[check] for rank in found[:ranks]]
    assert not any("failed" in row for row in rows), rows
    return rows


def shared_by(ranks):
    return f"{FUSED}, shared by {ranks} ranks"


BANDS = ("wan 2.1", "wan 2.2", "qwen-image", "hunyuan", "hunyuan in parts", "hunyuan-image", "flux")


@pytest.mark.parametrize(
    ("check", "ranks", "case"),
    [
        *(("bands_of_two", 2, case) for case in BANDS),
        *(("bands_of_three", 3, case) for case in ("wan 2.2", "flux", "one row each")),
        *(("parts", 2, case) for case in ("image", "frames", "video")),
        *(("too_small", 2, case) for case in ("rows", "latents")),
    ],
)
def test_ranks_make_the_output_of_one_rank(found, check, ranks, case):
    """Every rank has all of it: bit for bit if rows are shared, from the second decode of a shape on; else to rounding.

    The first decode is each rank's own, because it is compared.
    """
    later = FUSED if check == "too_small" else shared_by(ranks)
    rows = [row[case] for row in on(found, check, ranks)]
    for outputs, remark in zip(zip(*rows, strict=True), (FUSED, later), strict=True):
        assert {item["remark"] for item in outputs} == {remark}
        assert max(item["error"] for item in outputs) < ROUNDING
        assert remark == FUSED or len({item["sum"] for item in outputs}) == 1


@pytest.mark.parametrize("case", FAILURES)
def test_ranks_decode_again_if_one_fails_in_its_rows(found, case):
    """No rank waits for it; it decodes by its own code, and later decodes are not shared."""
    well, failed = (row[case] for row in on(found, "failure_in_rows"))
    assert max(well["errors"] + failed["errors"]) < ROUNDING
    assert well["remarks"] == [FUSED, FUSED]
    assert "out of luck" in failed["remarks"][0] and failed["remarks"][1] == FUSED


@pytest.mark.parametrize("case", ["images", "videos", "tiles"])
def test_ranks_with_other_latents_or_tiles_decode_their_own(found, case):
    for row in on(found, "differences"):
        assert [(item["remark"], item["error"]) for item in row[case]] == [(FUSED, 0.0)] * 2


@pytest.mark.parametrize("case", ["flux", "wan 2.1"])
def test_all_decode_by_themselves_if_one_cannot_share(found, case):
    well, other = (row[case] for row in on(found, "one_that_cannot"))
    assert [item["remark"] for item in well] == [FUSED] * 2
    assert all("mid_block has hooks" in item["remark"] for item in other)


def test_ranks_share_the_decode_of_a_pipeline(found):
    first, second = (row["frames"] for row in on(found, "pipelines"))
    assert first == second and first["remark"] == shared_by(2)
    assert first["sums"][0] == pytest.approx(first["sums"][1])


@pytest.mark.parametrize("case", ["latents", "without"])
def test_a_rank_that_wants_latents_keeps_no_other_waiting(found, case):
    """With or without an autoencoder. The others decode by themselves."""
    frames, latents = (row[case] for row in on(found, "pipelines"))
    assert frames["remark"] == FUSED and latents["remark"] is None


class Together(Rows):
    """The bands of all ranks in one process: ``all_sent`` is what each of them sends, which a test sets."""

    def _sent(self, parts):
        return torch.stack(self.all_sent)


def bands(count, height):
    return [Together(SimpleNamespace(count=count, rank=rank), height) for rank in range(count)]


@pytest.mark.parametrize("count, height", [(2, 5), (3, 8), (3, 7), (4, 4)])
@pytest.mark.parametrize("scale", [1, 2])
def test_bands_of_unequal_height_are_the_whole(count, height, scale):
    """Bands put together are the features, and their moments those of all pixels, though bands differ in height."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 3, scale * height, 6, generator=generator) * torch.arange(1.0, scale * height + 1)[:, None]
    rows = bands(count, height)
    parts = [own_rows.band(whole) for own_rows in rows]
    assert torch.equal(torch.cat(parts, 2), whole) and len({band.shape[2] for band in parts}) == (
        1 if count == 4 else 2
    )
    tallest = max(band.shape[2] for band in parts)
    padded = [torch.nn.functional.pad(band, (0, 0, 0, tallest - band.shape[2]), value=9.0) for band in parts]
    moments = [torch.stack([band.mean((2, 3)), band.var((2, 3), correction=0)], -1) for band in parts]
    for band, mine in zip(rows, parts, strict=True):
        band.all_sent = padded
        assert torch.equal(band.whole(mine), whole) and band.tallest(mine[:, :, None]) == tallest
        band.all_sent = moments
        mean, variance = band.merged(moments[0]).unbind(-1)
        assert (mean - whole.mean((2, 3))).abs().max() < 1e-5
        assert (variance - whole.var((2, 3), correction=0)).abs().max() < 1e-4


@pytest.mark.parametrize("rank", range(3))
def test_each_band_gets_the_rows_of_its_neighbours(rank):
    """The image's own border stays zeros."""
    whole = torch.randn(2, 3, 1, 7, 4, generator=torch.Generator().manual_seed(0))
    bordered = torch.nn.functional.pad(whole, (1, 1, 1, 1))
    ends = [0, 2, 4, 7]
    rows = bands(3, 7)
    parts = [torch.nn.functional.pad(whole[:, :, :, start:end], (1, 1, 1, 1)) for start, end in pairwise(ends)]
    sent = [torch.stack([x.permute(0, 2, 3, 4, 1)[:, :, 1], x.permute(0, 2, 3, 4, 1)[:, :, -2]]) for x in parts]
    rows[rank].all_sent = sent
    rows[rank].exchange_border(parts[rank])
    assert torch.equal(parts[rank], bordered[:, :, :, ends[rank] : ends[rank + 1] + 2])


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
