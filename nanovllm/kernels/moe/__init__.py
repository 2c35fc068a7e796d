"""Kernels of mixtures of experts: routing, sorting tokens by expert, and grouped GEMMs.

N is the number of tokens, k the number of experts that each is routed to, E the number of experts,
and I the intermediate size of an expert on this rank. An assignment is a pair of a token and one of
its k experts. Token t has the assignments t * k to t * k + k - 1. The host never waits for the
device, and the sizes of all buffers depend only on N, k, E and the tile size, so CUDA graphs can
capture these kernels.
"""
