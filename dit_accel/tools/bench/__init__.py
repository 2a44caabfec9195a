"""Benchmarks that check before they time: every op against float64, then beside what a user could run instead.

``dit-accel bench kernels`` and ``python -m dit_accel.tools.bench`` both run
:func:`dit_accel.tools.bench.kernels.main`, which needs torch, and Triton and matplotlib where there are any, but
neither diffusers nor a preset.
"""
