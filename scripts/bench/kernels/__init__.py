"""Benchmarks that check before they time: every op against float64, then beside what a user could run instead.

``python -m scripts.bench.kernels`` needs torch, and Triton and matplotlib where there are any; diffusers and presets it
does without.
"""
