"""GEMMs with FP8 weights and inputs, and scales of rows, or of groups of x and blocks of W.

On Hopper, few rows are multiplied by decode_gemm.py or block_gemm.py if the result is in bf16.
Otherwise the tiles of tiled.py, which are made for the memory bandwidth, multiply up to 128 rows,
or 64 if the weight is large or has blocks. More rows are multiplied by cuBLAS through PyTorch's
``_scaled_mm``. It multiplies groups and blocks on Hopper only. Other GPUs use larger tiles for
them.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from nanovllm.kernels.fallback import run_or_replace
from nanovllm.kernels.fp8 import FP8, GROUP, Fp8Rows, dequantize, padded_rows
from nanovllm.kernels.gemm import block_gemm, decode_gemm
from nanovllm.kernels.gemm.tiled import BLOCK_K, BLOCK_N, Tile, multiply_tiles
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import is_hopper, shared_memory, use_triton

# Tiles are used for up to MAX_TILED_ROWS rows, or up to FEW_ROWS if the weight has scales of blocks
# or more than MAX_TILED_WEIGHT elements.
MAX_TILED_ROWS, FEW_ROWS, MAX_TILED_WEIGHT = 128, 64, 1 << 26
LARGE_TILE = Tile(rows=128, features=128, num_warps=8, num_stages=3)
NUM_PROGRAMS = 96  # of the 132 that fill a Hopper GPU
MIN_PART_COLUMNS = 512  # of a part of the split-K
NUM_STAGES = 6  # 48 KB of a weight, in flight or in use
MAX_INT32 = 2**31 - 1
ALIGNMENT = 16  # ``_scaled_mm`` needs sizes that are multiples of it


def fp8_linear_reference(
    x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Computes x W^T + b: [N, in], [out, in], [out] -> [N, out].

    Args:
        x: has a scale for each row or, if the weight has scales of blocks, each group of columns.
        dtype: of the result, and of the bias.
    """
    y = dequantize(x) @ dequantize(weight).t()
    return (y if bias is None else y + bias.float()).to(dtype)


