"""Kernels of mixtures of experts: routing, sorting tokens by expert, and grouped GEMMs.

N is the number of tokens, k the number of experts that each is routed to, and E the number of
experts. An assignment is a pair of a token and one of its k experts. Token t has the assignments
t * k to t * k + k - 1. The host never waits for the device, and the sizes of all buffers depend
only on N, k and E, so CUDA graphs can capture these kernels.
"""
