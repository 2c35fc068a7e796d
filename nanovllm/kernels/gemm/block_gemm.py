"""Launches the GEMM for FP8 with scales of blocks, on Hopper, for decodes with more than 32 rows
(block_gemm_kernel.py).

It is faster than cuBLAS for three reasons. It has tiles for few rows. It splits the columns of a
weight with few features, where the next norm adds the parts. And it loads its first tiles of the
weight while the previous kernel still runs (programmatic dependent launch). With fewer rows,
decode_gemm.py is as fast.
"""

import sys
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.fp8 import FP8, GROUP, Fp8Rows, padded_rows
from nanovllm.kernels.gemm import hopper_gemm
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import HOPPER_MULTIPROCESSORS, pdl_options

KERNEL = "GEMM with scales of blocks"
MIN_ROWS = 33
# When the kernel is the fastest: each entry is (most rows, most elements of the weight).
LIMITS = (64, sys.maxsize), (256, 128 << 20), (512, 12 << 20)
MAX_PARTS = 3
# Microseconds, fitted to times of four models on an H200. STEP_TIMES is what a step of a program
# takes, by the rows and features of its tile. LOAD_TIME and SUMS_TIME are for 10^6 bytes of inputs
# and of a split-K's sums, and each split-K takes SPLIT_TIME more.
STEP_TIMES = {(64, 64): 0.118, (64, 128): 0.128, (128, 64): 0.29, (128, 128): 0.45}
LOAD_TIME, SPLIT_TIME, SUMS_TIME = 0.023, 0.5, 0.8
MEMORY, MAX_STAGES = 200 << 10, 8  # bytes of shared memory for the inputs of all stages


class Tile(NamedTuple):
    """How a GEMM is launched.

    Attributes:
        rows, features: of the result, per program: one of STEP_TIMES.
        parts: of the split-K.
        part_steps: steps of each part but the last one, which may have fewer. A step multiplies a
            group of columns. All parts have an even number of them.
    """

    rows: int
    features: int
    parts: int
    part_steps: int


def is_fastest(num_rows: int, weight: Tensor | Fp8Rows) -> bool:
    """Returns whether the kernel can multiply this number of rows by a weight [out, in], and is the
    fastest one."""
    if not isinstance(weight, Fp8Rows) or weight.scales.dim() == 1:
        return False
    is_fast = any(num_rows <= rows and weight.codes.numel() <= size for rows, size in LIMITS)
    return is_fast and num_rows >= MIN_ROWS and hopper_gemm.supports(KERNEL, weight.codes, (FP8,))


