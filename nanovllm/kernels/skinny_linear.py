"""Matrix products of few rows (decode steps of small batches), limited by reading the weight once.

cuBLAS is built for large products: at 1 to 16 rows it reaches a tenth to three quarters of the
memory bandwidth on a model's smaller matrices. Here each program takes a few output features and
all of their weights, streamed through; and what surrounds the product comes along, for its cost is
launches rather than work: SwiGLU's product after it, and for a single row the residual add and
RMSNorm before it. The norm's scale is one number, so it is applied to the result, and its sum of
squares is gathered on the way.

With programmatic dependent launch, a program requests its first weights before it waits for the
kernel that makes its input.
"""

import torch

from nanovllm.kernels.compat import chained, shared_memory, tl, triton

MAX_ROWS = 16
# Larger products (output heads) are long enough for cuBLAS to reach the bandwidth.
MAX_FEATURES = 1 << 16


@triton.jit
def _finish(
    y, up, bias_ptr, feature, mask, out_features, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Bias and SwiGLU, rounded where separate kernels would round."""
    if HAS_BIAS:
        y += tl.load(bias_ptr + feature, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            up += tl.load(bias_ptr + out_features + feature, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        gate = y.to(DTYPE).to(tl.float32)
        y = (gate / (1 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up.to(DTYPE).to(tl.float32)
    return y.to(DTYPE)


@triton.jit
def _vector_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    residual_ptr,
    norm_ptr,
    sum_ptr,
    eps,
    out_features,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, on the CUDA cores: every thread multiplies what it has loaded."""
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_weight = feature < out_features
    row_ptr = weight_ptr + feature[:, None].to(tl.int64) * K
    up_ptr = row_ptr + out_features.to(tl.int64) * K
    column = tl.arange(0, BLOCK_K)
    mask = in_weight[:, None] & (column < K)[None, :]
    weight = tl.load(row_ptr + column[None, :], mask=mask, other=0.0)
    up_weight = weight
    if SILU:
        up_weight = tl.load(up_ptr + column[None, :], mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        if start:
            column = start + tl.arange(0, BLOCK_K)
            mask = in_weight[:, None] & (column < K)[None, :]
            weight = tl.load(row_ptr + column[None, :], mask=mask, other=0.0)
            if SILU:
                up_weight = tl.load(up_ptr + column[None, :], mask=mask, other=0.0)
        in_row = column < K
        x = tl.load(x_ptr + column, mask=in_row, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + column, mask=in_row, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            is_first = column * 0 + tl.program_id(0) == 0
            tl.store(sum_ptr + column, x, mask=in_row & is_first)
        x = x.to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + column, mask=in_row, other=0.0).to(tl.float32)
        acc += weight.to(tl.float32) * x[None, :]
        if SILU:
            up_acc += up_weight.to(tl.float32) * x[None, :]
    scale = tl.rsqrt(tl.sum(squares) / K + eps) if HAS_NORM else 1.0
    y = tl.sum(acc, axis=1) * scale
    up = tl.sum(up_acc, axis=1) * scale if SILU else y
    dtype = out_ptr.dtype.element_ty
    out = _finish(y, up, bias_ptr, feature, in_weight, out_features, HAS_BIAS, SILU, dtype)
    tl.store(out_ptr + feature, out, mask=in_weight)


@triton.jit
def _matrix_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    out_features,
    num_rows,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Several rows, on the tensor cores, with the weight as the side that fills a tile."""
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    in_weight = feature < out_features
    weight_row = weight_ptr + feature.to(tl.int64) * K
    up_row = weight_row + out_features.to(tl.int64) * K
    row = tl.arange(0, BLOCK_M)[None, :]
    is_row = row < num_rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_K)
        mask = in_weight & (column < K)[None, :]
        weight = tl.load(weight_row + column[None, :], mask=mask, other=0.0)
        x_mask = (column < K)[:, None] & is_row
        x = tl.load(x_ptr + row * K + column[:, None], mask=x_mask, other=0.0)
        acc = tl.dot(weight, x, acc, input_precision=PRECISION)
        if SILU:
            up_weight = tl.load(up_row + column[None, :], mask=mask, other=0.0)
            up = tl.dot(up_weight, x, up, input_precision=PRECISION)
    dtype = out_ptr.dtype.element_ty
    out = _finish(acc, up, bias_ptr, feature, in_weight, out_features, HAS_BIAS, SILU, dtype)
    tl.store(out_ptr + row * out_features + feature, out, mask=is_row & in_weight)


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool = False
) -> torch.Tensor:
    """x W^T + b in one launch; with ``silu``, W is gate and up one above the other, and the
    result SwiGLU's product.

    Args:
        x: [1 to MAX_ROWS, in], contiguous.
        weight: [out, in] or [2 out, in].
    """
    if len(x) == 1:
        return skinny_norm_linear(x, weight, bias, silu)[0]
    out_features, width = _check(x, weight, silu)
    out = x.new_empty(len(x), out_features)
    block_n, block_k, num_warps, stages = matrix_config(x, out_features, silu)
    _matrix_kernel[(triton.cdiv(out_features, block_n),)](
        x,
        weight,
        bias,
        out,
        out_features,
        len(x),
        K=width,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HAS_BIAS=bias is not None,
        SILU=silu,
        STAGES=stages,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        num_warps=num_warps,
        **chained(x),
    )
    return out


def skinny_norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool = False,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``skinny_linear`` of the RMSNorm of a single row x [1, in] with its residual; and their
    sum."""
    out_features, width = _check(x, weight, silu)
    assert len(x) == 1 and (residual is None or norm is not None)
    out = x.new_empty(1, out_features)
    total = x if residual is None else torch.empty_like(x)
    block_n, block_k, num_warps, launch = vector_config(x, out_features, silu)
    _vector_kernel[(triton.cdiv(out_features, block_n),)](
        x,
        weight,
        bias,
        out,
        residual,
        norm,
        total,
        eps,
        out_features,
        K=width,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None,
        SILU=silu,
        num_warps=num_warps,
        **launch,
    )
    return out, total


def _check(x: torch.Tensor, weight: torch.Tensor, silu: bool) -> tuple[int, int]:
    """(Output features, input features)."""
    assert 0 < len(x) <= MAX_ROWS and x.is_contiguous() and weight.is_contiguous()
    assert x.shape[1:] == weight.shape[1:]
    return weight.size(0) // (2 if silu else 1), weight.size(1)


# Tuned on an H200 for the matrices of 0.6B to 8B models, of one rank and of two.


def vector_config(
    x: torch.Tensor, out_features: int, silu: bool
) -> tuple[int, int, int, dict[str, bool]]:
    """BLOCK_N, BLOCK_K, num_warps, and how to launch."""
    width = x.size(1)
    block_k = min(2048, triton.next_power_of_2(width))
    if silu and width > 2048:
        return 2, block_k, 8, {"PDL": False}  # a tile waiting beside a running one costs more
    if silu:
        return 8, min(1024, block_k), 4, chained(x)
    if width <= 1024 or out_features > 4096:
        block_n = 8
    else:
        block_n = 2 if out_features <= 1024 < width // 2 else 4
    return block_n, block_k, 8 if block_n * block_k >= 8192 else 4, chained(x)


def matrix_config(x: torch.Tensor, out_features: int, silu: bool) -> tuple[int, int, int, int]:
    """BLOCK_N, BLOCK_K, num_warps, stages."""
    block_k = max(16, min(512, triton.next_power_of_2(x.size(1))))
    if x.dtype is torch.float32 or shared_memory(x.device) < 200 << 10:
        return 16, min(block_k, 128), 4, 2
    if silu:
        return 32, min(block_k, 256), 4, 4
    return (16, block_k, 4, 6) if out_features <= 2048 else (32, block_k, 4, 4)
