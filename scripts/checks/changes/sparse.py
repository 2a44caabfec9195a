"""Mistakes in `dit_accel/sparse` and `dit_accel/sla`: masks and projections, and what a swap leaves."""

from __future__ import annotations

from scripts.checks.changes.mutant import Mutant

SLA = "dit_accel/sla"
SPARSE = "dit_accel/sparse"
TEST_SLA = "tests/sla"
TEST_SPARSE = "tests/sparse"

MUTANTS = [
    Mutant(
        "an-error-of-other-masks",
        f"{SPARSE}/site_state.py",
        "adjusted(self.drawn_growth, error, target)",
        "adjusted(self.growth, error, target)",
        "a measured error belongs to the growth of its masks",
        f"{TEST_SPARSE}/test_tile_site.py",
    ),
    Mutant(
        "residuals-off-the-account",
        f"{SPARSE}/site_state.py",
        "*symbols, tiles.residual, heads.bias_stack):",
        "*symbols, heads.bias_stack):",
        "memory of residuals is counted",
        f"{TEST_SPARSE}/test_tile_site.py",
    ),
    Mutant(
        "window-of-another-layer",
        f"{SPARSE}/policies/static.py",
        "return _SYMBOLS.get(key, lambda",
        "return _SYMBOLS.get((layout, config.pattern, *key[3:]), lambda",
        "layers with another window have masks of their own",
        f"{TEST_SPARSE}/policies/test_static.py",
    ),
    Mutant(
        "projection-of-another-dtype",
        f"{SPARSE}/projections.py",
        "key = site, like.device, like.dtype",
        "key = site, like.device",
        "a projection has the dtype of its queries",
        f"{TEST_SLA}/test_swap.py",
    ),
    Mutant(
        "coordinates-without-a-bias",
        f"{SPARSE}/site_state.py",
        "            heads.bias_coordinates = heads.bias_coordinates[:values]\n",
        "",
        "each bias of a shortened stack has one coordinate",
        f"{TEST_SPARSE}/test_tile_site.py",
    ),
    Mutant(
        "a-swap-leaves-its-hook",
        f"{SLA}/swap.py",
        "            module.processor.calls.remove()\n",
        "",
        "a restored swap leaves no hook on the transformer",
        f"{TEST_SLA}/test_swap.py",
    ),
    Mutant(
        "a-failed-save-loses-the-swap",
        f"{SLA}/swap.py",
        "    try:\n        _save_transformers(pipe, folder)\n    finally:\n        _put_in(pipe, attentions)",
        "    _save_transformers(pipe, folder)\n    _put_in(pipe, attentions)",
        "attention stays swapped if saving fails",
        f"{TEST_SLA}/test_swap.py",
    ),
]
