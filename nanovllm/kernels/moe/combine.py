"""The sum of the outputs of a token's experts, in a fixed order."""

import torch

from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import pdl_options, pdl_wait, tl, triton


@triton.jit
def _sum_kernel(
    parts_ptr,
    residual_ptr,
    out_ptr,
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums the TOP_K rows of each token, and the residual: [N k, width] -> [N, width]."""
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        part = tl.load(parts_ptr + (token * TOP_K + i) * width + column, mask=mask, other=0.0)
        total += part.to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + token * width + column, mask=mask, other=0.0)
        total += residual.to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_parts(parts: torch.Tensor, residual: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """Sums the ``top_k`` rows of each token in their order, and the residual.

    Args:
        parts: [N top_k, width].
        residual: [N, width], or None for zero.

    Returns:
        [N, width].
    """
    num_tokens, width = len(parts) // top_k, parts.size(1)
    out = parts.new_empty(num_tokens, width)
    block = min(1024, next_power_of_2(width))
    _sum_kernel[(num_tokens, cdiv(width, block))](
        parts,
        residual,
        out,
        width,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=max(1, block // 256),
        **pdl_options(parts),
    )
    return out
