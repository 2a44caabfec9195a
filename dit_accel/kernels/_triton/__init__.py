"""Triton kernels for sm80 and later, imported by the first call that needs them."""
