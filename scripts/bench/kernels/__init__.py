"""Kernel benchmarks: each op is checked against float64, then timed and compared with existing alternatives.

``python -m scripts.bench.kernels`` needs torch, and uses Triton and matplotlib if installed. It needs neither
diffusers nor presets.
"""
