"""Grouped GEMMs: the rows of each expert times that expert's weight, for any number of tokens.

The first GEMM gathers its rows from x, computes gate and up, and applies the activation. The second
computes down, multiplies each row by its routing weight, and scatters it to the row of its
assignment. A third kernel sums the k rows of each token in a fixed order. Atomic additions would
save memory traffic, but their order varies, so the last bits of the result would vary too.

With FP8 weights, a kernel of its own quantises the input of each GEMM. On GPUs without FP8 matmuls,
weights are converted to the dtype of the inputs instead. For many rows on Hopper, hopper_grouped.py
has another kernel.

As in ``gemm/tiled.py``, ``tl.dot`` computes W x^T: features are its M dimension, and rows of x its
N dimension, which may be as small as 8. The names BLOCK_M (rows) and BLOCK_N (features) are those
for x W^T.
"""

from typing import NamedTuple

import torch

from nanovllm.kernels.fallback import run_or_replace
from nanovllm.kernels.fp8 import FP8, fp8_values, quantize_row_groups, quantize_rows
from nanovllm.kernels.moe import hopper_grouped
from nanovllm.kernels.moe.activation import gated_activation
from nanovllm.kernels.moe.combine import sum_parts
from nanovllm.kernels.moe.experts import ExpertWeights
from nanovllm.kernels.moe.mxfp4 import add_block, dequantize_part, rescale
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.moe.sort import Groups, sort_triton
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import pdl_options, pdl_wait, shared_memory, tl, triton


class Tile(NamedTuple):
    """The tile of one program.

    Attributes:
        rows: BLOCK_M, rows of x.
        small_rows: SMALL_M: a program with at most this many rows uses a tile of SMALL_M rows.
        features: BLOCK_N of the first GEMM: output features of gate, and as many of up.
        down_features: BLOCK_N of the second GEMM.
        columns: BLOCK_K, input features per iteration. MXFP4 weights are always read in groups of
            128.
        stages: pipeline stages.
        warps: num_warps.
    """

    rows: int
    small_rows: int
    features: int
    down_features: int
    columns: int
    stages: int
    warps: int


# The tile by the mean number of rows per expert: the first entry whose key is at least the mean.
# Tuned on an H200 (132 multiprocessors, 4.8 TB/s, 800 TFLOP/s) for Qwen3-30B-A3B (hidden size 2048,
# 128 experts, top 8, intermediate size 768). A GEMM becomes compute-bound at about 170 rows.
# - Up to about 48 rows (768 tokens), the time is that of reading weights: 6.3 MB per expert for
#   gate and up, and 3.1 MB for down. One tile should hold all rows of its expert. Otherwise the
#   weights are read again, from the L2 cache at best. The number of rows varies between experts by
#   about the square root of the mean, so a tile has more rows than most means it is used for.
#   At 4.8 TB/s and a latency of 0.8 us, 3.8 MB must be in flight, 29 KB per multiprocessor. An
#   iteration over 64 columns of 64 features of gate and of up loads 16 KB of weights. With 3 of 4
#   stages in flight and two programs per multiprocessor that is 96 KB. The grid is 128 x 12
#   programs for gate and up, and 128 x 32 for down: 5 waves or more.
# - Above that, tensor cores are the bottleneck. A tile of 128 rows, and 128 features of gate and of
#   up, has 2 x 128 x 128 accumulators, 128 registers per thread with 8 warps. An iteration loads
#   (256 + 128) x 64 x 2 bytes = 48 KB, so 4 stages take 192 KB. With 16,384 tokens, an expert has
#   1,024 rows: 8 tiles, and a grid of 6 x 8 x 128 programs. With 2,048 tokens, half of the experts
#   have a second tile with a few rows, where SMALL_M saves 5%.
TILES: dict[int, Tile] = {
    8: Tile(16, 16, 64, 64, 128, 4, 4),
    16: Tile(32, 32, 64, 64, 64, 4, 4),
    96: Tile(64, 32, 64, 64, 64, 4, 4),
    256: Tile(128, 32, 128, 128, 64, 4, 8),
    1 << 31: Tile(128, 128, 128, 128, 64, 4, 8),
}
# The same for MXFP4 weights, tuned for gpt-oss-20b. An iteration is over a group of 128 columns.
# Dequantisation takes as long as reading the weights, so splitting an expert's rows over two tiles
# costs more than padding one tile.
MXFP4_TILES: dict[int, Tile] = {
    4: Tile(8, 8, 64, 64, 128, 4, 4),
    26: Tile(32, 16, 64, 64, 128, 3, 4),
    96: Tile(64, 32, 64, 64, 128, 3, 4),
    1 << 31: Tile(128, 64, 64, 128, 128, 3, 4),
}
# The same for FP8 weights and inputs, with scales of rows or of blocks.
FP8_TILES: dict[int, Tile] = {
    8: Tile(16, 16, 64, 64, 128, 4, 4),
    16: Tile(32, 16, 64, 64, 128, 4, 4),
    96: Tile(64, 32, 64, 64, 128, 4, 4),
    256: Tile(128, 32, 128, 128, 128, 4, 8),
    1 << 31: Tile(128, 128, 128, 128, 128, 4, 8),
}
# With larger tiles, the sums of a group and the accumulators do not fit into the registers.
FP8_BLOCK_TILES: dict[int, Tile] = {
    8: Tile(16, 16, 64, 64, 128, 4, 4),
    16: Tile(32, 16, 64, 64, 128, 4, 4),
    256: Tile(64, 32, 64, 64, 128, 4, 4),
    1 << 31: Tile(64, 64, 64, 64, 128, 4, 4),
}
FP32_TILE = Tile(16, 16, 32, 32, 32, 2, 4)  # fp32 matmuls run on the CUDA cores
MAX_LAUNCHED_TILES = 65535  # CUDA's limit of a grid's second dimension


