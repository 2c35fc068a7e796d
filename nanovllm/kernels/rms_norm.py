"""Root-mean-square normalisation (RMSNorm, arXiv:1910.07467), alone or after a residual add.

With a residual, x may also be the parts of a GEMM's split-K, fp32 [parts, N, D]. Then the parts are
added first, in order, and the sum is rounded to the residual's dtype. Or it is this rank's part of
a sum over the ranks, a ``RankPart``.
"""

from functools import partial, reduce

import torch

from nanovllm.kernels.fp8 import (
    GROUP,
    Fp8Rows,
    empty_rows,
    num_warps_of,
    quantize,
    quantize_groups,
    store_quantized,
)
from nanovllm.utils.distributed import RankPart
from nanovllm.utils.triton_compat import by_device, pdl_options, pdl_wait, tl, triton


def rms_norm_reference(
    x: torch.Tensor | RankPart,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes total / rms(total) * weight over the last dimension, in fp32, where total is
    x + residual, or x without a residual. Returns (norm, total).

    The norm is rounded to the weight's dtype before it is multiplied by the weight, and to
    total's dtype after it.
    """
    assert isinstance(x, torch.Tensor)  # for a RankPart, there is the kernel
    if residual is None:
        total = x
    elif x.dim() > residual.dim():
        total = reduce(torch.add, x).to(residual.dtype) + residual
    else:
        total = x + residual
    x32 = total.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True).add_(eps))
    return ((x32 * scale).to(weight.dtype) * weight).to(total.dtype), total


def fp8_rms_norm_reference(
    x: torch.Tensor | RankPart,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> tuple[Fp8Rows, torch.Tensor]:
    """Computes what ``rms_norm_reference`` does, and quantises the norm."""
    normed, total = rms_norm_reference(x, weight, eps, residual)
    return quantize(normed), total


def fp8_group_rms_norm_reference(
    x: torch.Tensor | RankPart,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> tuple[Fp8Rows, torch.Tensor]:
    """Computes what ``rms_norm_reference`` does, and quantises groups of the norm's columns."""
    normed, total = rms_norm_reference(x, weight, eps, residual)
    return quantize_groups(normed), total


@triton.jit
def store_norm(x, weight, row, out_ptr, scale_ptr, eps, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Computes and stores the norm of a row x [D], which is zero from column WIDTH on, quantised
    unless ``scale_ptr`` is None."""
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / WIDTH + eps)
    # The norm is rounded before it is multiplied by the weight, as in transformers.
    normed = ((x32 * scale).to(weight.dtype) * weight).to(x.dtype)
    if scale_ptr is None:
        column = tl.arange(0, x.shape[0])
        tl.store(out_ptr + row * WIDTH + column, normed, mask=column < WIDTH)
    else:
        store_quantized(out_ptr, scale_ptr, row, normed, WIDTH, GROUP)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    sum_ptr,
    eps,
    WIDTH: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs process rows from last to first. The previous kernel wrote the last rows most
    # recently, so they may still be in the L2 cache.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    mask = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    pdl_wait(PDL)
    if NUM_PARTS:
        x32 = tl.zeros([column.shape[0]], tl.float32)
        for part in tl.static_range(NUM_PARTS):
            part_row = part * tl.num_programs(0) + row
            x32 += tl.load(x_ptr + part_row * WIDTH + column, mask=mask, other=0.0)
        x = x32.to(residual_ptr.dtype.element_ty)
    else:
        x = tl.load(x_ptr + row * WIDTH + column, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * WIDTH + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * WIDTH + column, x, mask=mask)
    store_norm(x, weight, row, out_ptr, scale_ptr, eps, WIDTH, GROUP)


def rms_norm_triton(
    x: torch.Tensor | RankPart,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``rms_norm_reference``. All tensors are contiguous."""
    out = torch.empty_like(_rows(x, residual))
    return out, _launch(x, weight, eps, residual, out, None, None)


def fp8_rms_norm_triton(
    x: torch.Tensor | RankPart,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    group: int | None = None,
) -> tuple[Fp8Rows, torch.Tensor]:
    """See ``fp8_rms_norm_reference``, or ``fp8_group_rms_norm_reference`` with groups. All tensors
    are contiguous."""
    rows = _rows(x, residual)
    out = empty_rows(rows, rows.size(-1), group)
    return out, _launch(x, weight, eps, residual, *out, group)


def _rows(x: torch.Tensor | RankPart, residual: torch.Tensor | None) -> torch.Tensor:
    """Returns a tensor with the shape and dtype of the norm: x may be parts of a sum."""
    if residual is not None:
        return residual
    assert isinstance(x, torch.Tensor)
    return x


def _launch(
    x: torch.Tensor | RankPart,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    group: int | None,
) -> torch.Tensor:
    """Writes the norm to ``out``, quantised if there are ``scales``. Returns x + residual."""
    assert weight.is_contiguous() and weight.shape == _rows(x, residual).shape[-1:]
    if isinstance(x, RankPart):
        summed: torch.Tensor = x.one_shot.norm(x.part, weight, eps, residual, out, scales, group)
        return summed
    assert x.is_contiguous()
    width, rows, num_parts = x.size(-1), x, 0
    if residual is not None:
        rows = residual
        num_parts = len(x) if x.dim() > rows.dim() else 0
        assert rows.is_contiguous() and rows.shape == (x.shape[1:] if num_parts else x.shape)
    total = None if residual is None else torch.empty_like(residual)
    _rms_norm_kernel[(rows.numel() // width,)](
        x,
        residual,
        weight,
        out,
        scales,
        total,
        eps,
        WIDTH=width,
        NUM_PARTS=num_parts,
        GROUP=group,
        num_warps=num_warps_of(width),
        **pdl_options(x),
    )
    return x if total is None else total


rms_norm = by_device(rms_norm_reference, rms_norm_triton)
fp8_rms_norm = by_device(fp8_rms_norm_reference, fp8_rms_norm_triton)
fp8_group_rms_norm = by_device(
    fp8_group_rms_norm_reference, partial(fp8_rms_norm_triton, group=GROUP)
)
