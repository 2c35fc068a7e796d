"""Quantisation to FP8 (e4m3) with one fp32 scale for each row.

A row's scale is its largest magnitude divided by the largest FP8 number, so it depends on nothing
but the row itself. The KV cache quantises each key and value in this way. Linear layers with FP8
weights quantise each row of their weight and of their input.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.utils.triton_compat import by_device, pdl_options, pdl_wait, tl, triton

FP8 = torch.float8_e4m3fn
MAX_FP8, SMALLEST = 448.0, 1e-30


class Fp8Rows(NamedTuple):
    """A matrix in FP8. A row is its FP8 numbers times its scale.

    Attributes:
        codes: float8_e4m3fn [N, D].
        scales: fp32 [N].
    """

    codes: Tensor
    scales: Tensor


def quantize(x: Tensor) -> Fp8Rows:
    """Quantises vectors x [..., D] to FP8.

    Returns:
        The FP8 numbers [..., D], and the scales, fp32 [...]. A vector of zeros stays zero. A vector
        with NaN or infinite elements becomes NaN.
    """
    x = x.float()
    scale = x.abs().amax(-1).clamp(min=SMALLEST) / MAX_FP8
    return Fp8Rows((x * (1 / scale).unsqueeze(-1)).to(FP8), scale)


def dequantize(x: Fp8Rows, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the vectors that ``quantize`` has quantised, rounded."""
    return (x.codes.float() * x.scales.unsqueeze(-1)).to(dtype)


@triton.jit
def fp8_scale(largest):
    """Returns the scales of vectors with the given largest magnitudes, and the reciprocals of the
    scales. They are rounded as those of ``quantize``."""
    # Literals, because each launch compares the global variables that a kernel uses.
    scale = tl.div_rn(tl.maximum(largest, 1e-30), 448.0)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def quantize_tile(x):
    """Quantises the rows of x [N, D]. Returns FP8 numbers [N, D], and the scales [N, 1]."""
    x = x.to(tl.float32)
    scale, inverse = fp8_scale(tl.max(tl.abs(x), axis=1)[:, None])
    return (x * inverse).to(tl.float8e4nv), scale


@triton.jit
def store_quantized(out_ptr, scale_ptr, row, x, mask, WIDTH: tl.constexpr):
    """Quantises a row x [D], which is zero where ``mask`` is False, and stores it."""
    x = x.to(tl.float32)
    scale, inverse = fp8_scale(tl.max(tl.abs(x), axis=0))
    column = tl.arange(0, x.shape[0])
    tl.store(out_ptr + row * WIDTH + column, (x * inverse).to(tl.float8e4nv), mask=mask)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    mask = column < WIDTH
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * WIDTH + column, mask=mask, other=0.0)
    store_quantized(out_ptr, scale_ptr, row, x, mask, WIDTH)


def quantize_rows_triton(x: Tensor) -> Fp8Rows:
    assert x.is_contiguous() and x.dim() == 2
    out = empty_rows(x, x.size(1))
    width = x.size(1)
    _quantize_kernel[(len(x),)](
        x, *out, WIDTH=width, num_warps=num_warps_of(width), **pdl_options(x)
    )
    return out


def empty_rows(x: Tensor, width: int) -> Fp8Rows:
    """Allocates the result of quantising rows of ``width`` columns, as many as x has."""
    return Fp8Rows(x.new_empty(len(x), width, dtype=FP8), x.new_empty(len(x), dtype=torch.float32))


def num_warps_of(width: int) -> int:
    """Returns the number of warps of a program that processes a whole row."""
    return min(8, max(1, triton.next_power_of_2(width) // 512))


# ``quantize`` for matrices.
quantize_rows = by_device(quantize, quantize_rows_triton)
