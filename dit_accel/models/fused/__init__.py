"""Hand-written blocks of FLUX, HunyuanVideo and Wan: fused kernels, GEMM-Q and GEMM-O, FlashOmni's heads."""
