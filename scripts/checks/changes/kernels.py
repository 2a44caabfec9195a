"""Mistakes in `dit_accel/kernels`: samples, heads, boundaries and dtypes."""

from scripts.checks.changes.mutant import Mutant, table

# fmt: off
MUTANTS: list[Mutant] = table({
    "dit_accel/kernels/plans/lowering.py": [
        ("single-keys-of-the-first-sample", "each sample counts the single keys of its own rows",
         "tests/kernels/test_slices.py",
         "computes = plan.mask64[b] >> h & 1", "computes = plan.mask64[0] >> h & 1")],
    "dit_accel/kernels/plans/classification.py": [
        ("a-row-without-candidates", "a row without candidates has no critical tile",
         "tests/kernels/test_classification.py",
         "critical.clamp(min=1).minimum(count)", "critical.clamp(min=1)")],
    "dit_accel/kernels/blocks/norm_modulate.py": [
        ("one-plus-scale-in-half", "modulation is computed in float32", "tests/kernels/test_norm_modulate.py",
         "unit * (1 + scale.float())", "unit * (1 + scale).float()")],
    "dit_accel/kernels/kept.py": [
        ("a-nested-capture-ends-both", "a capture inside of another ends alone", "tests/kernels/test_kept.py",
         "        _THREAD.capture = before\n", "        _THREAD.capture = None\n")],
    "dit_accel/kernels/blocks/forecast.py": [
        ("doubles-summed-in-float32", "features in float64 are summed in float64", "tests/kernels/test_forecast.py",
         "torch.promote_types(first.dtype, torch.float32)", "torch.float32")],
    "dit_accel/kernels/attention/attention.py": [
        ("values-of-another-head", "query heads that share a key head read its values",
         "tests/kernels/test_attention.py",
         "probabilities @ v[b, key, h // kv_group]", "probabilities @ v[b, key, h % v.shape[2]]")],
})
