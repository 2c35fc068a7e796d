"""Attention over the paged KV cache: kernels, and the backends that use them."""
