"""Kernels compiled for GPUs that are not available; see compiled_kernels.py."""
