"""Experts' MLPs for a few tokens, one GEMV per assignment, without sorting.

With few tokens, nearly every assignment has an expert of its own, so little is gained by grouping
them. Dot products are computed on the CUDA cores, as in ``gemm/skinny.py``. If two assignments have
the same expert, their programs run at about the same time, and one of them reads the weights from
the L2 cache. The first kernel computes gate, up and the activation. The second one computes down,
and sums the outputs of a token's k experts and the residual in registers. FP8 weights are converted
to fp32 in registers, and inputs are not quantised.
"""

from typing import Any

import torch

from nanovllm.kernels.fp8 import fp8_values
from nanovllm.kernels.moe.activation import gated_activation
from nanovllm.kernels.moe.experts import ExpertWeights
from nanovllm.kernels.moe.route import Routing
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import pdl_options, tl, triton

# BLOCK_N, BLOCK_K and num_warps of each kernel, tuned for one token of Qwen3-30B-A3B (hidden size
# 2048, top 8, intermediate size 768) on an H200, in whole decode steps. A program of the first
# kernel reads two rows of gate and two of up, of 4 KB each. The second one has 512 programs, which
# read 4 rows of 1.5 KB from each of 8 experts.
GATE_UP_CONFIG = 2, 2048, 4
DOWN_CONFIG = 4, 256, 4
# The same for FP8 weights.
FP8_GATE_UP_CONFIG = 2, 2048, 2
FP8_DOWN_CONFIG = 4, 256, 4
# Of weights per thread, but at least one tile: all FP8 weights of a program of Qwen3-30B-A3B.
PRELOADED_BYTES = 192
MAX_UNROLLED = 16  # iterations, because compiling the 112 of Mixtral took 2 minutes


