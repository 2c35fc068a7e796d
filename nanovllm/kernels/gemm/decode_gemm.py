"""Launches the GEMM for decode steps with up to MAX_ROWS rows, on Hopper (decode_gemm_kernel.py).

It is faster than cuBLAS for two reasons. Its programs load their first tiles of the weight while
the previous kernel still runs (programmatic dependent launch), which cuBLAS does not. And a
split-K needs no kernel that adds the parts, where the next norm does.
"""

import sys
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.fallback import run_or_replace
from nanovllm.kernels.fp8 import FP8, GROUP, Fp8Rows
from nanovllm.kernels.gemm import hopper_gemm
from nanovllm.kernels.gemm.split_k import add_parts
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import HOPPER_MULTIPROCESSORS, pdl_options

KERNEL = "GEMM for decodes"
DTYPES = *hopper_gemm.DTYPES, FP8
MAX_ROWS = 256
# When the kernel is the fastest: each entry is (most rows, most elements of the weight). LIMITS is
# for 16-bit weights, of which those with over MAX_COLUMNS input features have only the first entry.
# FP8_LIMITS is for FP8 with scales of rows, BLOCK_LIMITS for FP8 with scales of blocks.
LIMITS = (64, sys.maxsize), (128, 128 << 20), (MAX_ROWS, 8 << 20)
FP8_LIMITS = (64, sys.maxsize), (128, 128 << 20), (MAX_ROWS, 88 << 20)
BLOCK_LIMITS = ((32, sys.maxsize),)
MAX_COLUMNS = 16 << 10
MIN_PART_COLUMNS = 1024
SHORT_ROW = 2 << 10  # bytes of a row of the weight, or of its part
EARLY_ROW, EARLY_ROW_OF_MANY = 4 << 10, 3 << 10  # bytes, with up to 64 rows of x and with more
MAX_GROUP_COLUMNS = 5120  # of a part that is not long
SPLIT_BYTES = 250 << 10  # what a multiprocessor loads in the time that one more part takes
ROW_TILES = 8, 16, 32, 64, 96, 128
MEMORY = 208 << 10, 110 << 10, 72 << 10  # bytes for a program, if one, two or three share an SM


class Tile(NamedTuple):
    """How a GEMM is launched.

    Attributes:
        features: output features per program, 64 or 128.
        rows: rows of x per program, one of ROW_TILES.
        columns: input features per step.
        stages: number of steps whose inputs are in shared memory at a time.
        part_columns: input features of each part of the split-K but the last one, a multiple of
            ``columns``. The number of input features or more, if there is one part.
    """

    features: int
    rows: int
    columns: int
    stages: int
    part_columns: int


def is_fastest(num_rows: int, weight: Tensor | Fp8Rows) -> bool:
    """Returns whether the kernel can multiply this number of rows by a weight [out, in], and is the
    fastest one. With many rows of a large weight cuBLAS is faster."""
    if isinstance(weight, Fp8Rows):
        limits = BLOCK_LIMITS if weight.scales.dim() > 1 else FP8_LIMITS
        weight = weight.codes
    else:
        limits = LIMITS[:1] if weight.size(1) > MAX_COLUMNS else LIMITS
    is_fast = any(num_rows <= rows and weight.numel() <= size for rows, size in limits)
    return is_fast and num_rows > 0 and hopper_gemm.supports(KERNEL, weight, DTYPES)


