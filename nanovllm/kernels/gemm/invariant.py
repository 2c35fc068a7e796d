"""Batch-invariant GEMM: the bits of a result row do not depend on the other rows, nor on their
number.

A row's result is a sum over the input features, and floating-point sums depend on their order. So
the order must not depend on the number of rows, although the fastest kernel does:

- A row is summed by one chain of tensor core instructions, in ascending order of columns. If a
  weight has few output features, its input features are cut into parts of fixed length (split-K),
  and each part is summed by a chain. The number of parts depends on the weight's shape only. The
  sums of the parts are added in order, in fp32.
- With few rows, each part has a program of its own, which keeps more multiprocessors busy. A second
  kernel or the next norm adds the parts. With many rows, one program computes all parts of a tile
  one after the other, and adds them in the same order.
- Features are the M dimension of the matmul and rows of x the N dimension, as in ``tiled.py``. So
  tiles of 16 and of 256 rows can use the same kind of instruction: wgmma with M = 64 on Hopper. An
  instruction computes each element of its result independently, whatever its N dimension is. Tiles
  of 32 features cannot use wgmma, but on Hopper mma.sync has the same bits.

``benchmarks/invariance.py`` checks on a GPU that all TILES have the same bits, and start-up does so
with each shape of a model's weights. A tile that differs has to be removed from the table. The
order of summation needs no other change.

``same_bits.py`` has faster GEMMs for some numbers of rows, which sum in one chain too.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.gemm.split_k import add_parts, finish_tile
from nanovllm.kernels.gemm.tiled import prefetch
from nanovllm.utils.compile_ahead import compiling_only
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import (
    HAS_TRITON,
    HOPPER_MULTIPROCESSORS,
    is_hopper,
    is_hopper_or_newer,
    num_multiprocessors,
    pdl_options,
    shared_memory,
    tl,
    triton,
)

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor


class Tile(NamedTuple):
    """The tile of one program.

    Attributes:
        rows: BLOCK_M, rows of x.
        features: BLOCK_N, output features.
        columns: BLOCK_K, input features per iteration.
        warps, stages: num_warps and pipeline stages.
        persistent: whether there is one program per multiprocessor, which computes several tiles
            and loads the first columns of the next one early.
    """

    rows: int
    features: int
    columns: int
    warps: int
    stages: int
    persistent: bool = False


# The tiles that ``choose_launch`` chooses from, in half precision. All have the same bits.
# - Up to 64 rows, weights are streamed from memory. At 4.8 TB/s and a latency of 0.8 us, 3.8 MB
#   must be in flight, 29 KB per multiprocessor. 3 of 4 stages of 16 KB of weights are 48 KB, and a
#   second program per multiprocessor loads while the first one starts or ends.
# - With 256 rows and 128 features, a program has 128 accumulators per thread, and 4 stages take
#   192 KB. With split-K it has twice as many. Some of them are spilled, outside of the inner loop.
TILES = (
    Tile(16, 64, 128, 4, 4),
    Tile(32, 64, 128, 4, 4),
    Tile(64, 64, 128, 4, 3),
    Tile(128, 64, 64, 4, 4),
    Tile(128, 128, 64, 8, 4, persistent=True),
    Tile(256, 128, 64, 8, 4, persistent=True),
)
# For up to 16 rows and 66 tiles of 64 features, on Hopper. Twice as many programs keep more bytes
# in flight.
NARROW_TILE = Tile(16, 32, 128, 2, 8)
SMALL_MEMORY_TILES = (Tile(16, 64, 64, 4, 4), Tile(64, 64, 64, 4, 4), Tile(128, 64, 32, 4, 4))
FP32_TILES = (Tile(32, 32, 32, 4, 2),)  # fp32 matmuls run on the CUDA cores
SHARED_MEMORY = 225 << 10  # bytes that TILES need; data-centre GPUs from Hopper on have them
MIN_SPLIT_COLUMNS, MIN_PART_COLUMNS = 2048, 512
MAX_SPLIT_FEATURES = 1536  # with more, tiles of 32 features make enough programs
MAX_PARTS_NUMEL = 2 << 20  # elements of all parts: with more, one program adds them faster
MIN_VOCABULARY = 1 << 16  # output features that count as a vocabulary
MAX_BLOCK_K = 128  # parts begin at multiples of it
CHECKED_ROWS = 64
_checked: set[tuple[torch.Size, torch.dtype, torch.device]] = set()  # by ``check_launches``


def num_parts(out_features: int, width: int) -> int:
    """Returns the number of parts of the split-K. It is 1 with many output features, and with few
    input features, because adding the parts would take longer. Otherwise it is large enough to give
    most of Hopper's multiprocessors a part of 64 features."""
    parts = 1
    if width >= MIN_SPLIT_COLUMNS and out_features <= MAX_SPLIT_FEATURES:
        while (
            2 * parts * cdiv(out_features, 64) <= HOPPER_MULTIPROCESSORS
            and 2 * parts * MIN_PART_COLUMNS <= width
        ):
            parts *= 2
    return parts