@triton.jit
def _gate_up_kernel(
    x_ptr,
    weight_ptr,
    weight_scales_ptr,
    out_ptr,
    experts_ptr,
    bias_ptr,
    out_features,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row a of the result [N k, I] is activation(x[a // TOP_K] W^T + bias), with the W and bias of
    the expert of assignment a. ``out_features`` is I, and WIDTH is the hidden size. The scales of
    FP8 weights are those of rows or, unless GROUP is None, of blocks. Columns have two dimensions,
    so that a thread loads one scale for its columns of a block."""
    NUM_GROUPS: tl.constexpr = 1 if GROUP is None else BLOCK_K // GROUP
    LENGTH: tl.constexpr = BLOCK_K // NUM_GROUPS
    if PDL:  # in this order, because the second kernel reads the routing before its own wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    assignment = tl.program_id(1)
    expert = tl.load(experts_ptr + assignment).to(tl.int64)
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_weight = feature < out_features
    gate_ptr = weight_ptr + (expert * 2 * out_features + feature)[:, None, None] * WIDTH
    up_ptr = gate_ptr + out_features.to(tl.int64) * WIDTH
    x_ptr += (assignment // TOP_K).to(tl.int64) * WIDTH
    group = tl.arange(0, NUM_GROUPS)
    first_column = group[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
    acc = tl.zeros([BLOCK_N, NUM_GROUPS, LENGTH], tl.float32)
    up_acc = tl.zeros([BLOCK_N, NUM_GROUPS, LENGTH], tl.float32)
    if GROUP is not None:  # all features of the program are in one row of blocks
        first = expert * 2 * out_features + tl.program_id(0) * BLOCK_N
        gate_scale_ptr = weight_scales_ptr + first // GROUP * (WIDTH // GROUP)
        up_scale_ptr = gate_scale_ptr + out_features // GROUP * (WIDTH // GROUP)
    for start in tl.range(0, WIDTH, BLOCK_K, loop_unroll_factor=UNROLLED):
        column = start + first_column
        mask = in_weight[:, None, None] & (column < WIDTH)[None, :, :]
        gate = tl.load(gate_ptr + column[None, :, :], mask=mask, other=0.0)
        up = tl.load(up_ptr + column[None, :, :], mask=mask, other=0.0)
        x = tl.load(x_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        up_x = x
        if GROUP is not None:
            block = start // GROUP + group
            in_row = block < WIDTH // GROUP
            up_x = x * tl.load(up_scale_ptr + block, mask=in_row, other=0.0)[:, None]
            x *= tl.load(gate_scale_ptr + block, mask=in_row, other=0.0)[:, None]
        acc += fp8_values(gate, tl.float32) * x[None, :, :]
        up_acc += fp8_values(up, tl.float32) * up_x[None, :, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate_sum = tl.sum(tl.sum(acc, axis=2), axis=1)
    up_sum = tl.sum(tl.sum(up_acc, axis=2), axis=1)
    if weight_scales_ptr is not None and GROUP is None:
        weight_scales_ptr += expert * 2 * out_features + feature
        gate_sum *= tl.load(weight_scales_ptr, mask=in_weight, other=0.0)
        up_sum *= tl.load(weight_scales_ptr + out_features, mask=in_weight, other=0.0)
    if bias_ptr is not None:
        bias_ptr += expert * 2 * out_features + feature
        gate_sum += tl.load(bias_ptr, mask=in_weight, other=0.0).to(tl.float32)
        up_sum += tl.load(bias_ptr + out_features, mask=in_weight, other=0.0).to(tl.float32)
    out = gated_activation(gate_sum, up_sum, LIMIT, ALPHA, dtype)
    address = out_ptr + assignment.to(tl.int64) * out_features + feature
    tl.store(address, out.to(dtype), mask=in_weight)


@triton.jit
def _load_columns(
    row_ptr, in_rows, start, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, LENGTH: tl.constexpr
):
    """Loads columns [start, start + BLOCK_K) of rows [R]."""
    column = start + tl.max_contiguous(tl.arange(0, BLOCK_K), LENGTH)
    mask = in_rows[:, None] & (column < WIDTH)[None, :]
    return tl.load(row_ptr[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _multiply_columns(
    weight, x_row_ptr, block_scale_ptr, is_chosen, start,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Multiplies what ``_load_columns`` has loaded, N rows of each of T experts, by the columns of
    x [T, K], and sums over LENGTH columns, which one thread has loaded: [N, T, K / LENGTH]."""
    BLOCK_T: tl.constexpr = is_chosen.shape[0]
    BLOCK_N: tl.constexpr = weight.shape[0] // BLOCK_T
    column = start + tl.max_contiguous(tl.arange(0, BLOCK_K), LENGTH)
    mask = is_chosen[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_row_ptr[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = fp8_values(tl.reshape(weight, (BLOCK_N, BLOCK_T, BLOCK_K)), tl.float32)
    products = tl.reshape(weight * x[None, :, :], (BLOCK_N, BLOCK_T, BLOCK_K // LENGTH, LENGTH))
    sums = tl.sum(products, axis=3)
    if GROUP is not None:
        block = (start + tl.arange(0, BLOCK_K // LENGTH) * LENGTH) // GROUP
        mask = is_chosen[:, None] & (block < WIDTH // GROUP)[None, :]
        scales = tl.load(block_scale_ptr[:, None] + block[None, :], mask=mask, other=0.0)
        sums *= scales[None, :, :]
    return sums


@triton.jit
def _down_kernel(
    x_ptr,
    weight_ptr,
    weight_scales_ptr,
    out_ptr,
    experts_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_features,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LENGTH: tl.constexpr,
    PRELOADED: tl.constexpr,
    UNROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row t of the result [N, hidden] is the residual plus the sum of scale[a] * (x[a] W^T + bias)
    over the assignments a of token t, with the W and bias of the expert of assignment a.
    ``out_features`` is the hidden size, and WIDTH is I. GROUP is as in ``_gate_up_kernel``.

    Threads share the experts and columns, and each one has all features of the program, so that it
    multiplies a number of x several times. LENGTH is the number of columns that it loads at once.
    The first PRELOADED tiles of columns are requested before the wait for the first kernel.
    """
    BLOCK_T: tl.constexpr = triton.next_power_of_2(TOP_K)
    token = tl.program_id(1)
    i = tl.arange(0, BLOCK_T)
    assignment = token * TOP_K + i
    is_chosen = i < TOP_K
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_weight = feature < out_features
    # Rows of the tile of weights: feature by feature, those of each expert. So a warp has the same
    # experts in the tile of weights and in that of x.
    row = tl.arange(0, BLOCK_N * BLOCK_T)
    row_feature = tl.program_id(0) * BLOCK_N + row // BLOCK_T
    in_rows = (row % BLOCK_T < TOP_K) & (row_feature < out_features)
    # The first kernel lets this one start only when the router has finished. So what kernels before
    # the first one wrote may be read before the wait, but not from an L1 cache, which may be older.
    # One load per expert, not per row: all programs load the same ids. It takes 1 us less (H200).
    expert = tl.load(experts_ptr + assignment, mask=is_chosen, other=0, cache_modifier=".cg")
    expert = expert.to(tl.int64)
    row_expert = tl.broadcast_to(expert[None, :], (BLOCK_N, BLOCK_T))
    row_expert = tl.reshape(row_expert, (BLOCK_N * BLOCK_T,))
    row_ptr = weight_ptr + (row_expert * out_features + row_feature) * WIDTH
    weights = ()
    for step in tl.static_range(PRELOADED):
        part = _load_columns(row_ptr, in_rows, step * BLOCK_K, WIDTH, BLOCK_K, LENGTH)
        weights += (part,)  # type: ignore[assignment]
    scale = tl.load(scales_ptr + assignment, mask=is_chosen, other=0.0, cache_modifier=".cg")
    scale = scale[None, :]
    feature_row = expert[None, :] * out_features + feature[:, None]
    mask = in_weight[:, None] & is_chosen[None, :]
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + feature_row, mask=mask, other=0.0).to(tl.float32)
        bias = tl.sum(bias * scale, axis=1)
    block_scale_ptr = weight_scales_ptr
    if GROUP is not None:  # all features of the program are in one row of blocks
        first = expert * out_features + tl.program_id(0) * BLOCK_N
        block_scale_ptr = weight_scales_ptr + first // GROUP * (WIDTH // GROUP)
    elif weight_scales_ptr is not None:
        scale *= tl.load(weight_scales_ptr + feature_row, mask=mask, other=0.0)
    address = token.to(tl.int64) * out_features + feature
    if residual_ptr is not None:
        residual = tl.load(
            residual_ptr + address, mask=in_weight, other=0.0, cache_modifier=".cg"
        ).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_row_ptr = x_ptr + assignment.to(tl.int64) * WIDTH
    acc = tl.zeros([BLOCK_N, BLOCK_T, BLOCK_K // LENGTH], tl.float32)
    for step in tl.static_range(PRELOADED):
        acc += _multiply_columns(
            weights[step], x_row_ptr, block_scale_ptr, is_chosen, step * BLOCK_K,
            WIDTH, GROUP, BLOCK_K, LENGTH,
        )  # fmt: skip
    for start in tl.range(PRELOADED * BLOCK_K, WIDTH, BLOCK_K, loop_unroll_factor=UNROLLED):
        weight = _load_columns(row_ptr, in_rows, start, WIDTH, BLOCK_K, LENGTH)
        acc += _multiply_columns(
            weight, x_row_ptr, block_scale_ptr, is_chosen, start, WIDTH, GROUP, BLOCK_K, LENGTH
        )
    acc = tl.reshape(acc * scale[:, :, None], (BLOCK_N, BLOCK_T * BLOCK_K // LENGTH))
    out = tl.sum(acc, axis=1)
    out += bias
    if residual_ptr is not None:
        out += residual
    tl.store(out_ptr + address, out.to(out_ptr.dtype.element_ty), mask=in_weight)


def launch_gemvs(
    x: torch.Tensor,
    experts: ExpertWeights,
    routing: Routing,
    residual: torch.Tensor | None,
    kernels: tuple[Any, Any],
    features: tuple[int, int],
    settings: tuple[dict[str, Any], dict[str, Any]],
) -> torch.Tensor:
    """Launches a kernel for gate and up, with a program for some features of each assignment, and
    one for down, with a program for some features of each token.

    Args:
        kernels: the kernel for gate and up, and that for down.
        features: the output features per program of each.
        settings: further arguments of each.

    Returns:
        What ``experts_reference`` computes.
    """
    (num_tokens, hidden), top_k = x.shape, routing.topk_ids.size(1)
    gate_up, down = experts.gate_up, experts.down
    width = gate_up.size(-2) // 2
    assert x.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous()
    assert residual is None or residual.is_contiguous()
    inner, out = x.new_empty(num_tokens * top_k, width), torch.empty_like(x)
    kernels[0][(cdiv(width, features[0]), len(inner))](
        x,
        gate_up,
        experts.gate_up_scales,
        inner,
        routing.topk_ids,
        experts.gate_up_bias,
        width,
        WIDTH=hidden,
        TOP_K=top_k,
        LIMIT=experts.limit,
        ALPHA=experts.alpha,
        **settings[0],
        **pdl_options(x),
    )
    kernels[1][(cdiv(hidden, features[1]), num_tokens)](
        inner,
        down,
        experts.down_scales,
        out,
        routing.topk_ids,
        routing.topk_weights,
        experts.down_bias,
        residual,
        hidden,
        WIDTH=width,
        TOP_K=top_k,
        **settings[1],
        **pdl_options(x),
    )
    return out


def experts_gemv(
    x: torch.Tensor, experts: ExpertWeights, routing: Routing, residual: torch.Tensor | None
) -> torch.Tensor:
    """Computes what ``experts_reference`` does, for a few tokens and weights in other formats than
    MXFP4."""
    _, hidden, width = experts.down.shape
    is_fp8 = experts.down.itemsize == 1
    gate_up = _settings(FP8_GATE_UP_CONFIG if is_fp8 else GATE_UP_CONFIG, hidden, experts.group)
    down = _settings(FP8_DOWN_CONFIG if is_fp8 else DOWN_CONFIG, width, experts.group)
    _add_down_settings(down, width, routing.topk_ids.size(1), experts.down.itemsize)
    features = gate_up["BLOCK_N"], down["BLOCK_N"]
    kernels = _gate_up_kernel, _down_kernel
    return launch_gemvs(x, experts, routing, residual, kernels, features, (gate_up, down))


def _settings(config: tuple[int, int, int], width: int, group: int | None) -> dict[str, Any]:
    block_n, block_k, num_warps = config
    assert group is None or group % block_n == block_k % group == 0
    block_k = min(block_k, next_power_of_2(width))
    unrolled = min(MAX_UNROLLED, cdiv(width, block_k))
    return {
        "GROUP": group,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "UNROLLED": unrolled,
        "num_warps": num_warps,
    }


def _add_down_settings(settings: dict[str, Any], width: int, top_k: int, itemsize: int) -> None:
    """Adds the arguments that only the second kernel has, and adapts the others to them."""
    block_k, block_t = settings["BLOCK_K"], next_power_of_2(top_k)
    # With more warps than experts, x would reach the threads through shared memory.
    num_warps = min(settings["num_warps"], block_t)
    tile_bytes = block_t * settings["BLOCK_N"] * block_k * itemsize
    num_tiles = cdiv(width, block_k)
    preloaded = min(max(1, PRELOADED_BYTES * 32 * num_warps // tile_bytes), num_tiles)
    unrolled = max(1, min(MAX_UNROLLED, num_tiles - preloaded))
    settings |= {"LENGTH": min(8, block_k), "PRELOADED": preloaded}
    settings |= {"UNROLLED": unrolled, "num_warps": num_warps}
