"""One row times an FP8 weight.

A GPU issues few instructions in the time in which it reads a byte. Converting FP8 to fp32 and
multiplying on the CUDA cores takes four per byte, and the kernel is then slower than memory. Here
weights are converted to x's dtype, which takes two instructions in bf16, and multiplied on the
tensor cores. x is not quantised.

The weight's columns are divided into slabs of SLAB columns. A warp multiplies SLABS of them at a
time by the same operand [SLAB, 8], whose column n is x at the columns of the warp's slab n % SLABS.
Of the product of slab n only column n is used. So a warp loads, adds and normalises an element of x
once (or 8 / SLABS times), in the thread that multiplies it, and no data passes through shared
memory.
"""

import torch

from nanovllm.kernels.fp8 import GROUP, fp8_values
from nanovllm.kernels.gemm.skinny import REGISTER_LIMIT, epilogue, load_bias, load_row
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import pdl_options, pdl_wait, tl, triton

SLAB = 64  # columns: 16 of each of the 4 threads that share a row in a tensor core instruction
MAX_WARPS = 8
ROWS = 16  # of the weight, for a program: the M dimension of a tensor core instruction
_SLAB = tl.constexpr(SLAB)

# Converts 4 numbers of 8 bits (sign, 4 bits of exponent, 3 of mantissa) to bf16 (sign, 8, 7), times
# 2 ** -120. The order of the results is 0, 2, 1, 3.
_TO_BF16 = tl.constexpr("""{
.reg .b32 magnitudes, others;
shr.u32 magnitudes, $2, 4;
and.b32 magnitudes, magnitudes, 0x07f007f0;
lop3.b32 $1, $2, 0x80008000, magnitudes, 0xEA;
shl.b32 others, $2, 8;
shl.b32 magnitudes, $2, 4;
and.b32 magnitudes, magnitudes, 0x07f007f0;
lop3.b32 $0, others, 0x80008000, magnitudes, 0xEA;
}""")


@triton.jit
def tile_rows(WARPS: tl.constexpr, SLABS: tl.constexpr, ROWS: tl.constexpr):
    """Returns which row of the weight (0 to ROWS - 1) and which slab (0 to SLABS WARPS - 1) is in
    each row of a tile of FP8 numbers [SLABS ROWS WARPS, SLAB], of which a warp loads 8 rows at a
    time."""
    index = tl.arange(0, SLABS * ROWS * WARPS)
    row = index // (8 * WARPS) % (ROWS // 8) * 8 + index % 8
    slab = index // 8 % WARPS * SLABS + index // (ROWS * WARPS)
    return row, slab