def part_columns(out_features: int, width: int) -> int:
    """Returns the number of input features of each part but the last one."""
    return cdiv(cdiv(width, num_parts(out_features, width)), MAX_BLOCK_K) * MAX_BLOCK_K


class Launch(NamedTuple):
    """How a GEMM is launched. It does not change the result.

    Attributes:
        is_parallel: whether each part of the split-K has a program of its own.
    """

    tile: Tile
    is_parallel: bool


@cache
def choose_launch(
    num_rows: int, out_features: int, width: int, tiles: tuple[Tile, ...], multiprocessors: int
) -> Launch:
    """Returns the launch for a number of rows, by a rule that was fitted to times on an H200.

    - If NARROW_TILE is among the tiles, up to 16 rows take it.
    - Otherwise, if all programs run at once, two per multiprocessor, the tile is the smallest one
      that holds half of the rows, or 128. It keeps the most bytes in flight.
    - Otherwise it is the smallest one that holds all rows, so that weights are read once. Tiles of
      256 rows are for a vocabulary and for over 4,096 rows only. They take twice as long as those
      of 128, and leave more multiprocessors idle at the end.
    """
    parts = cdiv(width, part_columns(out_features, width))
    if tiles[0] == NARROW_TILE:
        if num_rows <= NARROW_TILE.rows:
            return Launch(NARROW_TILE, False)
        tiles = tiles[1:]
    is_parallel = parts > 1 and parts * num_rows * out_features <= MAX_PARTS_NUMEL
    most = max(tile.rows for tile in tiles)
    half = next(tile for tile in tiles if min(num_rows, most) <= 2 * tile.rows)
    programs = cdiv(num_rows, half.rows) * cdiv(out_features, half.features)
    if programs * (parts if is_parallel else 1) <= 2 * multiprocessors:
        return Launch(half, is_parallel)
    is_large = num_rows > 4096 or (num_rows <= 256 and out_features >= MIN_VOCABULARY)
    enough = min(num_rows, 256 if is_large else 128, most)
    rows = min(tile.rows for tile in tiles if tile.rows >= enough)
    return Launch(max(tile for tile in tiles if tile.rows == rows), is_parallel)


