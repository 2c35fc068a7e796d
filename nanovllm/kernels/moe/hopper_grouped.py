"""Grouped GEMMs for Hopper and many rows per expert: the launcher of hopper_grouped_kernel.py.

They compute what ``grouped.py`` describes, for weights in bf16 or fp16 and SwiGLU. The TMA loads
boxes of consecutive rows, so a kernel sorts the rows of x first. A tile has up to 128 rows of an
expert, and 256 rows of its weight. Results have the same bits as those of ``grouped.py``.
"""

import torch

from nanovllm.kernels.gemm.hopper_gemm import BLOCK_K, BLOCK_N, ROWS, describe_inputs, supports
from nanovllm.kernels.moe.combine import sum_parts
from nanovllm.kernels.moe.experts import ExpertWeights
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.moe.sort import Groups, sort_triton
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import num_multiprocessors, pdl_options, pdl_wait, tl, triton

KERNEL = "GEMM of experts"
MIN_MEAN_ROWS = 80  # per expert; with fewer, the kernel of grouped.py is as fast on an H200


def is_faster(x: torch.Tensor, experts: ExpertWeights, routing: Routing) -> bool:
    """Returns whether ``experts_hopper`` can compute this, and is faster than other kernels."""
    has_swiglu = experts.limit is None and experts.alpha == 1.0
    if experts.gate_up_bias is not None or experts.down_bias is not None or not has_swiglu:
        return False
    if routing.topk_ids.numel() < MIN_MEAN_ROWS * len(experts.down):
        return False
    weights = experts.gate_up[0], experts.down[0]
    return x.dtype is experts.down.dtype and all(supports(KERNEL, weight) for weight in weights)


@triton.jit
def _sort_rows_kernel(
    x_ptr, positions_ptr, out_ptr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, PDL: tl.constexpr
):
    """Copies each row of x [N, WIDTH] to the positions of its TOP_K assignments."""
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0)
    for i in tl.static_range(TOP_K):
        position = tl.load(positions_ptr + row * TOP_K + i).to(tl.int64)
        tl.store(out_ptr + position * WIDTH + column, x, mask=column < WIDTH)


def experts_hopper(
    x: torch.Tensor, experts: ExpertWeights, routing: Routing, residual: torch.Tensor | None
) -> torch.Tensor:
    """Computes what ``experts_reference`` does. The routing has ranks."""
    (num_tokens, hidden), top_k = x.shape, routing.topk_ids.size(1)
    groups = sort_triton(routing, 2 * ROWS)
    x_sorted = x.new_empty(num_tokens * top_k, hidden)
    warps = max(1, min(8, next_power_of_2(hidden) // 256))
    _sort_rows_kernel[(num_tokens,)](
        x, groups.positions, x_sorted, WIDTH=hidden, TOP_K=top_k, num_warps=warps, **pdl_options(x)
    )
    inner = x.new_empty(len(x_sorted), experts.down.size(2))
    _launch(x_sorted, experts.gate_up, inner, groups, None)
    parts = x_sorted  # no longer needed, so the results take its memory
    _launch(inner, experts.down, parts, groups, routing.topk_weights)
    return sum_parts(parts, residual, top_k)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    groups: Groups,
    weights: torch.Tensor | None,
) -> None:
    """Launches the first grouped GEMM if there are no routing ``weights``, else the second. x has
    sorted rows."""
    # Deferred, because Gluon is experimental: the caller can do without it.
    from nanovllm.kernels.moe.hopper_grouped_kernel import hopper_grouped_kernel

    x_desc, weight_desc = describe_inputs(x, weight.flatten(0, 1))
    features = out.size(1)
    hopper_grouped_kernel[(num_multiprocessors(x.device),)](
        x_desc,
        weight_desc,
        out,
        groups.order,
        groups.tiles,
        groups.num_tiles,
        weights,
        features,
        cdiv(features, BLOCK_N if weights is None else 2 * BLOCK_N),
        cdiv(x.size(1), BLOCK_K),
        num_warps=4,
    )
