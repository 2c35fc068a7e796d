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
from nanovllm.utils.triton_compat import pdl_options, pdl_wait, tl, triton

# BLOCK_N, BLOCK_K and num_warps of each kernel, tuned for one token of Qwen3-30B-A3B (hidden size
# 2048, top 8, intermediate size 768) on an H200. The first kernel has 8 x 768 programs, each of
# which reads a row of gate and one of up, of 4 KB each. The second has 1,024 programs, which read 2
# rows of 1.5 KB from each of 8 experts.
GATE_UP_CONFIG = 1, 1024, 2
DOWN_CONFIG = 2, 1024, 2
# The same for FP8 weights.
FP8_GATE_UP_CONFIG = 1, 1024, 2
FP8_DOWN_CONFIG = 4, 1024, 2
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
    pdl_wait(PDL)
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
    UNROLLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row t of the result [N, hidden] is the residual plus the sum of scale[a] * (x[a] W^T + bias)
    over the assignments a of token t, with the W and bias of the expert of assignment a.
    ``out_features`` is the hidden size, and WIDTH is I. GROUP is as in ``_gate_up_kernel``."""
    pdl_wait(PDL)
    token = tl.program_id(1)
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_weight = feature < out_features
    NUM_GROUPS: tl.constexpr = 1 if GROUP is None else BLOCK_K // GROUP
    LENGTH: tl.constexpr = BLOCK_K // NUM_GROUPS
    group = tl.arange(0, NUM_GROUPS)
    first_column = group[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
    acc = tl.zeros([BLOCK_N, NUM_GROUPS, LENGTH], tl.float32)
    bias = tl.zeros([BLOCK_N], tl.float32)
    for i in tl.static_range(TOP_K):
        assignment = token * TOP_K + i
        expert = tl.load(experts_ptr + assignment).to(tl.int64)
        scale = tl.load(scales_ptr + assignment)
        if bias_ptr is not None:
            address = bias_ptr + expert * out_features + feature
            bias += tl.load(address, mask=in_weight, other=0.0).to(tl.float32) * scale
        x_row_ptr = x_ptr + assignment.to(tl.int64) * WIDTH
        row_ptr = weight_ptr + (expert * out_features + feature)[:, None, None] * WIDTH
        if weight_scales_ptr is not None and GROUP is None:
            scale_ptr = weight_scales_ptr + expert * out_features + feature
            scale *= tl.load(scale_ptr, mask=in_weight, other=0.0)[:, None, None]
        if GROUP is not None:
            first = expert * out_features + tl.program_id(0) * BLOCK_N
            scale_ptr = weight_scales_ptr + first // GROUP * (WIDTH // GROUP)
        for start in tl.range(0, WIDTH, BLOCK_K, loop_unroll_factor=UNROLLED):
            column = start + first_column
            mask = in_weight[:, None, None] & (column < WIDTH)[None, :, :]
            weight = tl.load(row_ptr + column[None, :, :], mask=mask, other=0.0)
            x = tl.load(x_row_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
            if GROUP is not None:
                block = start // GROUP + group
                block_scale = tl.load(scale_ptr + block, mask=block < WIDTH // GROUP, other=0.0)
                x *= block_scale[:, None]
            acc += fp8_values(weight, tl.float32) * (x[None, :, :] * scale)
    out = tl.sum(tl.sum(acc, axis=2), axis=1) + bias
    address = token.to(tl.int64) * out_features + feature
    if residual_ptr is not None:
        out += tl.load(residual_ptr + address, mask=in_weight, other=0.0).to(tl.float32)
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
        kernels, features, settings: of both launches the kernel, the output features per program,
            and the arguments that only this kernel has.

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