@triton.jit
def _load_block(
    source,
    row,
    column,
    num_rows,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Loads a block [ROWS, COLUMNS] of a matrix [num_rows, width]. ``source`` is a tensor
    descriptor with TMA, otherwise a pointer. Columns past the end are zero. Rows past the end are
    undefined."""
    if TMA:
        block = source.load([row, column])
    else:
        rows = tl.minimum(row + tl.arange(0, ROWS), num_rows - 1)
        columns = column + tl.arange(0, COLUMNS)
        address = source + rows.to(tl.int64)[:, None] * width + columns[None, :]
        block = tl.load(address, mask=(columns < width)[None, :], other=0.0)
    return block


@triton.jit
def _multiply(
    x,
    weight,
    row,
    feature,
    begin,
    end,
    num_rows,
    out_features,
    width,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiplies columns [begin, end) of BLOCK_N rows of the weight and BLOCK_M rows of x, in one
    chain of instructions: fp32 [BLOCK_N, BLOCK_M]."""
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        w = _load_block(weight, feature, start, out_features, width, BLOCK_N, BLOCK_K, TMA)
        rows = _load_block(x, row, start, num_rows, width, BLOCK_M, BLOCK_K, TMA)
        acc = tl.dot(w, tl.trans(rows), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,
    weight,
    prefetch_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    out_features,
    width,
    columns,
    IS_SPLIT: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    GROUP: tl.constexpr = 8,
):
    """Computes tiles of x W^T + bias + residual.

    With several programs along the grid's second dimension, program p computes part p of the
    split-K, and stores its sums in out [parts, num_rows, out_features]. Otherwise, with IS_SPLIT, a
    program adds the sums of all parts. A part has ``columns`` columns, a multiple of BLOCK_K.

    GROUP tiles of rows that use the same features run at about the same time, so weights and rows
    stay in the L2 cache. With PDL, a program prefetches the weights at ``prefetch_ptr`` into the L2
    cache while it waits for x. It is None for no prefetch.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(1)
    begin = part * columns
    if PDL:
        if prefetch_ptr is not None:
            first_tile = tl.program_id(0) // tl.cdiv(num_rows, BLOCK_M) * BLOCK_N
            first_tile = tl.minimum(first_tile, out_features - BLOCK_N)
            prefetch_ptr += first_tile.to(tl.int64) * width + begin
            prefetch(prefetch_ptr, width, tl.minimum(width - begin, columns), BLOCK_N)
        tl.extra.cuda.gdc_wait()
    end = width if tl.num_programs(1) == 1 else tl.minimum(begin + columns, width)
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(out_features, BLOCK_N)
    out_ptr += part.to(tl.int64) * num_rows * out_features
    # Flattened with the loop below, so that the first columns of the next tile are loaded early.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        group = tile // (GROUP * tiles_n)
        index = tile % (GROUP * tiles_n)
        size = tl.minimum(tiles_m - group * GROUP, GROUP)
        first_row = (group * GROUP + index % size) * BLOCK_M
        first = index // size * BLOCK_N
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if IS_SPLIT:
            for first_column in tl.range(begin, end, columns):
                last = tl.minimum(first_column + columns, end)
                total += _multiply(
                    x,
                    weight,
                    first_row,
                    first,
                    first_column,
                    last,
                    num_rows,
                    out_features,
                    width,
                    TMA,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                )
        else:
            total = _multiply(
                x,
                weight,
                first_row,
                first,
                begin,
                end,
                num_rows,
                out_features,
                width,
                TMA,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
        row = first_row + tl.arange(0, BLOCK_M)
        feature = first + tl.arange(0, BLOCK_N)
        mask = (row < num_rows)[:, None] & (feature < out_features)[None, :]
        finish_tile(
            tl.trans(total), row, feature, mask, bias_ptr, residual_ptr, out_ptr, out_features
        )


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes x W^T + bias in fp32 and rounds it. Then adds the residual and rounds again.

    Args:
        x: [N, in], contiguous. fp16, bf16 or fp32.
        weight: [out, in], contiguous.
        bias: [out], or None.
        residual: [N, out], contiguous, or None.
        dtype: the result's dtype, by default that of x.

    Returns:
        [N, out]. For each dtype, GPU and shape of the weight, the bits of a row depend on this row
        of x and of the residual only.
    """
    if not len(x):
        return x.new_empty(0, len(weight), dtype=dtype)
    return launch_linear(x, weight, bias, residual, _launch_for(x, weight), dtype)


def invariant_linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Computes ``invariant_linear``, but leaves the parts of a split-K to the next norm if each of
    them has a program of its own.

    Returns:
        (the result, None). Or the parts, fp32 [parts, N, out], and the residual: ``rms_norm`` adds
        them with the same bits.
    """
    launch = _launch_for(x, weight)
    if bias is None and launch.is_parallel:
        return _launch_parts(x, weight, launch.tile), residual
    return invariant_linear(x, weight, bias, residual), None


def _launch_for(x: Tensor, weight: Tensor) -> Launch:
    tiles = choose_tiles(x, len(weight))
    return choose_launch(len(x), *weight.shape, tiles, num_multiprocessors(x.device))


def choose_tiles(x: Tensor, out_features: int) -> tuple[Tile, ...]:
    """Returns the tiles for x [N, in] and its device, and a weight [out_features, in]."""
    if x.dtype is torch.float32:
        return FP32_TILES
    if shared_memory(x.device) < SHARED_MEMORY:
        return SMALL_MEMORY_TILES
    width = x.size(1)
    is_long = width >= MIN_SPLIT_COLUMNS and num_parts(out_features, width) == 1
    is_narrow = is_long and 2 * cdiv(out_features, 64) <= HOPPER_MULTIPROCESSORS
    return (NARROW_TILE, *TILES) if is_narrow and is_hopper(x.device) else TILES


def launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    launch: Launch,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes ``invariant_linear`` with the given tile."""
    (num_rows, width), out_features = x.shape, len(weight)
    assert num_rows > 0 and weight.size(1) == width and x.dtype == weight.dtype
    assert x.is_contiguous() and weight.is_contiguous()
    assert residual is None or (residual.is_contiguous() and len(residual) == num_rows)
    out = x.new_empty(num_rows, out_features, dtype=dtype)
    if launch.is_parallel:
        add_parts(_launch_parts(x, weight, launch.tile), bias, residual, out)
    else:
        _launch_kernel(x, weight, bias, residual, out, launch.tile, 1)
    return out


def _launch_parts(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """Returns the parts of the split-K, fp32 [parts, N, out]."""
    (num_rows, width), out_features = x.shape, len(weight)
    parts = cdiv(width, part_columns(out_features, width))
    assert parts > 1
    sums = x.new_empty(parts, num_rows, out_features, dtype=torch.float32)
    _launch_kernel(x, weight, None, None, sums, tile, parts)
    return sums


def _launch_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    tile: Tile,
    parts: int,
) -> None:
    """Computes ``invariant_linear`` with one part, or parts of a split-K: see the kernel."""
    (num_rows, width), out_features = x.shape, len(weight)
    columns = part_columns(out_features, width)
    is_split = parts == 1 and columns < width
    num_tiles = cdiv(num_rows, tile.rows) * cdiv(out_features, tile.features)
    is_persistent = tile.persistent and not is_split
    if is_persistent:
        num_tiles = min(num_tiles, num_multiprocessors(x.device))
    # Descriptors need rows that begin at multiples of 16 bytes.
    is_aligned = (width * x.itemsize | x.data_ptr() | weight.data_ptr()) % 16 == 0
    tma = is_hopper_or_newer(x.device) and is_aligned and x.dtype is not torch.float32
    _linear_kernel[(num_tiles, parts)](
        _source(x, tile.rows, tile.columns, tma),
        _source(weight, tile.features, tile.columns, tma),
        weight if tma and not tile.persistent and out_features % tile.features == 0 else None,
        bias,
        residual,
        out,
        num_rows,
        out_features,
        width,
        columns,
        IS_SPLIT=is_split,
        TMA=tma,
        FLATTEN=is_persistent,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.features,
        BLOCK_K=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(x),
    )


def check_launches(weight: Tensor) -> None:
    """Checks with the weight that all launches give the same bits on this GPU. The launches of each
    shape and dtype are checked once.

    Args:
        weight: [out, in], contiguous.

    Raises:
        ValueError: they do not.
    """
    key = weight.shape, weight.dtype, weight.device
    if key in _checked:
        return
    out_features, width = weight.shape
    x = torch.arange(CHECKED_ROWS * width, device=weight.device, dtype=torch.float32)
    x = x.sin().to(weight.dtype).view(CHECKED_ROWS, width)
    is_split = part_columns(out_features, width) < width
    tiles = choose_tiles(x, out_features)
    launches = [Launch(tile, False) for tile in tiles]
    launches += [Launch(tile, True) for tile in tiles if is_split]
    with compiling_only():
        for launch in launches:
            launch_linear(x, weight, None, None, launch)
    expected = launch_linear(x, weight, None, None, launches[0])
    for launch in launches:
        found = launch_linear(x, weight, None, None, launch)
        if not ((found == expected) | (found.isnan() & expected.isnan())).all():
            raise ValueError(
                f"batch_invariant=True does not work on this GPU: its matmul with a weight of "
                f"{out_features} x {width} sums in an order that depends on the number of rows: "
                f"leave batch_invariant out"
            )
    _checked.add(key)


def _source(matrix: Tensor, rows: int, columns: int, tma: bool) -> Any:
    return TensorDescriptor.from_tensor(matrix, [rows, columns]) if tma else matrix