def multiply(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Computes x W^T + b: [N, in], [out, in], [out] -> [N, out] of the given dtype. x and the
    weight are as for ``launch``."""
    return launch(x, weight, bias, None, _choose_tile(x, weight, 1), dtype)


def multiply_add(
    x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, residual: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Computes ``multiply`` + residual, as ``decode_gemm.multiply_add`` does."""
    tile = _choose_tile(x, weight, MAX_PARTS if bias is None else 1)
    out = launch(x, weight, bias, residual, tile, residual.dtype)
    return out, None if tile.parts == 1 else residual


def _choose_tile(x: Fp8Rows, weight: Fp8Rows, most_parts: int) -> Tile:
    out_features, width = weight.codes.shape
    return choose_tile(len(x.codes), out_features, width // GROUP, most_parts)


def even_steps(num_groups: int) -> int:
    """Returns the number of steps for all groups of columns. The kernels' loops have pairs."""
    return cdiv(num_groups, 2) * 2


@cache
def choose_tile(num_rows: int, out_features: int, num_groups: int, most_parts: int) -> Tile:
    """Returns the tile that takes the least time, by a model that was fitted to times."""
    rows, num_steps = 64 if num_rows <= 64 else 128, even_steps(num_groups)
    times = {}
    for features in (64, 128):
        for parts in range(1, most_parts + 1):
            part_steps = cdiv(num_steps, 2 * parts) * 2
            tile = Tile(rows, features, cdiv(num_steps, part_steps), part_steps)
            times[tile] = _time(tile, num_rows, out_features)
    return min(times, key=times.__getitem__)


def _time(tile: Tile, num_rows: int, out_features: int) -> float:
    """Returns how long a GEMM takes, in microseconds. Programs load all of their tiles from the L2
    cache. Those of the weight, which are the same for all rows, come from memory first."""
    num_m = cdiv(num_rows, tile.rows)
    num_tiles = num_m * (out_features // tile.features) * tile.parts
    num_programs = min(num_tiles, HOPPER_MULTIPROCESSORS)
    loaded = num_programs * (tile.rows + tile.features + tile.features / num_m) * GROUP
    step_time = STEP_TIMES[tile.rows, tile.features] + LOAD_TIME * loaded / 1e6
    time = cdiv(num_tiles, num_programs) * tile.part_steps * step_time
    if tile.parts > 1:
        time += SPLIT_TIME + SUMS_TIME * tile.parts * num_rows * out_features * 4 / 1e6
    return time


def launch(
    x: Fp8Rows,
    weight: Fp8Rows,
    bias: Tensor | None,
    residual: Tensor | None,
    tile: Tile,
    dtype: torch.dtype,
) -> Tensor:
    """Computes x W^T + bias + residual.

    Args:
        x: [N, in] with scales of groups, as from ``empty_rows``, with at least one row.
        weight: [out, in] with scales of blocks, contiguous.
        bias, residual: [out] and [N, out]. The residual is added after rounding. With a split-K
            there is no bias.
        dtype: of the result, of 16 bits.

    Returns:
        [N, out]. With a split-K the parts, fp32 [parts, N, out], without the residual.
    """
    # Deferred, because Gluon is experimental: the caller can do without it.
    from nanovllm.kernels.gemm.block_gemm_kernel import block_gemm_kernel

    (num_rows, width), out_features = x.codes.shape, len(weight.codes)
    assert width % GROUP == out_features % GROUP == 0
    assert num_rows > 0 and weight.scales.is_contiguous()
    assert residual is None or (
        residual.is_contiguous() and residual.shape == (num_rows, out_features)
    )
    rows, features, parts, part_steps = tile
    num_groups, num_steps = width // GROUP, even_steps(width // GROUP)
    num_m, num_n = cdiv(num_rows, rows), out_features // features
    if parts > 1:
        assert bias is None
        residual = None
        out = x.codes.new_empty(parts, num_rows, out_features, dtype=torch.float32)
    else:
        out = x.codes.new_empty(num_rows, out_features, dtype=dtype)
    stage_bytes = (rows + features) * GROUP + 4 * rows
    # For each thread of a consumer. The kernels before and after, which end and start meanwhile,
    # have the rest.
    registers = 216 if (rows, features) == (128, 128) else 144
    block_gemm_kernel[(min(num_m * num_n * parts, HOPPER_MULTIPROCESSORS),)](
        *describe_blocks(x, weight.codes, rows, features),
        weight.scales,
        bias,
        residual,
        out,
        num_rows,
        out_features,
        num_groups,
        num_m,
        num_n,
        parts,
        part_steps,
        num_steps,
        ROWS=rows,
        FEATURES=features,
        STAGES=min(MAX_STAGES, MEMORY // stage_bytes, num_steps - (parts - 1) * part_steps),
        REGISTERS=registers,
        num_warps=4,
        maxnreg=(2 * registers + 24) // 3,  # on average, with the producer's 24
        **pdl_options(out),
    )
    return out


def describe_blocks(x: Fp8Rows, codes: Tensor, rows: int, features: int) -> tuple[Any, Any, Any]:
    """Describes x, as from ``empty_rows``, the FP8 numbers [out, in] of a weight, and the scales of
    x to the TMA, which loads boxes of ``rows`` and ``features`` rows."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    num_rows, width = x.codes.shape
    padded, layout = padded_rows(num_rows), NVMMASharedLayout(128, 8, 2)
    assert x.scales.stride() == (1, padded) and codes.is_contiguous()
    # A box that lies past the end in part takes much longer to load. So what is described is the
    # memory of x, which is whole tiles for up to 256 rows.
    x_codes = x.codes.as_strided((padded, width), (width, 1))
    x_scales = x.scales.as_strided((width // GROUP, padded), (padded, 1))
    return (
        TensorDescriptor.from_tensor(x_codes, [rows, GROUP], layout),
        TensorDescriptor.from_tensor(codes, [features, GROUP], layout),
        TensorDescriptor.from_tensor(x_scales, [1, rows], NVMMASharedLayout(0, 32, 2)),
    )
