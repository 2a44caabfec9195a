"""Settings of presets that `settings.py` measures: a page for each study."""

from typing import NamedTuple

from dit_accel.presets import Preset

FAMILIES = {"demo-flux": "flux", "demo-hunyuan": "hunyuan_video", "demo-wan": "wan"}
BALANCED = {"demo-flux": "balanced", "demo-hunyuan": "video-balanced", "demo-wan": "video-balanced"}


class Setting(NamedTuple):
    """A preset to measure; `series`: a paper's table, or the part that varies; `claimed_*`: a paper's PSNR and
    sparsity.
    """

    series: str
    name: str
    preset: Preset
    claimed_db: float | None = None
    claimed_sparsity: float | None = None
