"""Experts' MLPs for a few tokens and weights in MXFP4, one GEMV per assignment, without sorting.

Dequantisation takes about as many instructions as the GPU can issue while it reads the weights. So
it has to run on many warps at once, and each warp must have its next weights in flight. A program
has few features, and its warps share their columns: each warp multiplies some of the groups of
columns on the tensor cores, and the warps' sums are added at the end. The first kernel computes
gate, up and the activation. In the second one, warps also share the k experts of the token, and the
result is the sum of their outputs and the residual.
"""

import torch

from nanovllm.kernels.gemm.skinny import REGISTER_LIMIT
from nanovllm.kernels.moe.activation import gated_activation
from nanovllm.kernels.moe.experts import ExpertWeights
from nanovllm.kernels.moe.gemv import launch_gemvs
from nanovllm.kernels.moe.mxfp4 import add_block, dequantize_part, rescale
from nanovllm.kernels.moe.route import Routing
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import tl, triton

FEATURES = 16  # of a program, in each kernel: the M dimension of a tensor core instruction
# Tuned for one token of gpt-oss-20b (hidden size 2880, top 4, intermediate size 2880) on an H200.
GATE_UP_WARPS = 4
DOWN_WARPS_PER_EXPERT = 2
MAX_UNROLLED = 9  # iterations of a loop, for one token
PRELOADED = 3  # iterations of down whose weights are requested before the wait for gate and up
_FEATURES = tl.constexpr(FEATURES)


@triton.jit
def _in_matmul_order(tile, BLOCKS: tl.constexpr, WARPS: tl.constexpr):
    """Rearranges a tile [BLOCKS * WARPS * 8, 32], of which a warp has loaded 8 rows at a time and a
    thread 8 columns of a row, to [WARPS, BLOCKS * 8, 32].

    Columns are renumbered, so that each thread multiplies what it has loaded: see
    ``gemm/skinny.py``.
    """
    tile = tl.reshape(tile, (BLOCKS, WARPS, 8, 4, 4, 2))
    tile = tl.permute(tile, (1, 0, 2, 4, 3, 5))
    return tl.reshape(tile, (WARPS, BLOCKS * 8, 32))


@triton.jit
def _in_rows(rows, BLOCKS: tl.constexpr, WARPS: tl.constexpr):
    """Rearranges a number for each row of such a tile: to [WARPS, BLOCKS * 8, 1]."""
    rows = tl.permute(tl.reshape(rows, (BLOCKS, WARPS, 8)), (1, 0, 2))
    return tl.reshape(rows, (WARPS, BLOCKS * 8, 1))


