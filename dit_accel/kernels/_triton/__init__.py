"""Triton kernels, sm80 and later. Imported inside the call that needs them, never at package import."""
