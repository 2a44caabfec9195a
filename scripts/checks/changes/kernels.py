"""Mistakes in `dit_accel/kernels`: samples, heads, boundaries and dtypes."""

from __future__ import annotations

from scripts.checks.changes.mutant import Mutant

KERNELS = "dit_accel/kernels"
TEST_KERNELS = "tests/kernels"

MUTANTS = [
    Mutant(
        "single-keys-of-the-first-sample",
        f"{KERNELS}/slices.py",
        "computes = plan.mask64[b] >> h & 1",
        "computes = plan.mask64[0] >> h & 1",
        "each sample counts the single keys of its own rows",
        f"{TEST_KERNELS}/test_slices.py",
    ),
    Mutant(
        "a-row-without-candidates",
        f"{KERNELS}/classification.py",
        "critical.clamp(min=1).minimum(count)",
        "critical.clamp(min=1)",
        "a row without candidates has no critical tile",
        f"{TEST_KERNELS}/test_classification.py",
    ),
    Mutant(
        "one-plus-scale-in-half",
        f"{KERNELS}/norm_modulate.py",
        "unit * (1 + scale.float())",
        "unit * (1 + scale).float()",
        "modulation is computed in float32",
        f"{TEST_KERNELS}/test_norm_modulate.py",
    ),
    Mutant(
        "a-nested-capture-ends-both",
        f"{KERNELS}/kept.py",
        "        _THREAD.capture = before\n",
        "        _THREAD.capture = None\n",
        "a capture inside of another ends alone",
        f"{TEST_KERNELS}/test_kept.py",
    ),
    Mutant(
        "doubles-summed-in-float32",
        f"{KERNELS}/forecast.py",
        "torch.promote_types(history[0].dtype, torch.float32)",
        "torch.float32",
        "features in float64 are summed in float64",
        f"{TEST_KERNELS}/test_forecast.py",
    ),
    Mutant(
        "values-of-another-head",
        f"{KERNELS}/attention.py",
        "probabilities @ v[b, key, h // kv_group]",
        "probabilities @ v[b, key, h % v.shape[2]]",
        "query heads that share a key head read its values",
        f"{TEST_KERNELS}/test_attention_masks.py",
    ),
]
