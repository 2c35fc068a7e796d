"""The gated MLP's activation: silu(gate) * up, or GELU's tanh approximation in place of silu."""

from functools import partial

import torch
import torch.nn.functional as F

from nanovllm.kernels.fp8 import (
    GROUP,
    Fp8Rows,
    empty_rows,
    num_warps_of,
    quantize,
    quantize_groups,
    store_quantized,
)
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import by_device, pdl_options, pdl_wait, tl, triton


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up, with gate and up concatenated in x: [N, 2 I] -> [N, I]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """Computes gelu(gate) * up, with gate and up concatenated in x: [N, 2 I] -> [N, I]. GELU is
    the tanh approximation."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def invariant_silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """Computes what ``silu_and_mul_reference`` does, with the same bits for an element whatever the
    shape of x is.

    F.silu and F.gelu process the last elements of each thread's range one by one, with another exp
    or tanh than for whole SIMD vectors. torch.exp and torch.tanh have one algorithm for all
    elements, and the other operations round correctly.
    """
    gate, up = x.chunk(2, -1)
    gate = gate.float()
    return (gate / (torch.exp(-gate) + 1)).to(x.dtype).mul_(up)


def invariant_gelu_tanh_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """Like ``invariant_silu_and_mul_reference``, for ``gelu_tanh_and_mul_reference``."""
    gate, up = x.chunk(2, -1)
    gate = gate.float()
    inner = 0.7978845608028654 * (gate + 0.044715 * (gate * gate * gate))  # sqrt(2 / pi)
    return (0.5 * gate * (torch.tanh(inner) + 1)).to(x.dtype).mul_(up)


def fp8_silu_and_mul_reference(x: torch.Tensor) -> Fp8Rows:
    """Computes what ``silu_and_mul_reference`` does, and quantises it."""
    return quantize(silu_and_mul_reference(x))


def fp8_gelu_tanh_and_mul_reference(x: torch.Tensor) -> Fp8Rows:
    """Computes what ``gelu_tanh_and_mul_reference`` does, and quantises it."""
    return quantize(gelu_tanh_and_mul_reference(x))


def fp8_group_silu_and_mul_reference(x: torch.Tensor) -> Fp8Rows:
    """Computes what ``silu_and_mul_reference`` does, and quantises groups of its columns."""
    return quantize_groups(silu_and_mul_reference(x))


def fp8_group_gelu_tanh_and_mul_reference(x: torch.Tensor) -> Fp8Rows:
    """Computes what ``gelu_tanh_and_mul_reference`` does, and quantises groups of its columns."""
    return quantize_groups(gelu_tanh_and_mul_reference(x))


@triton.jit
def _silu_and_mul_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    # Programs process rows from last to first. The previous kernel wrote the last rows most
    # recently, so they may still be in the L2 cache.
    NUM_BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // NUM_BLOCKS).to(tl.int64)
    column = program % NUM_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + column, mask=mask, other=0.0)
    # Half of (1 + tanh(y)) is sigmoid(2 y), so GELU's tanh approximation is gate * sigmoid(2 y).
    exponent = gate
    if GELU:
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    # silu(gate) is rounded before it is multiplied by up, as in the reference.
    silu = (gate / (1 + tl.exp(-exponent))).to(up.dtype)
    if scale_ptr is None:
        tl.store(out_ptr + row * WIDTH + column, silu * up, mask=mask)
    else:  # the block is the whole row
        store_quantized(out_ptr, scale_ptr, row, silu * up, WIDTH, GROUP)


def silu_and_mul_triton(x: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    assert x.is_contiguous() and x.dim() == 2
    num_rows, width = x.size(0), x.size(1) // 2
    out = x.new_empty(num_rows, width)
    block = min(4096, next_power_of_2(width))
    grid = (num_rows * cdiv(width, block),)
    num_warps = max(1, block // 256)
    _silu_and_mul_kernel[grid](
        x,
        out,
        None,
        WIDTH=width,
        BLOCK=block,
        GELU=gelu,
        GROUP=None,
        num_warps=num_warps,
        **pdl_options(x),
    )
    return out


def fp8_silu_and_mul_triton(
    x: torch.Tensor, gelu: bool = False, group: int | None = None
) -> Fp8Rows:
    assert x.is_contiguous() and x.dim() == 2
    width = x.size(1) // 2
    out = empty_rows(x, width, group)
    block = next_power_of_2(width)
    _silu_and_mul_kernel[(len(x),)](
        x,
        *out,
        WIDTH=width,
        BLOCK=block,
        GELU=gelu,
        GROUP=group,
        num_warps=min(16, num_warps_of(block) * 2),
        **pdl_options(x),
    )
    return out


gelu_tanh_and_mul_triton = partial(silu_and_mul_triton, gelu=True)
silu_and_mul = by_device(silu_and_mul_reference, silu_and_mul_triton)
gelu_tanh_and_mul = by_device(gelu_tanh_and_mul_reference, gelu_tanh_and_mul_triton)
fp8_silu_and_mul = by_device(fp8_silu_and_mul_reference, fp8_silu_and_mul_triton)
fp8_gelu_tanh_and_mul = by_device(
    fp8_gelu_tanh_and_mul_reference, partial(fp8_silu_and_mul_triton, gelu=True)
)
fp8_group_silu_and_mul = by_device(
    fp8_group_silu_and_mul_reference, partial(fp8_silu_and_mul_triton, group=GROUP)
)
fp8_group_gelu_tanh_and_mul = by_device(
    fp8_group_gelu_tanh_and_mul_reference, partial(fp8_silu_and_mul_triton, gelu=True, group=GROUP)
)
# The kernels compute each element in the same way.
invariant_silu_and_mul = by_device(invariant_silu_and_mul_reference, silu_and_mul_triton)
invariant_gelu_tanh_and_mul = by_device(
    invariant_gelu_tanh_and_mul_reference, gelu_tanh_and_mul_triton
)
