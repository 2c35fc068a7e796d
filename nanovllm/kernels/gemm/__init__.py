"""GEMM kernels: x [N, in] times the transpose of a weight [out, in]. ``nanovllm.quantization``
chooses among them."""
