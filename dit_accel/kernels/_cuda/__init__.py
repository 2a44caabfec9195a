"""CUDA C++ kernels, compiled at first use by torch's NVRTC and imported by the first call that needs them."""
