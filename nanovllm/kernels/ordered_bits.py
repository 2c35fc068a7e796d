"""Integers in the order of fp32 numbers, for comparing numbers and packing them with indices."""

from nanovllm.utils.triton_compat import triton


def ordered_bits(bits):
    """Maps the bits of fp32 numbers, as int32, to int32 in the order of the numbers, and back: the
    function is its own inverse. -0 is mapped to less than +0."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


ordered_bits_triton = triton.jit(ordered_bits)  # for kernels
