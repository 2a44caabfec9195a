"""Hand-written blocks of some families: fused kernels, GEMM-Q and GEMM-O, FlashOmni's heads."""
