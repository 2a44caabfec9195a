"""Tests of what a call spends beside its transformer."""

# Of float32 values up to 4: decoders' error against float64 is up to 2e-5, by the processor. A lost pixel is over 1e-2.
ROUNDING = 2e-4