def multiply(
    x: Tensor | Fp8Rows, weight: Tensor | Fp8Rows, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Computes x W^T + b: [N, in], [out, in], [out] -> [N, out] of the given dtype. x and the
    weight are as for ``launch``. If few programs would multiply, the columns are split among more,
    and another kernel adds the parts."""
    num_rows, width, out_features, itemsize, has_groups = _sizes(x, weight)
    part_columns = width
    if cdiv(out_features, 64) <= HOPPER_MULTIPROCESSORS // 4:
        tile = choose_tile(num_rows, out_features, width, None, itemsize, has_groups)
        part_columns = tile.part_columns
    if part_columns >= width:
        return launch(x, weight, bias, part_columns=width, dtype=dtype)
    parts = launch(x, weight, part_columns=part_columns)
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    add_parts(parts, bias, None, out)
    return out


def multiply_add(
    x: Tensor | Fp8Rows, weight: Tensor | Fp8Rows, bias: Tensor | None, residual: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Computes ``multiply`` + residual.

    Returns:
        (sum [N, out], None), or (parts of a split-K, fp32 [parts, N, out], residual), which the
        next norm adds.
    """
    out = launch(x, weight, bias, residual, dtype=residual.dtype)
    return out, None if out.dim() == 2 else residual


def decode_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x W^T + b: [N, in], [out, in], [out] -> [N, out]. Falls back to ``F.linear`` if the
    kernel does not compile."""
    return run_or_replace(
        KERNEL,
        x.device,
        lambda: multiply(x, weight, bias, x.dtype),
        lambda: F.linear(x, weight, bias),
    )


def decode_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes ``silu_and_mul(decode_linear(x, weight, bias))``: [N, in], [2 I, in], [2 I] ->
    [N, I]."""
    return run_or_replace(
        KERNEL,
        x.device,
        lambda: launch(x, weight, bias, swiglu=True),
        lambda: silu_and_mul(F.linear(x, weight, bias)),
    )


def decode_linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Computes ``decode_linear(x, weight, bias)`` + residual, as ``multiply_add`` does."""
    return run_or_replace(
        KERNEL,
        x.device,
        lambda: multiply_add(x, weight, bias, residual),
        lambda: (F.linear(x, weight, bias), residual),
    )


@cache
def choose_tile(
    num_rows: int,
    out_features: int,
    width: int,
    part_columns: int | None = None,
    itemsize: int = 2,
    has_groups: bool = False,
) -> Tile:
    """Returns the tile for a number of rows, by rules that were fitted to times on an H200.

    The time is mainly that of loading inputs. So with more than 64 rows, the tile is the one with
    which a multiprocessor loads the fewest bytes, where each part of a split-K after the first
    counts as SPLIT_BYTES. If rows of the weight are short, that is an average: programs soon end,
    and others start. Otherwise it is what the busiest multiprocessor loads. If there is one program
    for each of them, it takes most of the shared memory. Otherwise up to three programs share a
    multiprocessor, so that some load while others start or end.

    Args:
        part_columns: see ``Tile``; None to choose it.
        itemsize: bytes of an element, 1 or 2.
        has_groups: whether each group of GROUP columns has scales.
    """
    candidates = []
    # With groups each thread has three times as many sums, too many for tiles of 128 rows.
    for most in (64,) if has_groups else (64, 128):
        features, rows = 64, next(size for size in ROW_TILES if size >= min(num_rows, most))
        tiles = cdiv(num_rows, rows) * cdiv(out_features, 64)
        part = part_columns or _part_columns(tiles, num_rows, width, itemsize, has_groups)
        parts, part_bytes = cdiv(width, part), min(part, width) * itemsize
        programs, waves = tiles * parts, cdiv(tiles * parts, HOPPER_MULTIPROCESSORS)
        if part_bytes <= SHORT_ROW:
            programs = max(programs, HOPPER_MULTIPROCESSORS)
        else:
            is_wide = waves == 2 and parts == 1 and out_features % 128 == 0
            if is_wide and rows in (64, 128) and not has_groups:
                features, waves = 128, 1
            programs = waves * HOPPER_MULTIPROCESSORS
        size = programs * (features + rows) * part_bytes
        size += SPLIT_BYTES * HOPPER_MULTIPROCESSORS * (parts - 1)
        candidates.append((size, features, rows, part, waves))
    _, features, rows, part, waves = min(candidates)
    atom = 128 // itemsize  # columns that the layout of shared memory swizzles
    columns = atom
    if has_groups:
        columns = GROUP
    elif rows <= 32:
        columns = 4 * atom if waves == 1 and (part >= width or part % (4 * atom) == 0) else 2 * atom
    elif rows == features == 64 and waves == 1:
        columns = 2 * atom
    memory = MEMORY[min(waves, len(MEMORY)) - 1]
    stages = memory // ((features + next_power_of_2(rows)) * columns * itemsize)
    num_steps = cdiv(min(part, width), columns)
    if has_groups:  # pairs of stages
        num_steps += num_steps % 2
        stages = max(stages // 2 * 2, 4)
    return Tile(features, rows, columns, min(stages, 12 if has_groups else 8, num_steps), part)


def _part_columns(tiles: int, num_rows: int, width: int, itemsize: int, has_groups: bool) -> int:
    """Returns the input features of a part: all of them, or a multiple of four times what shared
    memory swizzles.

    Programs for this number of tiles then occupy half of the multiprocessors. A third is enough if
    a program can load most of its weights while the previous kernel runs. With groups a program
    waits at every step, so two of them may share a multiprocessor if their parts are long.
    """
    parts, columns, multiple = 1, width, 4 * 128 // itemsize
    early_row = EARLY_ROW if num_rows <= 64 else EARLY_ROW_OF_MANY
    while True:
        is_early = columns * itemsize <= early_row and not has_groups
        enough = HOPPER_MULTIPROCESSORS // (3 if is_early else 2)
        is_long = has_groups and columns > MAX_GROUP_COLUMNS
        if is_long and (parts + 1) * tiles <= 2 * HOPPER_MULTIPROCESSORS:
            enough = (parts + 1) * tiles
        if parts * tiles >= enough:
            return columns
        fewer = cdiv(cdiv(width, parts + 1), multiple) * multiple
        if fewer < MIN_PART_COLUMNS:
            return columns
        parts, columns = parts + 1, fewer


def _sizes(x: Tensor | Fp8Rows, weight: Tensor | Fp8Rows) -> tuple[int, int, int, int, bool]:
    """Returns the numbers of rows, of input and output features, the bytes of an element, and
    whether groups have scales."""
    codes = x.codes if isinstance(x, Fp8Rows) else x
    has_groups = isinstance(x, Fp8Rows) and x.scales.dim() > 1
    out_features = len(weight.codes if isinstance(weight, Fp8Rows) else weight)
    return *codes.shape, out_features, codes.itemsize, has_groups


def launch(
    x: Tensor | Fp8Rows,
    weight: Tensor | Fp8Rows,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    part_columns: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes x W^T + bias + residual, or SwiGLU of x W^T + bias.

    Args:
        x: [N, in], contiguous, with at least one row.
        weight: [out, in], contiguous. Both may be in FP8, with scales of rows, or of groups of x
            and blocks of the weight.
        bias, residual: [out] and [N, out]. The residual is added after rounding.
        part_columns: see ``Tile``; None to choose it. With a bias or SwiGLU there is one part.
        dtype: of the result, by default that of x.

    Returns:
        [N, out], or [N, out / 2] with ``swiglu``. With a split-K the parts, fp32 [parts, N, out],
        without the residual.
    """
    # Deferred, because Gluon is experimental: the caller can do without it.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from nanovllm.kernels.gemm.decode_gemm_kernel import decode_gemm_kernel

    num_rows, width, out_features, itemsize, has_groups = _sizes(x, weight)
    if bias is not None or swiglu:
        part_columns = width
    tile = choose_tile(num_rows, out_features, width, part_columns, itemsize, has_groups)
    x_scales = weight_scales = None
    if isinstance(x, Fp8Rows):
        assert isinstance(weight, Fp8Rows) and not swiglu
        (x, x_scales), (weight, weight_scales) = x, weight
    assert isinstance(weight, Tensor)
    assert num_rows > 0 and x.is_contiguous() and weight.is_contiguous()
    assert not has_groups or width % GROUP == out_features % GROUP == 0
    assert residual is None or (
        residual.is_contiguous() and residual.shape == (num_rows, out_features)
    )
    parts = cdiv(width, tile.part_columns)
    assert parts == 1 or tile.part_columns % tile.columns == 0
    grid = cdiv(num_rows, tile.rows), cdiv(out_features, tile.features), parts
    layout = NVMMASharedLayout(128, 8 * x.itemsize, 2)
    box_rows = tile.rows & -tile.rows  # the largest power of two that divides it
    x_desc = TensorDescriptor.from_tensor(x, [box_rows, tile.columns], layout)
    weight_desc = TensorDescriptor.from_tensor(weight, [tile.features, tile.columns], layout)
    if swiglu:
        assert residual is None
        out_features //= 2
        # A box has 8 rows of gate, the same 8 of up, the next 8 of gate, and so on: 16 rows are
        # those of a warp, and each thread has the sums of its rows i and i + 8.
        weight_desc = TensorDescriptor(
            weight,
            [out_features // 8, 2, 8, width],
            [8 * width, out_features * width, width, 1],
            [tile.features // 16, 2, 8, tile.columns],
            NVMMASharedLayout(128, 16, 4),
        )
    if parts > 1:
        out = x.new_empty(parts, num_rows, out_features, dtype=torch.float32)
        residual = None
    else:
        out = x.new_empty(num_rows, out_features, dtype=dtype)
    num_steps = cdiv(min(tile.part_columns, width), tile.columns)
    if has_groups:
        assert x_scales is not None and x_scales.stride(0) == 1
        num_steps += num_steps % 2  # its columns are past the end, and zero
    decode_gemm_kernel[grid](
        x_desc,
        weight_desc,
        x_scales,
        weight_scales,
        bias,
        residual,
        out,
        num_rows,
        out_features,
        tile.part_columns,
        num_steps,
        x_scales.stride(1) if x_scales is not None and has_groups else 0,
        FEATURES=tile.features,
        ROWS=tile.rows,
        BLOCK_ROWS=next_power_of_2(tile.rows),
        COLUMNS=tile.columns,
        STAGES=tile.stages,
        IS_WHOLE=num_steps == tile.stages and not has_groups,
        ITEMSIZE=x.itemsize,
        HAS_GROUPS=has_groups,
        SWIGLU=swiglu,
        num_warps=tile.features // 16,
        **pdl_options(x),
    )
    return out
