"""Tiled GEMM for 17 to 64 rows and small weights, where launch latency dominates. With FP8 inputs
(fp8.py), for 1 to 64 rows and weights of any size.

cuBLAS requests its first weight once the previous kernel has finished. Here, with programmatic
dependent launch, programs start while that kernel still runs, and prefetch their weights into the
L2 cache while they wait for their input. If there are too few features to occupy the GPU, the
columns are split as well (split-K), and a second kernel adds the partial sums in a fixed order.

Features are the M dimension of the matmul, which has to be at least 64 in Hopper's tensor core
instructions. Rows of x are the N dimension, which may be smaller.
"""

from typing import NamedTuple

import torch

from nanovllm.kernels.gemm.split_k import add_parts
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import (
    pdl_options,
    prefetch_l2,
    shared_memory,
    tl,
    triton,
)

BLOCK_N, BLOCK_K, NUM_STAGES = 64, 128, 4
MAX_PART_COLUMNS = 512  # columns per part of a split-K
SHARED_MEMORY = 192 << 10  # bytes that a program needs; data-centre GPUs from Hopper on have them


@triton.jit
def prefetch(first_ptr, stride, columns, BLOCK_N: tl.constexpr):
    """Prefetches up to 1,024 columns of BLOCK_N rows into the L2 cache."""
    ITEMSIZE: tl.constexpr = first_ptr.dtype.element_ty.primitive_bitwidth // 8
    # Each row is one request. The requests of a warp are serialised, so only every second thread
    # makes one, which spreads them over more warps.
    thread = tl.arange(0, 2 * BLOCK_N)
    address = first_ptr + (thread // 2).to(tl.int64) * stride
    prefetch_l2(address, tl.where(thread % 2 == 0, tl.minimum(columns, 1024) * ITEMSIZE, 0))


@triton.jit(do_not_specialize=["num_rows", "group_stride"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    out_ptr,
    num_rows,
    row_stride,
    group_stride,
    out_features,
    width,
    columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    IN_FP16: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_K: tl.constexpr = BLOCK_K,
):
    """Computes BLOCK_M rows of BLOCK_N features, summed over ``columns`` columns, which are all
    columns or one part of a split-K. With scales, the result for row m and feature n is multiplied
    by the scales of row m of x and of row n of the weight. With HAS_GROUPS, each group of BLOCK_K
    columns of a row of x has a scale, at the given strides, and so has each block of BLOCK_K x
    BLOCK_K elements of the weight. With IN_FP16, FP8 numbers are converted to fp16 and multiplied.

    Sizes are not constexpr, because the compiler would unroll the loop. The kernel would then take
    longer: fetching the unrolled code, which runs once, costs more than the loop.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(2)
    begin = part * columns
    first = tl.program_id(1) * BLOCK_N
    weight_ptr += first.to(tl.int64) * width + begin
    if PDL:
        prefetch(weight_ptr, width, columns, BLOCK_N)
    feature = first + tl.arange(0, BLOCK_N)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + feature).to(tl.float32)
    if HAS_GROUPS:
        weight_scale_ptr += first // BLOCK_K * (width // BLOCK_K) + begin // BLOCK_K
    elif weight_scale_ptr is not None:
        weight_scale = tl.load(weight_scale_ptr + feature)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    column = tl.arange(0, BLOCK_K)
    # Rows past the end repeat the last row. They are not stored.
    x_ptrs = x_ptr + begin + tl.minimum(row, num_rows - 1) * width + column[:, None]
    weight_ptrs = weight_ptr + tl.arange(0, BLOCK_N)[:, None] * width + column[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    if HAS_GROUPS:
        x_scale_ptr += tl.minimum(row, num_rows - 1) * row_stride + begin // BLOCK_K * group_stride
        scale = tl.load(weight_scale_ptr) * tl.load(x_scale_ptr)
    elif x_scale_ptr is not None:
        x_scale = tl.load(x_scale_ptr + tl.minimum(row, num_rows - 1))
    for start in tl.range(0, columns, BLOCK_K):
        weight = tl.load(weight_ptrs + start)
        x = tl.load(x_ptrs + start)
        if IN_FP16:
            weight, x = weight.to(tl.float16), x.to(tl.float16)
        if HAS_GROUPS:
            # The next scales are loaded before the matmul, so that the loop does not wait for them.
            group = tl.minimum(start + BLOCK_K, columns - BLOCK_K) // BLOCK_K
            next_scale = tl.load(weight_scale_ptr + group)
            next_x_scale = tl.load(x_scale_ptr + group * group_stride)
            acc += tl.dot(weight, x) * scale
            scale = next_scale * next_x_scale
        else:
            acc = tl.dot(weight, x, acc)
    if x_scale_ptr is not None and not HAS_GROUPS:
        acc = acc * weight_scale * x_scale
    acc += bias
    address = out_ptr + (part * num_rows + row) * out_features + feature
    tl.store(address, acc.to(out_ptr.dtype.element_ty), mask=row < num_rows)


def supports(weight: torch.Tensor) -> bool:
    """Returns whether ``tile_linear`` can multiply by this weight [out, in] on its GPU."""
    out_features, width = weight.shape
    return (
        weight.dtype in (torch.float16, torch.bfloat16)
        and out_features % BLOCK_N == 0
        and width % (_num_parts(out_features, width) * BLOCK_K) == 0
        and shared_memory(weight.device) >= SHARED_MEMORY
    )


def tile_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes x W^T + b: [N, in], [out, in], [out] -> [N, out], contiguous, in half precision."""
    num_parts = _num_parts(*weight.shape)
    tile = Tile(64 if num_parts > 1 and len(x) > 32 else 32)
    return multiply_tiles(x, weight, bias, None, None, num_parts, tile, x.dtype)


class Tile(NamedTuple):
    """Sizes of a program: rows of x, features, warps, and tiles of the weight that are loaded ahead
    or in use."""

    rows: int
    features: int = BLOCK_N
    num_warps: int = 4
    num_stages: int = NUM_STAGES


def multiply_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor | None,
    num_parts: int,
    tile: Tile,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Launches the kernel.

    Args:
        x, weight, bias: [N, in], [out, in], [out], contiguous.
        x_scales, weight_scales: fp32 [N] and [out], the factors of rows; or [N, in / BLOCK_K] with
            any strides and [out / BLOCK_K, in / BLOCK_K], those of groups and blocks; or None.
        num_parts: number of parts of a split-K.
        dtype: of the result.

    Returns:
        [N, out].
    """
    out_features, width = weight.shape
    assert x.is_contiguous() and weight.is_contiguous() and x.size(1) == width
    assert out_features % tile.features == 0 and width % (num_parts * BLOCK_K) == 0
    out = x.new_empty(len(x), out_features, dtype=dtype)
    is_split = num_parts > 1
    has_groups = x_scales is not None and x_scales.dim() > 1
    strides = x_scales.stride() if x_scales is not None and has_groups else (0, 0)
    assert not has_groups or BLOCK_K % tile.features == 0
    parts = x.new_empty(num_parts, *out.shape, dtype=torch.float32) if is_split else out
    _tile_kernel[(cdiv(len(x), tile.rows), out_features // tile.features, num_parts)](
        x,
        weight,
        None if is_split else bias,
        x_scales,
        weight_scales,
        parts,
        len(x),
        *strides,
        out_features,
        width,
        width // num_parts,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.features,
        HAS_GROUPS=has_groups,
        # FP8 tensor cores add products with 14 bits, which is enough for bf16 only.
        IN_FP16=x.itemsize == 1 and dtype is not torch.bfloat16,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_options(x),
    )
    if is_split:
        add_parts(parts, bias, None, out)
    return out


def _num_parts(out_features: int, width: int) -> int:
    """Returns the number of parts of a split-K. It depends on the weight only, not on x."""
    if out_features >= 64 * BLOCK_N:
        return 1
    return next_power_of_2(cdiv(width, MAX_PART_COLUMNS))
