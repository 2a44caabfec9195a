"""A policy of one's own, made as CONTRIBUTING.md says: its object, its section, one line in the table, its tests.

It keeps a diagonal band of tiles, and the tiles that hold text. The fixture adds it to the tables and takes it off.
"""

from typing import Annotated, Literal

import pytest
import torch
from pydantic import Field, Tag

from dit_accel import accelerated
from dit_accel.kernels import pack_bits
from dit_accel.kernels.layout import TokenLayout
from dit_accel.presets import Preset, Skip, load_preset
from dit_accel.sparse.policies import POLICIES
from dit_accel.sparse.policies.policy import Policy, every_row
from dit_accel.sparse.site_state import symbol_bytes
from dit_accel.tools.measure.tune import axes, calibration
from tests.models import tiny
from tests.models.naive import NaiveAttention, Schedule, Sequence


class BandPolicy(Policy):
    """Tiles at most ``config.reach`` from the diagonal."""

    def draw(self, inputs, config):
        q, layout = inputs.q, inputs.layout
        block = torch.arange(layout.blocks, device=q.device)
        tiles = (block - block[:, None]).abs() <= config.reach
        tiles[layout.text_blocks], tiles[:, layout.text_blocks] = True, True
        return every_row(q, layout, pack_bits(tiles.expand(q.shape[0], q.shape[2], -1, -1)))

    def thresholds(self, config):
        return {"reach": (9, 3, 1)}


class Band(Skip):
    """Keys of policy ``band``."""

    policy: Literal["band"] = "band"
    reach: int = Field(default=1, ge=0)
    """band: tiles on either side of the diagonal."""


@pytest.fixture
def band():
    """The policy in the tables, and in the union of a preset's sections, which is otherwise made of `Skip.forms`."""
    field = Preset.model_fields["skip"]
    shipped = field.annotation
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "band", BandPolicy())
        patch.setitem(Skip.forms, "band", Band)
        field.annotation = shipped | Annotated[Band, Tag("band")]
        Preset.model_rebuild(force=True)
        yield
    field.annotation = shipped
    Preset.model_rebuild(force=True)
    assert "band" not in POLICIES


PIPELINES = {  # where they attend, and tokens of 96 × 96 pixels
    "sd3": Sequence(r"transformer_blocks\.\d+\.attn", 144, text_first=False),
    "flux": Sequence(r"(single_)?transformer_blocks\.\d+\.attn", 144),
}


class NaiveBand(NaiveAttention):
    """Dense attention under a mask of the band's tiles."""

    def tiles(self, q, k, layout, kv_len):
        block = torch.arange(layout.blocks)
        kept = (block - block[:, None]).abs() <= self.schedule.preset.skip.reach
        kept[layout.text_blocks], kept[:, layout.text_blocks] = True, True
        return kept.expand(q.shape[0], q.shape[2], -1, -1)


@pytest.mark.parametrize("refresh", [1, 3], ids=lambda refresh: f"refresh-{refresh}")
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_under_the_policy_is_one_under_its_masks(name, refresh, band):
    """Eight steps, of which two attend to everything; at a reach over all tiles the output is the plain one."""
    pipe, size = tiny.pipeline(name), {"height": 96, "width": 96}
    plain, results = tiny.output(name, 8, **size), []
    for reach in (0, 99):
        preset = load_preset(
            "exact",
            schedule={"control": "interval", "warmup": 2, "interval": 1},
            skip={"policy": "band", "steps": "all", "refresh": refresh, "reach": reach},
            blocks={"size": 64},
        )
        with accelerated(pipe, preset):
            results.append(tiny.output(name, 8, **size))
            report = pipe.dit_accel.report()
        assert report.fallbacks == report.notes == [] and (report.left_out > 0.02) == (reach == 0)
        assert len(report.attentions) == 6 * len(PIPELINES[name].modules(pipe.transformer))
        if reach == 0:
            schedule = Schedule(pipe, preset, 8)
            naive = NaiveBand(schedule, PIPELINES[name])
            with schedule.followed(), naive.within(pipe.transformer) as kept:
                expected = tiny.output(name, 8, **size)
            assert report.left_out == pytest.approx(1 - sum(kept) / len(kept), abs=1e-6)
    few, all_of_them = results
    torch.testing.assert_close(few, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(all_of_them, plain, rtol=1e-4, atol=1e-4)
    assert (few - plain).norm() > 1e-3 * plain.norm()


def test_other_readers_of_a_policy_take_it(band):
    """Level head reserves a bit a tile, tuning tries its values, and single blocks may have it."""
    preset = load_preset("flux-flashomni-paper", skip={"policy": "band", "reach": 0})
    tiles, layout = load_preset("flux-flashomni-paper", skip={"policy": "sparge"}), TokenLayout(0, 800, 64)
    assert symbol_bytes(preset, layout, 1, 3) == symbol_bytes(tiles, layout, 1, 3)
    assert list(calibration._rows(preset.skip)) == [[{"reach": 9}, {"reach": 3}, {"reach": 1}]]
    assert list(calibration._rows(Skip(policy="static", window=64))) == [[{}]]
    layers = {"a": {"policy": "band", "reach": 2}}
    mixed = load_preset("flux-flashomni-paper", skip={"policy": "none", "layers": layers})
    assert mixed.skip.at("a").reach == 2 and not axes.skips_values(mixed.skip.at("a"))
    with accelerated(tiny.pipeline("flux"), preset):
        tiny.output("flux", 8, height=96, width=96)
        assert tiny.pipeline("flux").dit_accel.report().steps_by_mode["dispatch"] > 0