@triton.jit
def x_columns(WARPS: tl.constexpr, SLABS: tl.constexpr):
    """Returns the slab, [8 WARPS, 1], and the column in it, [1, SLAB / 2], of each element of x in
    the first of two tiles. The elements of the second one are 8 columns after those: a thread loads
    8 numbers of 16 bits at a time, and multiplies 16."""
    column = tl.arange(0, _SLAB // 2)
    index = tl.arange(0, 8 * WARPS)
    slab = index // 8 * SLABS + index % SLABS
    return slab[:, None], (column // 8 * 16 + column % 8)[None, :]


@triton.jit
def product_slabs(WARPS: tl.constexpr, SLABS: tl.constexpr):
    """Returns which slab each product of ``slab_operands`` belongs to: [SLABS WARPS]."""
    index = tl.arange(0, SLABS * WARPS)
    return index % WARPS * SLABS + index // WARPS


@triton.jit
def slab_operands(
    codes, lower_x, upper_x, WARPS: tl.constexpr, SLABS: tl.constexpr, ROWS: tl.constexpr
):
    """Returns the weight [SLABS WARPS, ROWS, SLAB] and x [SLABS WARPS, SLAB, 8] for a batched
    matmul of slabs, made from tiles in the order of ``tile_rows`` and ``x_columns``.

    The columns of a slab are renumbered, so that each thread multiplies what it has loaded.
    """
    dtype: tl.constexpr = lower_x.dtype
    if dtype == tl.bfloat16:
        codes = codes.to(tl.uint8, bitcast=True)
        weight = tl.inline_asm_elementwise(
            _TO_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        weight = tl.reshape(fp8_values(codes, dtype), (codes.shape[0], _SLAB // 4, 2, 2))
        weight = tl.permute(weight, (0, 1, 3, 2))
    weight = tl.reshape(weight, (SLABS, ROWS // 8, WARPS, 8, 4, 4, 4))
    weight = tl.permute(weight, (0, 2, 1, 3, 5, 4, 6))
    weight = tl.reshape(weight, (SLABS * WARPS, ROWS, _SLAB))
    x = tl.reshape(tl.join(lower_x, upper_x), (WARPS, 8, 4, 2, 2, 2, 2))
    x = tl.reshape(tl.permute(x, (0, 6, 3, 2, 5, 4, 1)), (1, WARPS, _SLAB, 8))
    x = tl.broadcast_to(x, (SLABS, WARPS, _SLAB, 8))
    return weight, tl.reshape(x, (SLABS * WARPS, _SLAB, 8))


@triton.jit
def sum_slabs(
    products, dtype: tl.constexpr, WARPS: tl.constexpr, SLABS: tl.constexpr, ROWS: tl.constexpr
):
    """Sums the products of all slabs: from [SLABS WARPS, ROWS, 8] to [ROWS]. ``dtype`` is x's."""
    slab = tl.arange(0, SLABS * WARPS) // WARPS
    is_used = slab[:, None, None] == tl.arange(0, 8)[None, None, :]
    products = tl.reshape(tl.where(is_used, products, 0.0), (SLABS, WARPS, ROWS, 8))
    sums = tl.sum(tl.sum(tl.sum(products, axis=0), axis=2), axis=0)
    return sums * 2.0**120 if dtype == tl.bfloat16 else sums


@triton.jit
def split_parts(sums, ROWS: tl.constexpr):
    """Returns the first and the second half of sums [ROWS]: gate's and up's."""
    return tl.split(tl.permute(tl.reshape(sums, (2, ROWS // 2)), (1, 0)))


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    residual_ptr,
    norm_ptr,
    sum_ptr,
    eps,
    out_features,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    SLABS: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ROWS features or, with SwiGLU, half as many from as many rows of gate and of up."""
    FEATURES: tl.constexpr = ROWS // 2 if SILU else ROWS
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    first = tl.program_id(0) * FEATURES
    row, slab = tile_rows(WARPS, SLABS, ROWS)
    part = row // FEATURES * out_features  # 0, or the first row of up
    row = part + tl.minimum(first + row % FEATURES, out_features - 1)
    column = slab[:, None] * _SLAB + tl.arange(0, _SLAB)[None, :]
    codes_ptr = weight_ptr + row.to(tl.int64)[:, None] * K + column
    codes = tl.load(codes_ptr, mask=column < K, other=0.0)
    feature = first + tl.arange(0, FEATURES)
    mask = feature < out_features
    bias, up_bias = load_bias(bias_ptr, feature, mask, out_features, SILU)
    scaled_column = product_slabs(WARPS, SLABS) * _SLAB
    if GROUP is not None:  # all features of the program are in one row of blocks
        part = tl.arange(0, ROWS) // FEATURES * out_features
        scale_ptr += ((first + part) // GROUP * (K // GROUP))[None, :]
        scale_ptr += (scaled_column // GROUP)[:, None]
    else:
        scale = tl.load(scale_ptr + feature, mask=mask, other=0.0)
        if SILU:
            up_scale = tl.load(scale_ptr + out_features + feature, mask=mask, other=0.0)
    x_slab, x_column = x_columns(WARPS, SLABS)
    x_column += x_slab * _SLAB
    pdl_wait(PDL)
    products = tl.zeros([SLABS * WARPS, ROWS, 8], tl.float32)
    squares = tl.zeros([8 * WARPS, _SLAB // 2], tl.float32)
    for start in tl.static_range(0, K, SLABS * WARPS * _SLAB):
        if start:
            codes = tl.load(codes_ptr + start, mask=column < K - start, other=0.0)
        pointers = x_ptr, residual_ptr, norm_ptr, sum_ptr
        lower_x, squares = load_row(*pointers, start + x_column, squares, K)
        upper_x, squares = load_row(*pointers, start + x_column + 8, squares, K)
        weight, x = slab_operands(codes, lower_x.to(DTYPE), upper_x.to(DTYPE), WARPS, SLABS, ROWS)
        if GROUP is None:
            products = tl.dot(weight, x, products, input_precision="ieee")
        else:
            in_row = (scaled_column < K - start)[:, None]
            block_scale = tl.load(scale_ptr + start // GROUP, mask=in_row, other=0.0)
            products += tl.dot(weight, x, input_precision="ieee") * block_scale[:, :, None]
    y = sum_slabs(products, DTYPE, WARPS, SLABS, ROWS)
    if norm_ptr is not None:
        y *= tl.rsqrt(tl.sum(squares) / (8 // SLABS * K) + eps)
    up = y
    if SILU:
        y, up = split_parts(y, ROWS)
    if GROUP is None:
        y *= scale
        if SILU:
            up *= up_scale
    tl.store(out_ptr + feature, epilogue(y, up, bias_ptr, bias, up_bias, SILU, DTYPE), mask=mask)


def fp8_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool = False,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what ``skinny_norm_linear`` does, for an FP8 weight.

    Args:
        x: [1, in].
        weight: FP8, or uint8, the bits of FP8 numbers: [out, in] or, with ``silu``, [2 out, in].
            There is no NaN in it.
        scales: fp32, those of the weight's rows, or of blocks of GROUP x GROUP elements,
            [rows / GROUP, in / GROUP].
        norm, eps, residual: as those of ``skinny_norm_linear``.

    Returns:
        The result [1, out], and x + residual [1, in].
    """
    out_features, width = weight.size(0) // (2 if silu else 1), weight.size(1)
    assert x.shape == (1, width) and x.is_contiguous() and weight.is_contiguous()
    assert residual is None or norm is not None
    has_groups = scales.dim() > 1
    assert not has_groups or not (out_features % GROUP or width % GROUP)
    out = x.new_empty(1, out_features)
    total = x if residual is None else torch.empty_like(x)
    rows, slabs, num_warps, registers = config(out_features, width, silu)
    _gemv_kernel[(cdiv(out_features, rows // 2 if silu else rows),)](
        x,
        weight,
        scales,
        bias,
        out,
        residual,
        norm,
        total,
        eps,
        out_features,
        K=width,
        ROWS=rows,
        SLABS=slabs,
        WARPS=num_warps,
        GROUP=GROUP if has_groups else None,
        SILU=silu,
        num_warps=num_warps,
        num_stages=1,
        maxnreg=registers,
        **pdl_options(x),
    )
    return out, total


def config(out_features: int, width: int, silu: bool) -> tuple[int, int, int, int]:
    """Returns ROWS, SLABS, num_warps and registers. Tuned on an H200 for the matrices of Qwen3-8B and 30B-A3B."""
    num_warps = min(MAX_WARPS, next_power_of_2(cdiv(width, 8 * SLAB)))
    return ROWS // 2 if out_features <= 1024 and not silu else ROWS, 8, num_warps, 128
