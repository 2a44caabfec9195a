"""Kernels compiled for GPUs that are not at hand; see compiled_kernels.py."""
