"""CUDA C++ kernels, compiled at first use by the NVRTC that comes with torch; imported in the call that needs them."""
