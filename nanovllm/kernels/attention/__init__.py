"""Attention over the paged KV cache: the kernels, and the backends that use them."""