def fp8_linear(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See ``fp8_linear_reference``. Chooses the kernel by the numbers of rows and features."""
    kernel = hopper_kernel(len(x.codes), weight, dtype)
    if kernel is not None:
        return run_or_replace(
            kernel.KERNEL,
            x.codes.device,
            lambda: kernel.multiply(x, weight, bias, dtype),
            lambda: fp8_linear(x, weight, bias, dtype),
        )
    num_rows = len(x.codes)
    is_bf16 = dtype is torch.bfloat16  # with a scale for each row, _scaled_mm returns only bf16
    has_groups = x.scales.dim() > 1
    is_scaled = is_bf16 and (not has_groups or has_block_matmul(weight.codes))
    is_fast_in_tiles = num_rows <= (
        FEW_ROWS if has_groups or weight.codes.numel() > MAX_TILED_WEIGHT else MAX_TILED_ROWS
    )
    is_tiled = use_triton(weight.codes) and has_tiles(weight.codes)
    if is_tiled and (is_fast_in_tiles or not is_scaled):
        return fp8_tile_linear(x, weight, bias, dtype)
    is_aligned = not any(size % ALIGNMENT for size in weight.codes.shape)
    if is_scaled and is_aligned and num_rows > FEW_ROWS:
        return (scaled_block_linear if has_groups else scaled_linear)(x, weight, bias, dtype)
    return fp8_linear_reference(x, weight, bias, dtype)


def fp8_linear_add(
    x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, residual: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Computes ``fp8_linear`` + residual, as ``decode_linear_add`` does."""
    dtype = residual.dtype
    kernel = hopper_kernel(len(x.codes), weight, dtype)
    if kernel is None:
        return fp8_linear(x, weight, bias, dtype), residual
    return run_or_replace(
        kernel.KERNEL,
        x.codes.device,
        lambda: kernel.multiply_add(x, weight, bias, residual),
        lambda: (fp8_linear(x, weight, bias, dtype), residual),
    )


def hopper_kernel(num_rows: int, weight: Fp8Rows, dtype: torch.dtype) -> ModuleType | None:
    """Returns decode_gemm.py or block_gemm.py if it has the fastest kernel for results of this
    dtype."""
    # FP8 tensor cores accumulate with 14 bits, which is enough for bf16 only.
    if dtype is not torch.bfloat16:
        return None
    kernels = decode_gemm, block_gemm
    return next((kernel for kernel in kernels if kernel.is_fastest(num_rows, weight)), None)


def has_block_matmul(weight: Tensor) -> bool:
    """Returns whether ``scaled_block_linear`` can multiply by a weight [out, in]."""
    return weight.size(1) % (4 * GROUP) == 0 and _is_hopper_with_blocks(weight.device)


@cache
def _is_hopper_with_blocks(device: torch.device) -> bool:
    """Returns whether cuBLAS multiplies blocks on a device: on Hopper, from CUDA 12.9 on."""
    if not is_hopper(device) or torch.version.cuda is None:
        return False
    return tuple(map(int, torch.version.cuda.split("."))) >= (12, 9)


def has_tiles(weight: Tensor) -> bool:
    """Returns whether ``fp8_tile_linear`` can multiply by a weight [out, in]."""
    out_features, width = weight.shape
    return out_features % BLOCK_N == 0 and width % BLOCK_K == 0


def fp8_tile_linear(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See ``fp8_linear_reference``. The sizes of the weight are as ``has_tiles`` needs them."""
    num_rows, (out_features, width) = len(x.codes), weight.codes.shape
    assert x.codes.dtype is weight.codes.dtype is FP8
    is_large = num_rows > (FEW_ROWS if x.scales.dim() > 1 else MAX_TILED_ROWS)
    if is_large and out_features % LARGE_TILE.features == 0:
        tile, parts = LARGE_TILE, 1
    else:
        tile, parts = choose_tile(num_rows, out_features, width, shared_memory(weight.codes.device))
    most_rows = MAX_INT32 // (parts * max(out_features, width))  # the kernel has 32-bit offsets
    if num_rows > most_rows:
        pieces = [Fp8Rows(*rows) for rows in zip(*(t.split(most_rows) for t in x), strict=True)]
        return torch.cat([fp8_tile_linear(piece, weight, bias, dtype) for piece in pieces])
    return multiply_tiles(x.codes, weight.codes, bias, x.scales, weight.scales, parts, tile, dtype)


def choose_tile(
    num_rows: int, out_features: int, width: int, shared_memory: int
) -> tuple[Tile, int]:
    """Returns a tile, and the number of parts of a split-K: the least that makes NUM_PROGRAMS
    programs, if each part has MIN_PART_COLUMNS columns or more."""
    rows = next(rows for rows in (16, 32, 64, 128) if rows >= min(num_rows, MAX_TILED_ROWS))
    if cdiv(num_rows, rows) * out_features < NUM_PROGRAMS * BLOCK_N // 2:
        rows = min(rows, 64)
    num_tiles = cdiv(num_rows, rows) * out_features // BLOCK_N
    parts = 1
    while (
        parts * num_tiles < NUM_PROGRAMS
        and width % (2 * parts * BLOCK_K) == 0
        and width >= 2 * parts * MIN_PART_COLUMNS
    ):
        parts *= 2
    num_stages = min(NUM_STAGES, shared_memory // ((rows + BLOCK_N) * BLOCK_K))
    return Tile(rows, num_stages=num_stages), parts


def scaled_linear(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See ``fp8_linear_reference``, with x as from ``empty_rows``, bf16 results, sizes that are
    multiples of ALIGNMENT, and more than FEW_ROWS rows. With one row its test failed (PyTorch 2.11,
    H200). What is in the rows after the last one does not matter."""
    num_rows, width = x.codes.shape
    # 256 rows are faster than 129 to 255. Up to 128, more rows have not been timed.
    padded = padded_rows(num_rows) if num_rows > 128 else cdiv(num_rows, 4) * 4
    return torch._scaled_mm(
        x.codes.as_strided((padded, width), (width, 1)),
        weight.codes.t(),
        x.scales.as_strided((padded, 1), (1, 1)),
        weight.scales[None, :],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )[:num_rows]


def scaled_block_linear(
    x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See ``fp8_linear_reference``, with groups of x as from ``empty_rows``, blocks of the weight,
    bf16 results, and a width that is a multiple of 4 GROUP."""
    num_rows, width = x.codes.shape
    num_groups, padded = x.scales.size(1), padded_rows(num_rows)
    assert x.scales.stride() == (1, padded)
    out = torch._scaled_mm(
        x.codes.as_strided((padded, width), (width, 1)),
        weight.codes.t(),
        x.scales.as_strided((padded, num_groups), (1, padded)),
        weight.scales.t(),
        out_dtype=dtype,
    )[:num_rows]
    return out if bias is None else out.add_(bias)
