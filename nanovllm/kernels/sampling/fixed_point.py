"""Sums of floating-point weights that do not depend on the order of addition.

PyTorch chooses the order by the shape of a tensor, and by the number of threads. Integer addition
is associative, so sums of fixed-point numbers are the same in any order.
"""

import torch

# A sum of 2^20 weights fits into int64. The error of a sum over a vocabulary of 2^17 tokens is at
# most 2^-25.
FRACTION_BITS = 42


def to_fixed_point(weights: torch.Tensor) -> torch.Tensor:
    """Converts fp32 weights from 0 to 128 to int64 multiples of 2^-FRACTION_BITS."""
    return (weights * 2.0**FRACTION_BITS).long()


def from_fixed_point(total: torch.Tensor) -> torch.Tensor:
    """Converts int64 sums of fixed-point weights to fp32."""
    return (total.double() * 2.0**-FRACTION_BITS).float()
