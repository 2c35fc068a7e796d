"""Experts' MLPs for a few tokens and FP8 weights, one GEMV per assignment, without sorting.

The kernels multiply as ``gemm/fp8_gemv.py`` does. The second one multiplies all k experts' outputs
of a token as one row: each slab belongs to an expert, whose weight it is multiplied by.
"""

import torch

from nanovllm.kernels.gemm.fp8_gemv import (
    ROWS,
    SLAB,
    product_slabs,
    slab_operands,
    split_parts,
    sum_slabs,
    tile_rows,
    x_columns,
)
from nanovllm.kernels.moe.activation import gated_activation
from nanovllm.kernels.moe.experts import ExpertWeights
from nanovllm.kernels.moe.gemv import launch_gemvs
from nanovllm.kernels.moe.route import Routing
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import pdl_wait, tl, triton

# Tuned for one token of Qwen3-30B-A3B (hidden size 2048, top 8, intermediate size 768) on an H200.
GATE_UP_CONFIG = 8, 2, 128
DOWN_CONFIG = 8, 16, 128
_SLAB, _ROWS = tl.constexpr(SLAB), tl.constexpr(ROWS)


@triton.jit
def _gate_up_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    experts_ptr,
    bias_ptr,
    out_features,
    scales_ptr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    GROUP: tl.constexpr,
    SLABS: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row a of the result [N k, I] is activation(x[a // TOP_K] W^T + bias), with the W and bias of
    the expert of assignment a. ``out_features`` is I, and WIDTH is the hidden size. The scales are
    those of rows or, unless GROUP is None, of blocks."""
    FEATURES: tl.constexpr = _ROWS // 2
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    pdl_wait(PDL)
    assignment = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts_ptr + assignment).to(tl.int64) * 2
    first = tl.program_id(0) * FEATURES
    row, slab = tile_rows(WARPS, SLABS, _ROWS)
    row = row // FEATURES * out_features + tl.minimum(first + row % FEATURES, out_features - 1)
    column = slab[:, None] * _SLAB + tl.arange(0, _SLAB)[None, :]
    codes_ptr = weight_ptr + (expert * out_features + row)[:, None] * WIDTH + column
    x_slab, x_column = x_columns(WARPS, SLABS)
    x_column += x_slab * _SLAB
    x_ptr += assignment // TOP_K * WIDTH
    scaled_column = product_slabs(WARPS, SLABS) * _SLAB
    if GROUP is not None:  # all features of the program are in one row of blocks
        part = expert * out_features + tl.arange(0, _ROWS) // FEATURES * out_features
        block_ptr = scales_ptr + ((first + part) // GROUP * (WIDTH // GROUP))[None, :]
        block_ptr += (scaled_column // GROUP)[:, None]
    products = tl.zeros([SLABS * WARPS, _ROWS, 8], tl.float32)
    for start in tl.static_range(0, WIDTH, SLABS * WARPS * _SLAB):
        codes = tl.load(codes_ptr + start, mask=column < WIDTH - start, other=0.0)
        lower_x = tl.load(x_ptr + start + x_column, mask=x_column < WIDTH - start, other=0.0)
        upper_mask = x_column < WIDTH - start - 8
        upper_x = tl.load(x_ptr + start + x_column + 8, mask=upper_mask, other=0.0)
        weight, x = slab_operands(codes, lower_x, upper_x, WARPS, SLABS, _ROWS)
        if GROUP is None:
            products = tl.dot(weight, x, products, input_precision="ieee")
        else:
            in_row = (scaled_column < WIDTH - start)[:, None]
            scale = tl.load(block_ptr + start // GROUP, mask=in_row, other=0.0)
            products += tl.dot(weight, x, input_precision="ieee") * scale[:, :, None]
    gate, up = split_parts(sum_slabs(products, DTYPE, WARPS, SLABS, _ROWS), _ROWS)
    feature = first + tl.arange(0, FEATURES)
    mask = feature < out_features
    index = expert * out_features + feature
    if GROUP is None:
        gate *= tl.load(scales_ptr + index, mask=mask, other=0.0)
        up *= tl.load(scales_ptr + index + out_features, mask=mask, other=0.0)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + index, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + index + out_features, mask=mask, other=0.0).to(tl.float32)
    out = gated_activation(gate, up, LIMIT, ALPHA, DTYPE)
    tl.store(out_ptr + assignment * out_features + feature, out.to(DTYPE), mask=mask)


@triton.jit
def _down_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    experts_ptr,
    topk_weights_ptr,
    bias_ptr,
    residual_ptr,
    out_features,
    scales_ptr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    SLABS: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row t of the result [N, hidden] is the residual plus the sum of weight[a] * (x[a] W^T + bias)
    over the assignments a of token t, with the W and bias of the expert of assignment a.
    ``out_features`` is the hidden size, and WIDTH is I. GROUP is as in ``_gate_up_kernel``."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    SLABS_PER_EXPERT: tl.constexpr = (WIDTH + _SLAB - 1) // _SLAB
    NUM_SLABS: tl.constexpr = TOP_K * SLABS_PER_EXPERT
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    x_ptr += token * TOP_K * WIDTH
    experts_ptr += token * TOP_K
    topk_weights_ptr += token * TOP_K
    first = tl.program_id(0) * _ROWS
    row, slab = tile_rows(WARPS, SLABS, _ROWS)
    row = tl.minimum(first + row, out_features - 1)
    x_slab, x_column = x_columns(WARPS, SLABS)
    product_slab = product_slabs(WARPS, SLABS)
    feature = first + tl.arange(0, _ROWS)
    mask = feature < out_features
    products = tl.zeros([SLABS * WARPS, _ROWS, 8], tl.float32)
    for start in tl.static_range(0, NUM_SLABS, SLABS * WARPS):
        of_tile = start + slab
        is_used = of_tile < NUM_SLABS
        expert = tl.load(experts_ptr + of_tile // SLABS_PER_EXPERT, mask=is_used, other=0)
        column = (of_tile % SLABS_PER_EXPERT * _SLAB)[:, None] + tl.arange(0, _SLAB)[None, :]
        codes_ptr = weight_ptr + (expert.to(tl.int64) * out_features + row)[:, None] * WIDTH
        codes_mask = is_used[:, None] & (column < WIDTH)
        codes = tl.load(codes_ptr + column, mask=codes_mask, other=0.0)
        of_x = start + x_slab
        column = of_x % SLABS_PER_EXPERT * _SLAB + x_column
        x_is_used = of_x < NUM_SLABS
        of_row_ptr = x_ptr + of_x // SLABS_PER_EXPERT * WIDTH + column
        lower_x = tl.load(of_row_ptr, mask=x_is_used & (column < WIDTH), other=0.0)
        upper_x = tl.load(of_row_ptr + 8, mask=x_is_used & (column < WIDTH - 8), other=0.0)
        weight, x = slab_operands(codes, lower_x, upper_x, WARPS, SLABS, _ROWS)
        of_product = start + product_slab
        is_used = of_product < NUM_SLABS
        assignment = of_product // SLABS_PER_EXPERT
        expert = tl.load(experts_ptr + assignment, mask=is_used, other=0).to(tl.int64)
        scale = tl.load(topk_weights_ptr + assignment, mask=is_used, other=0.0)[:, None]
        if GROUP is None:
            row_scale_ptr = scales_ptr + expert[:, None] * out_features + feature[None, :]
            scale *= tl.load(row_scale_ptr, mask=mask[None, :], other=0.0)
        else:  # all features of the program are in one row of blocks
            block = (expert * out_features + first) // GROUP * (WIDTH // GROUP)
            block += of_product % SLABS_PER_EXPERT * _SLAB // GROUP
            scale *= tl.load(scales_ptr + block)[:, None]
        products += tl.dot(weight, x, input_precision="ieee") * scale[:, :, None]
    out = sum_slabs(products, DTYPE, WARPS, SLABS, _ROWS)
    if bias_ptr is not None:
        for i in tl.static_range(TOP_K):
            expert = tl.load(experts_ptr + i).to(tl.int64)
            bias = tl.load(bias_ptr + expert * out_features + feature, mask=mask, other=0.0)
            out += bias.to(tl.float32) * tl.load(topk_weights_ptr + i)
    address = token * out_features + feature
    if residual_ptr is not None:
        out += tl.load(residual_ptr + address, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + address, out.to(DTYPE), mask=mask)


def experts_fp8_gemv(
    x: torch.Tensor, experts: ExpertWeights, routing: Routing, residual: torch.Tensor | None
) -> torch.Tensor:
    """Computes what ``experts_reference`` does, for a few tokens and FP8 weights without NaN."""
    width = experts.down.size(2)
    num_slabs = routing.topk_ids.size(1) * cdiv(width, SLAB)
    assert experts.group is None or experts.group % SLAB == 0
    slabs, warps, registers = GATE_UP_CONFIG
    gate_up = {"GROUP": experts.group, "SLABS": slabs, "WARPS": warps, "num_warps": warps, "maxnreg": registers, "num_stages": 1, "scales_ptr": experts.gate_up_scales}
    slabs, warps, registers = DOWN_CONFIG
    warps = min(warps, next_power_of_2(cdiv(num_slabs, slabs)))
    down = {"GROUP": experts.group, "SLABS": slabs, "WARPS": warps, "num_warps": warps, "maxnreg": registers, "num_stages": 1, "scales_ptr": experts.down_scales}
    kernels, features = (_gate_up_kernel, _down_kernel), (ROWS // 2, ROWS)
    return launch_gemvs(x, experts, routing, residual, kernels, features, (gate_up, down))
