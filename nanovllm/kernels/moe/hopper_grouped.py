"""Grouped GEMMs for Hopper and many rows per expert: the launcher of hopper_grouped_kernel.py, and
of block_grouped_kernel.py.

They compute what ``grouped.py`` describes, for SwiGLU and weights in bf16 or fp16, or in FP8 with
scales of blocks. The TMA loads boxes of consecutive rows, so a kernel sorts the rows of x first. A
tile has up to 128 rows of an expert, and 256 rows of its weight, or 128 in FP8. Results have the
same bits as those of ``grouped.py``.
"""

import torch

from nanovllm.kernels.fp8 import FP8, GROUP, Fp8Rows, empty_rows, quantize_rows_triton
from nanovllm.kernels.gemm.block_gemm import describe_blocks, even_steps
from nanovllm.kernels.gemm.hopper_gemm import (
    BLOCK_K,
    BLOCK_N,
    DTYPES,
    ROWS,
    describe_inputs,
    supports,
)
from nanovllm.kernels.moe.combine import sum_parts
from nanovllm.kernels.moe.experts import ExpertWeights
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.moe.sort import Groups, sort_triton
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import num_multiprocessors, pdl_options, pdl_wait, tl, triton

KERNEL = "GEMM of experts"
MIN_MEAN_ROWS = 80  # per expert; with fewer, the kernel of grouped.py is as fast on an H200
BLOCK_FEATURES, BLOCK_STAGES = 128, 6  # of a tile in FP8, and of its loop
SCALE_ALIGNMENT = 4  # scales in 16 bytes: boxes of the TMA begin at multiples of them


def is_faster(x: torch.Tensor, experts: ExpertWeights, routing: Routing) -> bool:
    """Returns whether ``experts_hopper`` can compute this, and is faster than other kernels."""
    has_swiglu = experts.limit is None and experts.alpha == 1.0
    if experts.gate_up_bias is not None or experts.down_bias is not None or not has_swiglu:
        return False
    if routing.topk_ids.numel() < MIN_MEAN_ROWS * len(experts.down):
        return False
    dtypes = (x.dtype,) if x.dtype in DTYPES else ()
    if experts.down.dtype is FP8:  # its tensor cores accumulate with 14 bits, enough for bf16 only
        dtypes = (FP8,) if experts.group == GROUP and x.dtype is torch.bfloat16 else ()
    weights = experts.gate_up[0], experts.down[0]
    return bool(dtypes) and all(supports(KERNEL, weight, dtypes) for weight in weights)


@triton.jit(do_not_specialize=["stride", "out_stride"])
def _sort_rows_kernel(
    x_ptr,
    scales_ptr,
    stride,
    positions_ptr,
    out_ptr,
    out_scales_ptr,
    out_stride,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copies each row of x [N, WIDTH] to the positions of its TOP_K assignments. If there are
    scales of groups, which lie column by column at the given strides, those too."""
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0)
    if scales_ptr is not None:
        group = tl.arange(0, BLOCK // GROUP)
        exists = group < WIDTH // GROUP
        scales = tl.load(scales_ptr + group * stride + row, mask=exists, other=0.0)
    for i in tl.static_range(TOP_K):
        position = tl.load(positions_ptr + row * TOP_K + i).to(tl.int64)
        tl.store(out_ptr + position * WIDTH + column, x, mask=column < WIDTH)
        if scales_ptr is not None:
            tl.store(out_scales_ptr + group * out_stride + position, scales, mask=exists)


def experts_hopper(
    x: torch.Tensor, experts: ExpertWeights, routing: Routing, residual: torch.Tensor | None
) -> torch.Tensor:
    """Computes what ``experts_reference`` does. The routing has ranks."""
    has_blocks = experts.down.dtype is FP8
    groups = sort_triton(routing, 2 * ROWS, SCALE_ALIGNMENT if has_blocks else 1)
    rows = _sort_rows(_quantize(x, experts), groups, routing)
    inner = x.new_empty(len(groups.order), experts.down.size(2))
    _launch(rows, experts.gate_up, experts.gate_up_scales, inner, groups, None)
    # Sorted rows are no longer needed, so results of their size take their memory.
    num_parts = routing.topk_ids.numel()
    parts = rows if isinstance(rows, torch.Tensor) else x.new_empty(num_parts, x.size(1))
    rows = _quantize(inner, experts)
    _launch(rows, experts.down, experts.down_scales, parts, groups, routing.topk_weights)
    return sum_parts(parts, residual, routing.topk_ids.size(1))


def _quantize(x: torch.Tensor, experts: ExpertWeights) -> torch.Tensor | Fp8Rows:
    return quantize_rows_triton(x, GROUP) if experts.down.dtype is FP8 else x


def _sort_rows(
    x: torch.Tensor | Fp8Rows, groups: Groups, routing: Routing
) -> torch.Tensor | Fp8Rows:
    """Returns the row of x for each assignment, in sorted order."""
    codes, scales = x if isinstance(x, Fp8Rows) else (x, None)
    (num_tokens, width), top_k = codes.shape, routing.topk_ids.size(1)
    if scales is None:
        out, out_scales = codes.new_empty(len(groups.order), width), None
    else:
        out, out_scales = empty_rows(groups.order, width, GROUP)
    _sort_rows_kernel[(num_tokens,)](
        codes,
        scales,
        0 if scales is None else scales.stride(1),
        groups.positions,
        out,
        out_scales,
        0 if out_scales is None else out_scales.stride(1),
        WIDTH=width,
        TOP_K=top_k,
        GROUP=GROUP,
        num_warps=max(1, min(8, next_power_of_2(width) // 256)),
        **pdl_options(codes),
    )
    return out if out_scales is None else Fp8Rows(out, out_scales)


def _launch(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    out: torch.Tensor,
    groups: Groups,
    weights: torch.Tensor | None,
) -> None:
    """Launches the first grouped GEMM if there are no routing ``weights``, else the second. x has
    sorted rows. ``scales`` are those of the weight's blocks in FP8."""
    if isinstance(x, Fp8Rows):
        assert scales is not None
        _launch_blocks(x, Fp8Rows(weight, scales), out, groups, weights)
        return
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


def _launch_blocks(
    x: Fp8Rows, weight: Fp8Rows, out: torch.Tensor, groups: Groups, weights: torch.Tensor | None
) -> None:
    # Deferred, because Gluon is experimental: the caller can do without it.
    from nanovllm.kernels.moe.block_grouped_kernel import block_grouped_kernel

    num_groups, weight_rows = x.codes.size(1) // GROUP, weight.codes.size(1)
    num_steps = even_steps(num_groups)
    # Features of the result per tile. With gate and up they are half as many.
    features = BLOCK_FEATURES // 2 if weights is None else BLOCK_FEATURES
    block_grouped_kernel[(num_multiprocessors(out.device),)](
        *describe_blocks(x, weight.codes.flatten(0, 1), 2 * ROWS, features),
        weight.scales,
        weights,
        groups.order,
        groups.tiles,
        groups.num_tiles,
        out,
        weight_rows,
        out.size(1) // features,
        num_groups,
        num_steps,
        FEATURES=BLOCK_FEATURES,
        STAGES=min(BLOCK_STAGES, num_steps),
        num_warps=4,
    )
