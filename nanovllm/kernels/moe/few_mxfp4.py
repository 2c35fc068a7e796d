"""Experts' MLPs for a few tokens with MXFP4 weights.

As in ``few.py``, assignments are not sorted, and the second kernel sums the outputs of a token's k
experts. Dequantised weights are multiplied by tensor cores, because conversions and multiplications
on the CUDA cores would take longer than reading the weights. A matmul has at least 8 columns, of
which x has one for each assignment. So several warps multiply different weights with the same
columns, and each keeps the result of one: in the first kernel one warp has rows of gate and one
has rows of up, and in the second one each warp has an expert.
"""

import torch

from nanovllm.kernels.moe.activation import gated_activation
from nanovllm.kernels.moe.mix import Experts
from nanovllm.kernels.moe.mxfp4 import dequantise_part, rescale
from nanovllm.kernels.moe.route import Routing
from nanovllm.utils.triton_compat import pdl_options, pdl_wait, tl, triton

# Output features of a program: the rows of a tensor core's matmul. Hopper's asynchronous matmuls
# need 64, which are too few programs for one token.
FEATURES = tl.constexpr(16)
NUM_STAGES = 4


@triton.jit
def _multiply(x_ptr, words_ptr, scales_ptr, weight_row, source, is_source, num_rows, WIDTH):
    """Multiplies rows of experts' weights with rows of x.

    Args:
        weight_row: int64 [R], the row of the weights in the first group: see ``mxfp4.py``.
        source: int64 [C], rows of x.
        is_source: [C], whether to load the row. Zeros take the place of others.
        num_rows: the number of rows of an expert's weight.
        WIDTH: the number of columns of x and of the weight.

    Returns:
        fp32 [R, C].
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    column = tl.arange(0, 32)
    words_ptrs = words_ptr + weight_row[:, None] * 32 + column[None, :]
    scales_ptrs = scales_ptr + weight_row
    x_ptrs = x_ptr + (source * WIDTH)[None, :] + column[:, None]
    acc = tl.zeros([weight_row.shape[0], source.shape[0]], tl.float32)
    for start in tl.range(0, WIDTH, 128):
        words, scales = tl.load(words_ptrs), tl.load(scales_ptrs)[:, None]
        first = tl.minimum(start, WIDTH - 128)  # the last group may overlap the one before
        for part in tl.static_range(4):
            mask = is_source[None, :]
            if WIDTH < 128:
                mask &= (column + first + 32 * part >= 0)[:, None]
            x = tl.load(x_ptrs + first + 32 * part, mask=mask, other=0.0)
            weight = dequantise_part(words, scales, part, DTYPE)
            acc = tl.dot(weight, x, acc, input_precision="ieee")
        words_ptrs += num_rows * 32
        scales_ptrs += num_rows
    return rescale(acc, DTYPE)


@triton.jit
def _gate_up_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    out_ptr,
    experts_ptr,
    bias_ptr,
    out_features,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row a of the result [N k, I] is activation(x[a // TOP_K] W^T + bias), with the W and bias of
    the expert of assignment a. ``out_features`` is I, and WIDTH is the hidden size."""
    pdl_wait(PDL)
    assignment = tl.program_id(1)
    expert = tl.load(experts_ptr + assignment).to(tl.int64)
    num_rows = 2 * out_features
    # The tile's rows: FEATURES of gate, then of up.
    row = tl.arange(0, 2 * FEATURES)
    feature = tl.minimum(tl.program_id(0) * FEATURES + row % FEATURES, out_features - 1)
    feature += row // FEATURES * out_features
    bias = tl.zeros([2 * FEATURES], tl.float32)
    if bias_ptr is not None:  # before the loop, which hides the latency
        bias = tl.load(bias_ptr + expert * num_rows + feature).to(tl.float32)
    column = tl.arange(0, 8)
    acc = _multiply(
        x_ptr,
        words_ptr,
        scales_ptr,
        expert * tl.cdiv(WIDTH, 128) * num_rows + feature,
        (assignment // TOP_K + column * 0).to(tl.int64),
        column == 0,
        num_rows,
        WIDTH,
    )
    sums = tl.sum(acc, axis=1) + bias  # the other columns are zero
    gate, up = tl.split(tl.trans(tl.reshape(sums, [2, FEATURES])))
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = gated_activation(gate, up, LIMIT, ALPHA, dtype)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    address = out_ptr + assignment.to(tl.int64) * out_features + feature
    tl.store(address, out.to(dtype), mask=feature < out_features)


@triton.jit
def _down_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    out_ptr,
    experts_ptr,
    routing_weights_ptr,
    bias_ptr,
    residual_ptr,
    out_features,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row t of the result [N, hidden] is the residual plus the sum of scale[a] * (x[a] W^T + bias)
    over the assignments a of token t, with the W and bias of the expert of assignment a.
    ``out_features`` is the hidden size, and WIDTH is I."""
    BLOCK_A: tl.constexpr = triton.next_power_of_2(TOP_K)
    pdl_wait(PDL)
    token = tl.program_id(1)
    # The tile's rows: for each assignment of the token, FEATURES of its expert.
    row = tl.arange(0, BLOCK_A * FEATURES)
    index = row // FEATURES
    assignment = token * TOP_K + tl.minimum(index, TOP_K - 1)
    expert = tl.load(experts_ptr + assignment).to(tl.int64)
    feature = tl.minimum(tl.program_id(0) * FEATURES + row % FEATURES, out_features - 1)
    scale = tl.where(index < TOP_K, tl.load(routing_weights_ptr + assignment), 0.0)
    bias = tl.zeros([BLOCK_A * FEATURES], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * out_features + feature).to(tl.float32)
    column = tl.arange(0, max(8, BLOCK_A))
    acc = _multiply(
        x_ptr,
        words_ptr,
        scales_ptr,
        expert * tl.cdiv(WIDTH, 128) * out_features + feature,
        (token * TOP_K + column).to(tl.int64),
        column < TOP_K,
        out_features,
        WIDTH,
    )
    sums = tl.sum(tl.where(index[:, None] == column[None, :], acc, 0.0), axis=1)
    out = tl.sum(tl.reshape((sums + bias) * scale, [BLOCK_A, FEATURES]), axis=0)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    address = token.to(tl.int64) * out_features + feature
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + address, mask=feature < out_features, other=0.0)
        out += residual.to(tl.float32)
    tl.store(out_ptr + address, out.to(out_ptr.dtype.element_ty), mask=feature < out_features)


def mix_few_mxfp4(
    x: torch.Tensor, experts: Experts, routing: Routing, residual: torch.Tensor | None
) -> torch.Tensor:
    """Computes what ``mix_reference`` does, for a few tokens and MXFP4 weights."""
    hidden, width = x.size(1), experts.gate_up.size(-2) // 2
    num_tokens, top_k = routing.experts.shape
    assert x.is_contiguous() and experts.gate_up.is_contiguous() and experts.down.is_contiguous()
    assert residual is None or residual.is_contiguous()
    inner = x.new_empty(num_tokens * top_k, width)
    _gate_up_kernel[(triton.cdiv(width, FEATURES.value), len(inner))](
        x,
        experts.gate_up,
        experts.gate_up_scales,
        inner,
        routing.experts,
        experts.gate_up_bias,
        width,
        WIDTH=hidden,
        TOP_K=top_k,
        LIMIT=experts.limit,
        ALPHA=experts.alpha,
        num_warps=2,
        num_stages=NUM_STAGES,
        **pdl_options(x),
    )
    out = torch.empty_like(x)
    _down_kernel[(triton.cdiv(hidden, FEATURES.value), num_tokens)](
        inner,
        experts.down,
        experts.down_scales,
        out,
        routing.experts,
        routing.weights,
        experts.down_bias,
        residual,
        hidden,
        WIDTH=width,
        TOP_K=top_k,
        num_warps=triton.next_power_of_2(top_k),
        num_stages=NUM_STAGES,
        **pdl_options(x),
    )
    return out
