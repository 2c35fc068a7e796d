"""The gated MLP's activation: silu(gate) * up."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.compat import chained, tl, triton, use_triton
from nanovllm.kernels.prefetch import NUM_SHARES, PIECE, num_columns_ahead, prefetch_share


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


@triton.jit(do_not_specialize=["num_rows"])
def _silu_and_mul_kernel(
    x_ptr,
    out_ptr,
    next_ptr,
    num_rows,
    next_rows,
    columns_ahead,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCHES: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    PIECE: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PREFETCHES:  # noqa: SIM102 (the compiler's condition)
        if row >= num_rows:
            share = tl.program_id(0) - num_rows
            if tl.program_id(1) == 0:
                prefetch_share(
                    next_ptr, next_rows, WIDTH, columns_ahead, share, NUM_SHARES, PIECE, THREADS
                )
            return
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + column, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + column, mask=mask)
    # silu is rounded before the product, as in the reference.
    silu = (gate / (1 + tl.exp(-gate))).to(up.dtype)
    tl.store(out_ptr + row * WIDTH + column, silu * up, mask=mask)


def silu_and_mul_triton(x: torch.Tensor, then: torch.Tensor | None = None) -> torch.Tensor:
    assert x.is_contiguous() and x.dim() == 2
    num_rows, width = x.size(0), x.size(1) // 2
    out = x.new_empty(num_rows, width)
    block = min(4096, triton.next_power_of_2(width))
    num_warps = max(1, block // 256)
    launch = chained(x)
    columns_ahead = num_columns_ahead(num_rows, then, launch["PDL"])
    grid = (num_rows + NUM_SHARES * (columns_ahead > 0), triton.cdiv(width, block))
    _silu_and_mul_kernel[grid](
        x,
        out,
        then,
        num_rows,
        0 if then is None else len(then),
        columns_ahead,
        WIDTH=width,
        BLOCK=block,
        PREFETCHES=columns_ahead > 0,
        NUM_SHARES=NUM_SHARES,
        PIECE=PIECE,
        THREADS=32 * num_warps,
        num_warps=num_warps,
        **launch,
    )
    return out


def silu_and_mul(x: torch.Tensor, then: torch.Tensor | None = None) -> torch.Tensor:
    """[N, 2 I], gate and up side by side -> [N, I]; ``then`` [out, I] is what that is multiplied
    by next."""
    return silu_and_mul_triton(x, then) if use_triton(x) else silu_and_mul_reference(x)
