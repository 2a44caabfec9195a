"""Rows of FlashOmni's and FG-Attn's tables as presets, with the papers' figures for their own models."""

from collections.abc import Iterator

from dit_accel.presets import load_preset

from . import FAMILIES, Setting

OMNI, TAYLOR = "FlashOmni", "TaylorSeer"
# (tau_q %, tau_kv %, N, D, S_q %) of FlashOmni, or (N, D) of TaylorSeer; then the paper's PSNR in dB and sparsity.
ROWS = {
    "demo-flux": [
        (f"{OMNI}, table 1", (5, 15, 4, 0, 0), 24.563, 0.28),
        (f"{OMNI}, table 1", (50, 15, 4, 1, 0), 25.159, 0.41),
        (f"{OMNI}, table 1", (50, 15, 5, 1, 0), 23.994, 0.43),
        (f"{OMNI}, table 1", (50, 15, 5, 2, 30), 23.859, 0.46),
        (f"{OMNI}, table 2", (5, 1), 22.852, None),
        (f"{OMNI}, table 2", (5, 2), 23.177, None),
        (f"{OMNI}, table 2", (6, 2), 22.245, None),
        (f"{OMNI}, table 2", (50, 15, 6, 1, 30), 23.217, None),
        *((f"{OMNI}, table 3", (5, 15, n, 1, 0), psnr, None) for n, psnr in ((3, 26.702), (5, 24.193), (7, 23.012))),
        *((f"{OMNI}, table 3", (50, 15, 5, d, 30), psnr, None) for d, psnr in enumerate((23.355, 23.866, 23.859))),
    ],
    "demo-hunyuan": [
        (f"{OMNI}, table 1", (40, 1, 3, 1, 0), 32.192, 0.34),
        (f"{OMNI}, table 1", (40, 1, 6, 1, 0), 28.733, 0.39),
        (f"{OMNI}, table 1", (50, 5, 6, 1, 30), 27.877, 0.47),
        (f"{OMNI}, table 2", (6, 1), 26.483, None),
    ],
    "demo-wan": [],
}
FG_ATTN = {"demo-flux": ("FG-Attn, table 5", "flux-fgattn"), "demo-wan": ("FG-Attn, table 3", "wan21-fgattn")}
MASKS = {
    "exact": {},
    "mean query": {"skip": {"mask": "average_query"}},
    "mean query, the paper's threshold": {"skip": {"mask": "average_query", "key_threshold": 0.5}},
}
PRESETS = ("flux-flashomni-quality", "flux-flashomni", "flux-flashomni-turbo")  # FlashOmni's method, all models


def settings(model: str) -> Iterator[Setting]:
    """Yield the rows for a demo model."""
    family = FAMILIES[model]
    prefix = "flux" if model == "demo-flux" else "hunyuan"
    for table, values, psnr, sparsity in ROWS[model]:
        *skipped, interval, order = values if len(values) == 2 else (*values[:2], values[4], *values[2:4])
        changes = {"schedule": {"interval": interval}, "forecast": {"order": order}}
        name, preset = f"{TAYLOR} (N = {interval}, D = {order})", f"{prefix}-taylorseer"
        if skipped:
            tau_q, tau_kv, degrade = (percent / 100 for percent in skipped)
            changes |= {"reuse": {"tau_q": tau_q, "degrade_below": degrade}, "skip": {"tau_kv": tau_kv}}
            name = f"{OMNI} ({values[0]}%, {values[1]}%, {interval}, {order}, {values[4]}%)"
            preset = f"{prefix}-flashomni-paper"
        yield Setting(table, name, load_preset(preset, model=family, **changes), psnr, sparsity)
    if model in FG_ATTN:
        table, preset = FG_ATTN[model]
        for name, changes in MASKS.items():
            yield Setting(table, name, load_preset(preset, model=family, **changes))
    for name in PRESETS:
        yield Setting("Presets", name, load_preset(name, model=family))