def choose_tile(num_tokens: int, top_k: int, experts: ExpertWeights, x: torch.Tensor) -> Tile:
    """Returns the tile of both GEMMs. It has fewer stages where shared memory is small, as on
    consumer GPUs. A row's sums have the same order in all tiles. The instructions differ (MXFP4
    with few tokens takes mma.sync), but not their bits on Hopper.

    Args:
        x: the input, whose dtype, which may be FP8, and device decide.
    """
    if x.dtype is torch.float32:
        return FP32_TILE
    mxfp4 = experts.down.dtype is torch.int16
    tiles = MXFP4_TILES if mxfp4 else TILES
    if x.dtype is FP8:
        tiles = FP8_TILES if experts.group is None else FP8_BLOCK_TILES
    mean_rows = num_tokens * top_k / len(experts.down)
    tile = next(tile for rows, tile in tiles.items() if mean_rows <= rows)
    # Bytes of a row of the weight in one iteration: for MXFP4, 32 words and the scales.
    weight_bytes = 32 * 2 + 4 if mxfp4 else tile.columns * x.itemsize
    weight_rows = max(2 * tile.features, tile.down_features)
    stage_bytes = tile.rows * tile.columns * x.itemsize + weight_rows * weight_bytes
    most_stages = max(1, shared_memory(x.device) // stage_bytes)
    return tile._replace(stages=min(tile.stages, most_stages))


@triton.jit
def _accumulate(acc, weight, x, scale, GROUP: tl.constexpr):
    """Adds the result of a matmul, times the scales of its inputs if they have groups of columns.
    The sum over the columns of one group does not depend on these scales."""
    weight = fp8_values(weight, x.dtype)
    if GROUP is None:
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    else:
        acc += tl.dot(weight, x, input_precision="ieee") * scale
    return acc


@triton.jit
def _multiply(
    x_ptr,
    x_scales_ptr,
    row_stride,
    group_stride,
    weight_ptr,
    weight_scales_ptr,
    source,
    in_group,
    expert,
    feature,
    out_features,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiplies rows of x with rows of an expert's weight.

    Args:
        x_scales_ptr, row_stride, group_stride, weight_scales_ptr: see ``_grouped_kernel``.
        source: [BLOCK_M], indices of the rows of x.
        in_group: [BLOCK_M], whether to load the row. Zeros take the place of other rows.
        expert: the index of the expert.
        feature: [BLOCK_N], indices of output features: rows of the expert's weight. With GATED,
            rows of gate, and the same rows of up, which is the second half of the weight.
        out_features: the number of rows of the weight; with GATED, of gate.
        DTYPE: what the result will be rounded to.
        WIDTH: the number of columns of x and of the weight.

    Returns:
        W x^T for the rows of the weight, or of gate, and that for the rows of up, both fp32
        [BLOCK_N, BLOCK_M]. Without GATED, the second one is zero.
    """
    column = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + source.to(tl.int64)[None, :] * WIDTH + column[:, None]
    PARTS: tl.constexpr = 2 if GATED else 1
    row = expert.to(tl.int64) * PARTS * out_features + feature
    gate_ptrs = weight_ptr + row[:, None] * WIDTH + column[None, :]
    up_ptrs = gate_ptrs + out_features * WIDTH
    acc = tl.zeros([feature.shape[0], source.shape[0]], tl.float32)
    up_acc = acc
    x_scale = tl.full([1, source.shape[0]], 1.0, tl.float32)
    gate_scale = x_scale
    up_scale = x_scale
    if GROUP is not None:  # all features of the tile are in one row of blocks
        NUM_GROUPS: tl.constexpr = WIDTH // GROUP
        first = expert * PARTS * out_features + tl.program_id(0) * feature.shape[0]
        gate_scales_ptr = weight_scales_ptr + first // GROUP * NUM_GROUPS
        up_scales_ptr = gate_scales_ptr + out_features // GROUP * NUM_GROUPS
        x_scale_ptrs = x_scales_ptr
        if x_scales_ptr is not None:
            x_scale_ptrs += source * row_stride
            x_scale = tl.load(x_scale_ptrs, mask=in_group, other=0.0)[None, :]
        gate_scale = x_scale * tl.load(gate_scales_ptr)
        if GATED:
            up_scale = x_scale * tl.load(up_scales_ptr)
    for start in tl.range(0, WIDTH, BLOCK_K):
        mask = (column < WIDTH - start) | (WIDTH % BLOCK_K == 0)
        x = tl.load(x_ptrs + start, mask=mask[:, None] & in_group[None, :], other=0.0)
        if x.dtype == tl.float8e4nv and tl.bfloat16 != DTYPE:
            # FP8 tensor cores add products with 14 bits, which is enough for bf16 only.
            x = x.to(tl.float16)
        next_gate_scale = 0.0
        next_up_scale = 0.0
        if GROUP is not None:
            # The next scales are loaded before the matmul, so that the loop does not wait for them.
            group = tl.minimum((start + BLOCK_K) // GROUP, NUM_GROUPS - 1)
            if x_scales_ptr is not None:
                ptrs = x_scale_ptrs + group * group_stride
                x_scale = tl.load(ptrs, mask=in_group, other=0.0)[None, :]
            next_gate_scale = tl.load(gate_scales_ptr + group)
            if GATED:
                next_up_scale = tl.load(up_scales_ptr + group)
        weight = tl.load(gate_ptrs + start, mask=mask[None, :], other=0.0)
        acc = _accumulate(acc, weight, x, gate_scale, GROUP)
        if GATED:
            weight = tl.load(up_ptrs + start, mask=mask[None, :], other=0.0)
            up_acc = _accumulate(up_acc, weight, x, up_scale, GROUP)
        if GROUP is not None:
            gate_scale = x_scale * next_gate_scale
            if GATED:
                up_scale = x_scale * next_up_scale
    if weight_scales_ptr is not None and GROUP is None:
        if x_scales_ptr is not None:
            x_scale = tl.load(x_scales_ptr + source, mask=in_group, other=0.0)[None, :]
        acc *= tl.load(weight_scales_ptr + row)[:, None] * x_scale
        if GATED:
            up_acc *= tl.load(weight_scales_ptr + row + out_features)[:, None] * x_scale
    return acc, up_acc


@triton.jit
def _multiply_mxfp4(
    x_ptr,
    words_ptr,
    scales_ptr,
    source,
    in_group,
    expert,
    feature,
    out_features,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):
    """Computes what ``_multiply`` does, with packed MXFP4 weights: see ``mxfp4.py``.

    An iteration is over the 128 columns of a group, in four matmuls, one for each of its blocks.
    Each word has a value of all four. So once the compiler has loaded the words in the layout that
    ``tl.dot`` needs, dequantised values are already in the right registers, and do not pass through
    shared memory.
    """
    column = tl.arange(0, 32)
    x_ptrs = x_ptr + source.to(tl.int64)[None, :] * WIDTH + column[:, None]
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = 2 if GATED else 1
    num_rows = PARTS * out_features
    row = expert.to(tl.int64) * tl.cdiv(WIDTH, 128) * num_rows + feature
    words_ptrs = words_ptr + row[:, None] * 32 + column[None, :]
    scales_ptrs = scales_ptr + row
    acc = tl.zeros([feature.shape[0], source.shape[0]], tl.float32)
    up_acc = acc
    for start in tl.range(0, WIDTH, 128):
        words, scales = tl.load(words_ptrs), tl.load(scales_ptrs)[:, None]
        if GATED:
            up_words = tl.load(words_ptrs + out_features * 32)
            up_scales = tl.load(scales_ptrs + out_features)[:, None]
        first = tl.minimum(start, WIDTH - 128)  # the last group may overlap the one before
        for part in tl.static_range(4):
            mask = in_group[None, :]
            if WIDTH < 128:
                mask &= (column + first + 32 * part >= 0)[:, None]
            x = tl.load(x_ptrs + first + 32 * part, mask=mask, other=0.0)
            weight = dequantize_part(words, scales, part, DTYPE)
            acc = add_block(weight, x, acc)
            if GATED:
                weight = dequantize_part(up_words, up_scales, part, DTYPE)
                up_acc = add_block(weight, x, up_acc)
        words_ptrs += num_rows * 32
        scales_ptrs += num_rows
    return rescale(acc, DTYPE), rescale(up_acc, DTYPE)


@triton.jit
def _compute_tile(
    x_ptr,
    x_scales_ptr,
    row_stride,
    group_stride,
    weight_ptr,
    weight_scales_ptr,
    out_ptr,
    order_ptr,
    scales_ptr,
    bias_ptr,
    out_features,
    WIDTH: tl.constexpr,
    expert,
    start,
    end,
    TOP_K: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes what ``_grouped_kernel`` describes, for the BLOCK_M rows from ``start`` on, as far
    as ``end``. They belong to ``expert``."""
    row = start + tl.arange(0, BLOCK_M)
    in_group = row < end
    assignment = tl.load(order_ptr + row, mask=in_group, other=0)
    source = assignment // TOP_K if GATED else row
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Features past the end repeat the last one, so that weights are loaded without a mask for rows.
    clamped = tl.minimum(feature, out_features - 1)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if weight_ptr.dtype.element_ty != tl.int16:
        acc, up_acc = _multiply(
            x_ptr,
            x_scales_ptr,
            row_stride,
            group_stride,
            weight_ptr,
            weight_scales_ptr,
            source,
            in_group,
            expert,
            clamped,
            out_features,
            dtype,
            WIDTH,
            GATED,
            GROUP,
            BLOCK_K,
        )
    else:
        acc, up_acc = _multiply_mxfp4(
            x_ptr,
            weight_ptr,
            weight_scales_ptr,
            source,
            in_group,
            expert,
            clamped,
            out_features,
            WIDTH,
            GATED,
        )
    if bias_ptr is not None:
        bias_ptr += expert * (2 if GATED else 1) * out_features + clamped
        acc += tl.load(bias_ptr).to(tl.float32)[:, None]
        if GATED:
            up_acc += tl.load(bias_ptr + out_features).to(tl.float32)[:, None]
    if GATED:
        acc = gated_activation(acc, up_acc, LIMIT, ALPHA, dtype)
    else:
        acc *= tl.load(scales_ptr + assignment, mask=in_group, other=0.0)[None, :]
    target = row if GATED else assignment
    address = out_ptr + target.to(tl.int64)[None, :] * out_features + feature[:, None]
    mask = in_group[None, :] & (feature < out_features)[:, None]
    tl.store(address, acc.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["group_stride"])
def _grouped_kernel(
    x_ptr,
    x_scales_ptr,
    row_stride,
    group_stride,
    weight_ptr,
    weight_scales_ptr,
    out_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    scales_ptr,
    bias_ptr,
    out_features,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    SMALL_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes one tile of a grouped GEMM.

    W and bias are those of the tile's expert. ``out`` is ``out_features``.

    - With GATED, this is the first GEMM: the weight is [E, 2 out, WIDTH], and row r of the result
      is activation(x[order[r] // TOP_K] W^T + bias).
    - Otherwise it is the second GEMM: the weight is [E, out, WIDTH], and row order[r] of the result
      is scale * (x[r] W^T + bias), where the scale is the routing weight of assignment order[r].

    The weight is in MXFP4 if it has words of 16 bits. If it is in FP8, so is x unless
    ``x_scales_ptr`` is None. The scales of x are those of rows or, unless GROUP is None, of GROUP
    columns of a row, at the given strides. Those of the weight are described in
    ``ExpertWeights``.
    """
    pdl_wait(PDL)
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tiles_ptr + 3 * tile)
    start = tl.load(tiles_ptr + 3 * tile + 1)
    end = tl.load(tiles_ptr + 3 * tile + 2)
    if SMALL_M < BLOCK_M:
        num_rows = end - start
        if num_rows <= SMALL_M:
            _compute_tile(
                x_ptr,
                x_scales_ptr,
                row_stride,
                group_stride,
                weight_ptr,
                weight_scales_ptr,
                out_ptr,
                order_ptr,
                scales_ptr,
                bias_ptr,
                out_features,
                WIDTH,
                expert,
                start,
                end,
                TOP_K,
                LIMIT,
                ALPHA,
                GATED,
                GROUP,
                SMALL_M,
                BLOCK_N,
                BLOCK_K,
            )
            return
    _compute_tile(
        x_ptr,
        x_scales_ptr,
        row_stride,
        group_stride,
        weight_ptr,
        weight_scales_ptr,
        out_ptr,
        order_ptr,
        scales_ptr,
        bias_ptr,
        out_features,
        WIDTH,
        expert,
        start,
        end,
        TOP_K,
        LIMIT,
        ALPHA,
        GATED,
        GROUP,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )


def experts_grouped(
    x: torch.Tensor, experts: ExpertWeights, routing: Routing, residual: torch.Tensor | None
) -> torch.Tensor:
    """Computes what ``experts_reference`` does, with grouped GEMMs. The routing has ranks."""
    assert all(t.is_contiguous() for t in (x, experts.gate_up, experts.down))
    assert residual is None or residual.is_contiguous()
    if not hopper_grouped.is_faster(x, experts, routing):
        return _experts_tiled(x, experts, routing, residual)
    return run_or_replace(
        hopper_grouped.KERNEL,
        x.device,
        lambda: hopper_grouped.experts_hopper(x, experts, routing, residual),
        lambda: _experts_tiled(x, experts, routing, residual),
    )


def _experts_tiled(
    x: torch.Tensor, experts: ExpertWeights, routing: Routing, residual: torch.Tensor | None
) -> torch.Tensor:
    """Computes ``experts_grouped`` with the kernel of this file."""
    hidden, width = x.size(1), experts.gate_up.size(-2) // 2
    num_tokens, top_k = routing.topk_ids.shape
    gate_up, down = experts.gate_up, experts.down
    inputs = _quantize(x, experts)
    tile = choose_tile(num_tokens, top_k, experts, inputs[0])
    groups = sort_triton(routing, tile.rows)
    inner = x.new_empty(num_tokens * top_k, width)
    settings = experts.group, experts.limit, experts.alpha
    weight = gate_up, experts.gate_up_scales, experts.gate_up_bias
    _launch(inputs, weight, inner, groups, tile, top_k, None, settings)
    parts = x.new_empty(num_tokens * top_k, hidden)
    weight = down, experts.down_scales, experts.down_bias
    inputs = _quantize(inner, experts)
    _launch(inputs, weight, parts, groups, tile, top_k, routing.topk_weights, settings)
    return sum_parts(parts, residual, top_k)


def _quantize(x: torch.Tensor, experts: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantises the input of a GEMM if its weight is in FP8. Returns it and its scales."""
    if experts.down.dtype is not FP8:
        return x, None
    return (quantize_rows if experts.group is None else quantize_row_groups)(x)


def _launch(
    x: tuple[torch.Tensor, torch.Tensor | None],
    weight: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    out: torch.Tensor,
    groups: Groups,
    tile: Tile,
    top_k: int,
    scales: torch.Tensor | None,
    settings: tuple[int | None, float | None, float],
) -> None:
    """Launches a grouped GEMM: the first one if ``scales`` is None, otherwise the second.

    Args:
        x: the values, and their scales if they are in FP8.
        weight: the values, their scales if they are in FP8 or MXFP4, and the bias.
        scales: the routing weight of each assignment.
        settings: group, limit and alpha of the experts.
    """
    (values, weight_scales, bias), features = weight, out.size(1)
    group, limit, alpha = settings
    is_first = scales is None
    block_n = tile.features if is_first else tile.down_features
    assert group is None or group % block_n == group % tile.columns == 0
    strides = (0, 0) if group is None or x[1] is None else x[1].stride()
    for first in range(0, len(groups.tiles), MAX_LAUNCHED_TILES):  # almost always one launch
        tiles = groups.tiles[first : first + MAX_LAUNCHED_TILES]
        num_tiles = groups.num_tiles - first if first else groups.num_tiles
        _grouped_kernel[(cdiv(features, block_n), len(tiles))](
            *x,
            *strides,
            values,
            weight_scales,
            out,
            groups.order,
            tiles,
            num_tiles,
            scales,
            bias,
            features,
            WIDTH=x[0].size(1),
            TOP_K=top_k,
            LIMIT=limit,
            ALPHA=alpha,
            GATED=is_first,
            GROUP=group,
            SMALL_M=tile.small_rows,
            BLOCK_M=tile.rows,
            BLOCK_N=block_n,
            BLOCK_K=tile.columns,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **pdl_options(out),
        )
