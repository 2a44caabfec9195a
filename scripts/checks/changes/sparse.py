"""Mistakes in `dit_accel/sparse` and `dit_accel/sla`: masks and projections, and what a swap leaves."""

from scripts.checks.changes.mutant import Mutant, table

# fmt: off
MUTANTS: list[Mutant] = table({
    "dit_accel/sparse/site_state.py": [
        ("an-error-of-other-masks", "a measured error belongs to the growth of its masks",
         "tests/sparse/test_tile_site.py",
         "adjusted(self.drawn_growth, error, target)", "adjusted(self.growth, error, target)"),
        ("residuals-off-the-account", "memory of residuals is counted", "tests/sparse/test_tile_site.py",
         "*symbols, tiles.residual, heads.bias_stack):", "*symbols, heads.bias_stack):"),
        ("coordinates-without-a-bias", "each bias of a shortened stack has one coordinate",
         "tests/sparse/test_tile_site.py",
         "            heads.bias_coordinates = heads.bias_coordinates[:values]\n", "")],
    "dit_accel/sparse/policies/static.py": [
        ("window-of-another-layer", "layers with another window have masks of their own",
         "tests/sparse/policies/test_static.py",
         "return _SYMBOLS.get(key, lambda", "return _SYMBOLS.get((layout, config.pattern, *key[3:]), lambda")],
    "dit_accel/sparse/policies/vsa.py": [
        ("keys-of-no-token", "places of no token are hidden as keys", "tests/sparse/policies/test_vsa.py",
         "< kinds[:, None, None]", ">= 0 * kinds[:, None, None]"),
        ("means-of-places", "a smaller cube's mean is over its own tokens", "tests/sparse/policies/test_vsa.py",
         "(sums / self.sizes[:, None, None])", "(sums / PLACES)")],
    "dit_accel/sparse/policies/sla.py": [
        ("linear-on-marginal-alone", "linear attention of TurboWan covers all", "tests/sparse/policies/test_vsa.py",
         'if config.linear == "all":', 'if config.linear == "none":')],
    "dit_accel/sparse/projections.py": [
        ("projection-of-another-dtype", "a projection has the dtype of its queries", "tests/sla/test_swap.py",
         "(site, like.device, like.dtype)", "(site, like.device)")],
    "dit_accel/sla/swap.py": [
        ("a-swap-leaves-its-hook", "a restored swap leaves no hook on the transformer", "tests/sla/test_swap.py",
         "            module.processor.calls.handle.remove()\n", ""),
        ("a-failed-save-loses-the-swap", "attention stays swapped if saving fails", "tests/sla/test_swap.py",
         "    try:\n        _save_transformers(pipe, folder)\n    finally:\n        _put_in(pipe, attentions)",
         "    _save_transformers(pipe, folder)\n    _put_in(pipe, attentions)")],
})
