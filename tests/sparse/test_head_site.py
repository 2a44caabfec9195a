"""Head sites: when a layer degrades."""

from dit_accel import load_preset
from dit_accel.kernels.layout import TokenLayout
from dit_accel.loop.memory import ModelSize
from dit_accel.sparse.head_site import HeadSite
from dit_accel.sparse.site_state import Densities, SiteState
from tests.sparse.calls import NO_PROJECTIONS, calling, controller_of


def test_layers_degrade_below_their_threshold():
    """New densities reach their sites, and a layer whose rows without text compute less than S_q of their scores is
    forecast whole until the next.
    """
    preset = load_preset("flux-flashomni-paper", **{"reuse.degrade_below": 0.5})
    size = ModelSize(layout=TokenLayout(text=128, vision=7 * 128))  # of 8 rows 7 without text
    for rest, degraded in ((0.49, True), (0.5, False), (0.51, False)):
        tiles = (1 + 7 * rest) / 8
        with calling(controller_of(preset), "transformer", "cond", 8, (), size=lambda: size) as call:
            HeadSite("first", call, preset, NO_PROJECTIONS).take_densities([0.5, 0.75, tiles, 0.5, 0.25, 0.0])
            site = call.site("first", SiteState)
        assert site.tiles.densities == Densities(0.5, 0.75, tiles, 0.5, 0.25, 0.0)
        assert site.heads.degraded == degraded
