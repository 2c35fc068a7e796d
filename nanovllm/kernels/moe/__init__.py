"""Kernels of mixtures of experts: routing, sorting tokens by expert, and grouped GEMMs.

N is the number of tokens, k the number of experts that each is routed to, and E the number of
experts. An assignment is one token at one of its k experts: token t has the assignments t k to
t k + k - 1. The host never waits for the device, and every buffer's size depends on N, k and E
alone, so CUDA graphs can capture all of it.
"""
