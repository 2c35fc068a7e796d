"""Quantisation to FP8 (e4m3) with one fp32 scale for each row, or for each group of its columns.

A row's scale is its largest magnitude divided by the largest FP8 number, so it depends on nothing
but the row itself. The KV cache quantises each key and value in this way. Linear layers with FP8
weights quantise each row of their weight and of their input.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import by_device, pdl_options, pdl_wait, tl, triton

FP8 = torch.float8_e4m3fn
MAX_FP8, SMALLEST = 448.0, 1e-30
GROUP = 128


class Fp8Rows(NamedTuple):
    """A matrix in FP8. A row, each group of GROUP columns of a row, or each block of GROUP x GROUP
    elements is its FP8 numbers times its scale.

    Attributes:
        codes: float8_e4m3fn [N, D].
        scales: fp32 [N], [N, D / GROUP] for groups, or [N / GROUP, D / GROUP] for blocks. Kernels
            write the scales of groups column by column, see ``empty_rows``.
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
    # A tensor, because PyTorch divides by a number through its reciprocal on a GPU.
    scale = x.abs().amax(-1).clamp(min=SMALLEST) / torch.full((), MAX_FP8, device=x.device)
    return Fp8Rows((x * (1 / scale).unsqueeze(-1)).to(FP8), scale)


def quantize_groups(x: Tensor) -> Fp8Rows:
    """Quantises groups of GROUP columns of x [N, D], with a scale for each row and group."""
    codes, scales = quantize(x.unflatten(-1, (-1, GROUP)))
    return Fp8Rows(codes.flatten(-2), scales)


def quantize_blocks(x: Tensor) -> Fp8Rows:
    """Quantises blocks of GROUP x GROUP elements of a matrix x [N, D].

    Returns:
        The FP8 numbers [N, D], and the scales, fp32 [N / GROUP, D / GROUP].
    """
    blocks = x.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP)).transpose(1, 2)
    codes, scales = quantize(blocks.flatten(2))
    return Fp8Rows(codes.view(blocks.shape).transpose(1, 2).reshape(x.shape), scales)


def dequantize(x: Fp8Rows, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the vectors that were quantised, rounded."""
    if x.scales.dim() < x.codes.dim():
        return (x.codes.float() * x.scales.unsqueeze(-1)).to(dtype)
    scales = x.scales.repeat_interleave(x.codes.size(-2) // x.scales.size(-2), -2)
    groups = x.codes.float().unflatten(-1, (scales.size(-1), -1))
    return (groups * scales.unsqueeze(-1)).to(dtype).flatten(-2)


def pack_rows(x: Fp8Rows) -> Tensor:
    """Packs FP8 rows into one tensor, uint8 [..., N, D + 4 G]: each row's numbers, then the bytes
    of its G scales. Rows of checkpoint tensors travel in this form to the layers, which may split
    or reorder them."""
    scales = x.scales.reshape(*x.codes.shape[:-1], -1).contiguous()
    return torch.cat((x.codes.view(torch.uint8), scales.view(torch.uint8)), -1)


def unpack_rows(packed: Tensor, num_groups: int) -> Fp8Rows:
    """Undoes ``pack_rows``. The scales are [..., N, num_groups]. Raises ValueError for NaN."""
    codes, scales = packed.split((packed.size(-1) - 4 * num_groups, 4 * num_groups), -1)
    check_not_nan(codes)
    return Fp8Rows(codes.contiguous().view(FP8), scales.contiguous().view(torch.float32))


def check_not_nan(codes: Tensor) -> None:
    """Raises ValueError if an FP8 number, as uint8, is NaN, as in a damaged checkpoint."""
    if (codes & 127 == 127).any():
        raise ValueError("its FP8 numbers contain NaN")


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
def fp8_values(codes, dtype: tl.constexpr):
    """Converts FP8 numbers to ``dtype``. On GPUs without FP8, ``codes`` has their bits as uint8.
    Numbers of any other dtype are converted as usual."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.int32)  # then the value times 2 ** -120, as fp32
        bits = ((bits & 128) << 24) | ((bits & 127) << 20)
        codes = bits.to(tl.float32, bitcast=True) * 2.0**120
    return codes.to(dtype)


@triton.jit
def store_quantized(out_ptr, scale_ptr, row, x, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Quantises a row x [D], which is zero from column WIDTH on, and stores it. GROUP is None for
    one scale. Otherwise each program stores one row, and memory is as from ``empty_rows``."""
    if GROUP is not None:
        NUM: tl.constexpr = x.shape[0] // GROUP
        codes, scale = quantize_tile(tl.reshape(x, (NUM, GROUP)))
        group = tl.arange(0, NUM)[:, None]
        column = group * GROUP + tl.arange(0, GROUP)[None, :]
        tl.store(out_ptr + row * WIDTH + column, codes, mask=column < WIDTH)
        num_rows = tl.num_programs(0)  # the stride is ``padded_rows`` of it
        multiple = tl.where((num_rows > 32) & (num_rows < 256), 128, 4)
        stride = tl.cdiv(num_rows, multiple) * multiple
        tl.store(scale_ptr + group * stride + row, scale, mask=group < WIDTH // GROUP)
        return
    x = x.to(tl.float32)
    scale, inverse = fp8_scale(tl.max(tl.abs(x), axis=0))
    column = tl.arange(0, x.shape[0])
    codes = (x * inverse).to(tl.float8e4nv)
    tl.store(out_ptr + row * WIDTH + column, codes, mask=column < WIDTH)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    mask = column < WIDTH
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * WIDTH + column, mask=mask, other=0.0)
    store_quantized(out_ptr, scale_ptr, row, x, WIDTH, GROUP)


def quantize_rows_triton(x: Tensor, group: int | None = None) -> Fp8Rows:
    assert x.is_contiguous() and x.dim() == 2
    width = x.size(1)
    out = empty_rows(x, width, group)
    _quantize_kernel[(len(x),)](
        x, *out, WIDTH=width, GROUP=group, num_warps=num_warps_of(width), **pdl_options(x)
    )
    return out


def empty_rows(x: Tensor, width: int, group: int | None) -> Fp8Rows:
    """Allocates the result of quantising rows of ``width`` columns, as many as x has, with a scale
    for each row or, unless it is None, each ``group`` of columns. There is memory for
    ``padded_rows`` of them, and the scales of groups lie column by column, as cuBLAS needs them."""
    num_rows, padded = len(x), padded_rows(len(x))
    codes = x.new_empty(padded, width, dtype=FP8)[:num_rows]
    if group is None:
        return Fp8Rows(codes, x.new_empty(padded, dtype=torch.float32)[:num_rows])
    assert width % group == 0
    scales = x.new_empty(width // group, padded, dtype=torch.float32)
    return Fp8Rows(codes, scales.t()[:num_rows])


def padded_rows(num_rows: int) -> int:
    """Returns for how many rows there is memory: the next multiple of four, which cuBLAS needs for
    scales of groups; and of 128 for 33 to 255 rows, with which whole tiles are loaded faster."""
    multiple = 128 if 32 < num_rows < 256 else 4
    return cdiv(num_rows, multiple) * multiple


def num_warps_of(width: int) -> int:
    """Returns the number of warps of a program that processes a whole row."""
    return min(8, max(1, next_power_of_2(width) // 512))


# ``quantize`` and ``quantize_groups`` for matrices.
quantize_rows = by_device(quantize, quantize_rows_triton)
quantize_row_groups = by_device(quantize_groups, partial(quantize_rows_triton, group=GROUP))