@triton.jit
def _load_x(ptrs, column, mask, PART: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    """Loads the columns of x that belong to block PART of each warp's group: [WARPS, 32, 8]."""
    if WIDTH < 128:
        mask = mask & (column + 32 * PART >= 0)
    x = tl.load(ptrs + 32 * PART, mask=mask, other=0.0)
    return tl.permute(_in_matmul_order(x, 1, WARPS), (0, 2, 1))


@triton.jit
def _multiply_groups(words, scales, x_0, x_1, x_2, x_3, acc):
    """Multiplies a group of each warp, words [WARPS, FEATURES, 32], and adds the result to acc."""
    dtype: tl.constexpr = x_0.dtype
    acc = add_block(dequantize_part(words, scales, 0, dtype), x_0, acc)
    acc = add_block(dequantize_part(words, scales, 1, dtype), x_1, acc)
    acc = add_block(dequantize_part(words, scales, 2, dtype), x_2, acc)
    return add_block(dequantize_part(words, scales, 3, dtype), x_3, acc)


@triton.jit
def _load_group(
    words_ptrs, scales_ptrs, mask, out_features,
    GATED: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Loads a group of each warp: words and scales of the weight and, with GATED, of the rows of
    up."""
    scales_mask = _in_rows(mask, BLOCKS, WARPS)
    words = _in_matmul_order(tl.load(words_ptrs, mask=mask, other=0), BLOCKS, WARPS)
    scales = tl.load(scales_ptrs, mask=scales_mask, other=0)
    up_words = words
    up_scales = scales
    if GATED:
        up_words = tl.load(words_ptrs + out_features * 32, mask=mask, other=0)
        up_words = _in_matmul_order(up_words, BLOCKS, WARPS)
        up_scales = tl.load(scales_ptrs + out_features, mask=scales_mask, other=0)
    return words, scales, up_words, up_scales


@triton.jit
def _add_group(
    group, x_ptr, start, acc, up_acc,
    WIDTH: tl.constexpr, GATED: tl.constexpr, NUM_EXPERTS: tl.constexpr, WARPS: tl.constexpr,
    WARPS_PER_EXPERT: tl.constexpr,
):  # fmt: skip
    """Multiplies what ``_load_group`` has loaded, which is each warp's group after ``start``, and
    adds the results to acc and, with GATED, up_acc. Arguments are as in ``_multiply``."""
    NUM_GROUPS: tl.constexpr = (WIDTH + 127) // 128
    words, scales, up_words, up_scales = group
    # Of 8 rows of x that a matmul needs, one is real.
    index, column = tl.arange(0, WARPS * 8), tl.arange(0, 32)
    warp = index // 8
    x_group = start + warp % WARPS_PER_EXPERT
    is_used = (index % 8 == 0) & (warp // WARPS_PER_EXPERT < NUM_EXPERTS)
    mask = (is_used & (x_group < NUM_GROUPS))[:, None]
    first = tl.minimum(x_group * 128, WIDTH - 128)[:, None]  # the last one may overlap another
    ptrs = x_ptr + (warp // WARPS_PER_EXPERT)[:, None] * WIDTH + first + column[None, :]
    columns = first + column[None, :]
    x_0 = _load_x(ptrs, columns, mask, 0, WIDTH, WARPS)
    x_1 = _load_x(ptrs, columns, mask, 1, WIDTH, WARPS)
    x_2 = _load_x(ptrs, columns, mask, 2, WIDTH, WARPS)
    x_3 = _load_x(ptrs, columns, mask, 3, WIDTH, WARPS)
    acc = _multiply_groups(words, scales, x_0, x_1, x_2, x_3, acc)
    if GATED:
        up_acc = _multiply_groups(up_words, up_scales, x_0, x_1, x_2, x_3, up_acc)
    return acc, up_acc


@triton.jit
def _multiply(
    x_ptr,
    words_ptr,
    scales_ptr,
    experts_ptr,
    out_features,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    WARPS: tl.constexpr,
    WARPS_PER_EXPERT: tl.constexpr,
    UNROLLED: tl.constexpr,
    PRELOADED: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Multiplies x [NUM_EXPERTS, WIDTH], a row for each of the experts at ``experts_ptr``, by the
    program's rows of the experts' weights [out_features, WIDTH] or, with GATED, by its rows of gate
    and of up. Returns fp32 [WARPS, FEATURES] for both; without GATED, the second one is zero. Warp
    w sums over a share of the columns of expert w // WARPS_PER_EXPERT. If there is no such expert,
    its sums are zero. With WAITS, it waits for the previous kernel, which writes x, when it has
    requested the weights of its first PRELOADED iterations.
    """
    BLOCKS: tl.constexpr = _FEATURES // 8
    NUM_GROUPS: tl.constexpr = (WIDTH + 127) // 128
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    index = tl.arange(0, BLOCKS * WARPS * 8)
    column = tl.arange(0, 32)
    # Of each row of the tile of the weight: its warp, and which row of the weight it is.
    warp, block = index // 8 % WARPS, index // 8 // WARPS
    num_rows = (2 if GATED else 1) * out_features
    row = tl.minimum(tl.program_id(0) * _FEATURES + block * 8 + index % 8, out_features - 1)
    is_used = warp // WARPS_PER_EXPERT < NUM_EXPERTS
    expert = tl.load(
        experts_ptr + warp // WARPS_PER_EXPERT, mask=is_used, other=0, cache_modifier=".cg"
    )
    row += expert.to(tl.int64) * NUM_GROUPS * num_rows + warp % WARPS_PER_EXPERT * num_rows
    words_ptrs = words_ptr + row[:, None] * 32 + column[None, :]
    # A tile has fewer scales than the program has threads. So the compiler loads each one into all
    # registers that need it, without shared memory, where warps would wait for each other.
    scales_ptrs = scales_ptr + _in_rows(row, BLOCKS, WARPS)
    acc = tl.zeros([WARPS, _FEATURES, 8], tl.float32)
    up_acc = tl.zeros([WARPS, _FEATURES, 8], tl.float32)
    preloaded = ()
    for step in tl.static_range(PRELOADED):
        mask = (is_used & (step * WARPS_PER_EXPERT + warp % WARPS_PER_EXPERT < NUM_GROUPS))[:, None]
        group = _load_group(words_ptrs, scales_ptrs, mask, out_features, GATED, BLOCKS, WARPS)
        preloaded += (group,)  # type: ignore[assignment]
        words_ptrs += WARPS_PER_EXPERT * num_rows * 32
        scales_ptrs += WARPS_PER_EXPERT * num_rows
    if WAITS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for step in tl.static_range(PRELOADED):
        acc, up_acc = _add_group(
            preloaded[step], x_ptr, step * WARPS_PER_EXPERT, acc, up_acc,
            WIDTH, GATED, NUM_EXPERTS, WARPS, WARPS_PER_EXPERT,
        )  # fmt: skip
    first = PRELOADED * WARPS_PER_EXPERT
    for start in tl.range(first, NUM_GROUPS, WARPS_PER_EXPERT, loop_unroll_factor=UNROLLED):
        mask = (is_used & (start + warp % WARPS_PER_EXPERT < NUM_GROUPS))[:, None]
        group = _load_group(words_ptrs, scales_ptrs, mask, out_features, GATED, BLOCKS, WARPS)
        words_ptrs += WARPS_PER_EXPERT * num_rows * 32
        scales_ptrs += WARPS_PER_EXPERT * num_rows
        acc, up_acc = _add_group(
            group, x_ptr, start, acc, up_acc, WIDTH, GATED, NUM_EXPERTS, WARPS, WARPS_PER_EXPERT
        )
    return rescale(tl.sum(acc, axis=2), DTYPE), rescale(tl.sum(up_acc, axis=2), DTYPE)


@triton.jit
def _gate_up_kernel(
    x_ptr,
    words_ptr,
    word_scales_ptr,
    out_ptr,
    experts_ptr,
    bias_ptr,
    out_features,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row a of the result [N k, I] is activation(x[a // TOP_K] W^T + bias), with the W and bias of
    the expert of assignment a. ``out_features`` is I, and WIDTH is the hidden size."""
    if PDL:  # in this order, because the second kernel reads the routing before its own wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    assignment = tl.program_id(1)
    expert = tl.load(experts_ptr + assignment).to(tl.int64)
    gate, up = _multiply(
        x_ptr + (assignment // TOP_K).to(tl.int64) * WIDTH, words_ptr, word_scales_ptr,
        experts_ptr + assignment, out_features, WIDTH, True, 1, WARPS, WARPS, UNROLLED, 0, False,
    )  # fmt: skip
    gate, up = tl.sum(gate, axis=0), tl.sum(up, axis=0)
    feature = tl.program_id(0) * _FEATURES + tl.arange(0, _FEATURES)
    mask = feature < out_features
    if bias_ptr is not None:
        bias_ptr += expert * 2 * out_features + feature
        gate += tl.load(bias_ptr, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + out_features, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = gated_activation(gate, up, LIMIT, ALPHA, dtype)
    address = out_ptr + assignment.to(tl.int64) * out_features + feature
    tl.store(address, out.to(dtype), mask=mask)


@triton.jit
def _down_kernel(
    x_ptr,
    words_ptr,
    word_scales_ptr,
    out_ptr,
    experts_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_features,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    WARPS: tl.constexpr,
    WARPS_PER_EXPERT: tl.constexpr,
    UNROLLED: tl.constexpr,
    PRELOADED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row t of the result [N, hidden] is the residual plus the sum of scale[a] * (x[a] W^T + bias)
    over the assignments a of token t, with the W and bias of the expert of assignment a.
    ``out_features`` is the hidden size, and WIDTH is I."""
    token = tl.program_id(1).to(tl.int64)
    first = token * TOP_K
    warp = tl.arange(0, WARPS)
    i = warp // WARPS_PER_EXPERT
    feature = tl.program_id(0) * _FEATURES + tl.arange(0, _FEATURES)
    mask = feature < out_features
    address = token * out_features + feature
    # Before the wait, what earlier kernels than the first one wrote is read as in ``gemv.py``.
    scale = tl.load(scales_ptr + first + i, mask=i < TOP_K, other=0.0, cache_modifier=".cg")
    residual = 0.0
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + address, mask=mask, other=0.0, cache_modifier=".cg")
        residual = residual.to(tl.float32)
    bias = 0.0
    if bias_ptr is not None:
        # Once for each expert.
        is_first = (i < TOP_K) & (warp % WARPS_PER_EXPERT == 0)
        expert = tl.load(experts_ptr + first + i, mask=is_first, other=0, cache_modifier=".cg")
        bias_row = bias_ptr + expert.to(tl.int64)[:, None] * out_features
        bias_mask = is_first[:, None] & mask[None, :]
        bias = tl.load(bias_row + feature[None, :], mask=bias_mask, other=0.0).to(tl.float32)
    sums, _ = _multiply(
        x_ptr + first * WIDTH, words_ptr, word_scales_ptr, experts_ptr + first, out_features,
        WIDTH, False, TOP_K, WARPS, WARPS_PER_EXPERT, UNROLLED, PRELOADED, PDL,
    )  # fmt: skip
    out = tl.sum((sums + bias) * scale[:, None], axis=0) + residual
    tl.store(out_ptr + address, out.to(out_ptr.dtype.element_ty), mask=mask)


def experts_gemv_mxfp4(
    x: torch.Tensor, experts: ExpertWeights, routing: Routing, residual: torch.Tensor | None
) -> torch.Tensor:
    """Computes what ``experts_reference`` does, for a few tokens and weights in MXFP4."""
    num_tokens, top_k = routing.topk_ids.shape
    hidden_groups = experts.gate_up.size(1)
    down_warps = next_power_of_2(top_k) * DOWN_WARPS_PER_EXPERT
    preloaded, max_unrolled = PRELOADED, MAX_UNROLLED
    if num_tokens > 1:  # there are enough warps
        preloaded, max_unrolled = 1, 1
    gate_up_iterations = cdiv(hidden_groups, GATE_UP_WARPS)
    down_iterations = cdiv(experts.down.size(1), DOWN_WARPS_PER_EXPERT)
    preloaded = min(preloaded, down_iterations)
    shared = {"num_stages": 1, **REGISTER_LIMIT}  # weights go straight to registers
    gate_up = shared | {
        "WARPS": GATE_UP_WARPS,
        "UNROLLED": min(max_unrolled, gate_up_iterations),
        "num_warps": GATE_UP_WARPS,
    }
    down = shared | {
        "WARPS": down_warps,
        "WARPS_PER_EXPERT": DOWN_WARPS_PER_EXPERT,
        "PRELOADED": preloaded,
        "UNROLLED": max(1, min(max_unrolled, down_iterations - preloaded)),
        "num_warps": down_warps,
    }
    features, kernels = (FEATURES, FEATURES), (_gate_up_kernel, _down_kernel)
    return launch_gemvs(x, experts, routing, residual, kernels, features, (gate_up, down))
