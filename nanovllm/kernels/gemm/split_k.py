"""The end of a GEMM: bias, rounding and residual; and the sum of a split-K's parts, in order."""

from torch import Tensor

from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import pdl_options, pdl_wait, tl, triton


@triton.jit
def finish_tile(
    total, row, feature, mask, bias_ptr, residual_ptr, out_ptr, out_features
):  # fmt: skip
    """Adds the bias to the fp32 sums [rows, features] and rounds. Then adds the residual and rounds
    again, as the next norm would. Stores the result."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + feature, mask=feature < out_features, other=0.0)
        total += bias.to(tl.float32)[None, :]
    address = row.to(tl.int64)[:, None] * out_features + feature[None, :]
    out = total.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + address, mask=mask, other=0.0)
        out = (out.to(tl.float32) + residual.to(tl.float32)).to(out.dtype)
    tl.store(out_ptr + address, out, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_parts_kernel(
    parts_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    out_features,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds the parts of a split-K, bias and residual: [NUM_PARTS, num_rows, out_features] ->
    [num_rows, out_features]."""
    pdl_wait(PDL)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < num_rows)[:, None] & (feature < out_features)[None, :]
    address = parts_ptr + row.to(tl.int64)[:, None] * out_features + feature[None, :]
    size = num_rows.to(tl.int64) * out_features
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(address + part * size, mask=mask, other=0.0)
    finish_tile(total, row, feature, mask, bias_ptr, residual_ptr, out_ptr, out_features)


def add_parts(parts: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """Adds fp32 parts [parts, N, out] of a split-K in order, and the bias. Rounds the sum, and then
    adds the residual. Stores the result in ``out`` [N, out]."""
    num_parts, num_rows, out_features = parts.shape
    block_m, block_n = 4, 256
    _add_parts_kernel[(cdiv(out_features, block_n), cdiv(num_rows, block_m))](
        parts,
        bias,
        residual,
        out,
        num_rows,
        out_features,
        NUM_PARTS=num_parts,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        **pdl_options(out),
    )
