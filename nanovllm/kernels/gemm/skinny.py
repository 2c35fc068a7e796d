"""Skinny GEMM: 1 to 16 rows, as in decode steps of small batches, which are memory-bound.

cuBLAS is built for large GEMMs. With 1 to 16 rows it reaches between a tenth and three quarters of
the memory bandwidth on a model's smaller matrices. Here each program computes a few output features
and streams their weights through registers. SwiGLU after the GEMM and, for a single row, the
residual add and RMSNorm before it are fused, because launching kernels for them would take longer
than computing them. RMSNorm divides a row by one number, its root mean square. So the kernel does
the matmul before the division, sums the row's squares in the same pass, and divides the result.

With programmatic dependent launch, a program requests its first weights before it waits for the
kernel that produces its input.

A single row may also be multiplied by FP8 weights, which are converted to fp32 in registers. x is
not quantised.
"""

import torch

from nanovllm.kernels.fp8 import GROUP, fp8_values
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import pdl_options, pdl_wait, register_limit, tl, triton

MAX_ROWS = 16
# Without a limit, the compiler issues some loads of x only after a matmul, to save registers.
REGISTER_LIMIT = register_limit(128)

# BLOCK_N, BLOCK_K and num_warps for one row, by (output features, input features, SwiGLU or not),
# tuned in whole decode steps on an H200. In a benchmark of the kernel alone, other tiles are
# faster: what matters is also how soon the next kernel can start.
TUNED_VECTORS = {
    (4096, 1024, False): (4, 512, 1),  # q/k/v of Qwen3-0.6B
    (1024, 2048, False): (4, 2048, 4),  # o
    (3072, 1024, True): (2, 1024, 2),  # gate and up
    (6144, 2560, False): (8, 512, 2),  # q/k/v of Qwen3-4B
    (2560, 4096, False): (8, 2048, 8),  # o
    (9728, 2560, True): (1, 2048, 2),  # gate and up
    (6144, 4096, False): (2, 4096, 4),  # q/k/v of Qwen3-8B
    (4096, 4096, False): (4, 1024, 2),  # o
    (12288, 4096, True): (1, 4096, 4),  # gate and up
    (4096, 12288, False): (4, 2048, 4),  # down
    (3072, 4096, False): (2, 4096, 4),  # q/k/v of Qwen3-8B on one of two GPUs
    (6144, 4096, True): (1, 4096, 4),  # gate and up
    (5120, 2048, False): (4, 1024, 2),  # q/k/v of Qwen3-30B-A3B
    (2048, 4096, False): (2, 2048, 8),  # o
    (128, 2048, False): (1, 2048, 4),  # router
    (5120, 2880, False): (8, 1024, 4),  # q/k/v of gpt-oss
    (2880, 4096, False): (1, 2048, 4),  # o
}
TUNED_FP8_VECTORS = {
    (5120, 2048, False): (4, 2048, 4),  # q/k/v of Qwen3-30B-A3B
    (2048, 4096, False): (2, 2048, 4),  # o
}


@triton.jit
def _load_bias(bias_ptr, feature, mask, out_features, SILU: tl.constexpr):
    """Returns the bias of the features and, with SwiGLU, that of the up projection's features."""
    bias = 0.0
    up_bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + feature, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            up_bias = tl.load(bias_ptr + out_features + feature, mask=mask, other=0.0)
            up_bias = up_bias.to(tl.float32)
    return bias, up_bias


@triton.jit
def _epilogue(y, up, bias_ptr, bias, up_bias, SILU: tl.constexpr, DTYPE: tl.constexpr):
    """Adds the bias and applies SwiGLU. Rounds intermediate results as separate kernels would."""
    if bias_ptr is not None:
        y += bias
        if SILU:
            up += up_bias
    if SILU:
        gate = y.to(DTYPE).to(tl.float32)
        y = (gate / (1 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up.to(DTYPE).to(tl.float32)
    return y.to(DTYPE)


@triton.jit
def _dot_in_threads(weight, x, LENGTH: tl.constexpr):
    """Multiplies a tile of a weight [N, K] by x [K], and sums over LENGTH columns, which one thread
    has loaded: [N, K / LENGTH]."""
    products = fp8_values(weight, tl.float32) * x[None, :]
    shape: tl.constexpr = (weight.shape[0], weight.shape[1] // LENGTH, LENGTH)
    return tl.sum(tl.reshape(products, shape), axis=2)


@triton.jit
def _load_scales(scale_ptr, group, NUM_GROUPS: tl.constexpr):
    """Loads the scales of columns in the given groups, which may be past the last one."""
    return tl.load(scale_ptr + group, mask=group < NUM_GROUPS, other=0.0)[None, :]


@triton.jit
def _vector_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    residual_ptr,
    norm_ptr,
    sum_ptr,
    normed_ptr,
    eps,
    out_features,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LENGTH: tl.constexpr,
    GROUP: tl.constexpr,
    NORMED: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies one row on the CUDA cores. Each thread multiplies the weights that it loaded. The
    scales of an FP8 weight are those of rows or, unless GROUP is None, of blocks. Each program
    stores NORMED columns of the norm too, unless ``normed_ptr`` is None."""
    NUM_SUMS: tl.constexpr = BLOCK_K // LENGTH
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
    bias, up_bias = _load_bias(bias_ptr, feature, in_weight, out_features, SILU)
    if GROUP is not None:  # all features of the program are in one row of blocks
        NUM_GROUPS: tl.constexpr = K // GROUP
        scale_ptr += tl.program_id(0) * BLOCK_N // GROUP * NUM_GROUPS
        up_scale_ptr = scale_ptr + out_features // GROUP * NUM_GROUPS
        first_group = tl.arange(0, NUM_SUMS) * LENGTH // GROUP
    elif scale_ptr is not None:
        row_scale = tl.load(scale_ptr + feature, mask=in_weight, other=0.0)
        if SILU:
            up_row_scale = tl.load(scale_ptr + out_features + feature, mask=in_weight, other=0.0)
    pdl_wait(PDL)
    acc = tl.zeros([BLOCK_N, NUM_SUMS], tl.float32)
    up_acc = tl.zeros([BLOCK_N, NUM_SUMS], tl.float32)
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
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + column, mask=in_row, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            is_first = column * 0 + tl.program_id(0) == 0
            tl.store(sum_ptr + column, x, mask=in_row & is_first)
        x = x.to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            x *= tl.load(norm_ptr + column, mask=in_row, other=0.0).to(tl.float32)
        part = _dot_in_threads(weight, x, LENGTH)
        if GROUP is not None:
            part *= _load_scales(scale_ptr, start // GROUP + first_group, NUM_GROUPS)
        acc += part
        if SILU:
            part = _dot_in_threads(up_weight, x, LENGTH)
            if GROUP is not None:
                part *= _load_scales(up_scale_ptr, start // GROUP + first_group, NUM_GROUPS)
            up_acc += part
    scale = tl.rsqrt(tl.sum(squares) / K + eps) if norm_ptr is not None else 1.0
    y = tl.sum(acc, axis=1) * scale
    up = tl.sum(up_acc, axis=1) * scale if SILU else y
    if scale_ptr is not None and GROUP is None:
        y *= row_scale
        if SILU:
            up *= up_row_scale
    out = _epilogue(y, up, bias_ptr, bias, up_bias, SILU, out_ptr.dtype.element_ty)
    tl.store(out_ptr + feature, out, mask=in_weight)
    if normed_ptr is not None:
        column = tl.program_id(0) * NORMED + tl.arange(0, NORMED)
        in_row = column < K
        x = tl.load(x_ptr + column, mask=in_row, other=0.0)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + column, mask=in_row, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        norm = tl.load(norm_ptr + column, mask=in_row, other=0.0)
        # It is rounded before it is multiplied by the weight, as in kernels/rms_norm.py.
        normed = (x.to(tl.float32) * scale).to(norm.dtype) * norm
        tl.store(normed_ptr + column, normed.to(x.dtype), mask=in_row)


@triton.jit
def _load_tile(
    ptr, first, num_rows, start, K: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Loads a tile [WARPS, PARTS * ROWS, BLOCK_K // WARPS] of a matrix [PARTS * num_rows, K]: ROWS
    rows of each part from ``first`` on, BLOCK_K columns from ``start`` on. A weight with SwiGLU has
    two parts, gate and up. Rows past the end of a part repeat its last row. Columns past K are
    zero.

    A warp loads 8 rows of 32 columns at a time, 8 columns per thread. Tensor core instructions
    assign columns to threads differently. But the order of columns does not matter to a dot
    product, if x and the weight use the same order. So the columns are renumbered such that each
    thread multiplies what it has loaded, and no data passes through shared memory.
    """
    BLOCKS: tl.constexpr = PARTS * ROWS // 8
    index = tl.arange(0, PARTS * ROWS * BLOCK_K // 32)
    warp = index // 8 % WARPS
    block = index // 8 // WARPS % BLOCKS
    step = index // 8 // WARPS // BLOCKS
    row = tl.minimum(first + block * 8 % ROWS + index % 8, num_rows - 1)
    row += block * 8 // ROWS * num_rows
    column = (start + (step * WARPS + warp) * 32)[:, None] + tl.arange(0, 32)[None, :]
    address = ptr + (row.to(tl.int64) * K)[:, None] + column
    tile = tl.load(address, mask=column < K, other=0.0)
    # A row's 32 columns are loaded as 4 pairs for each of 4 threads. Tensor core instructions take
    # one pair of each thread in turn.
    tile = tl.reshape(tile, (BLOCK_K // WARPS // 32, BLOCKS, WARPS, 8, 4, 4, 2))
    tile = tl.permute(tile, (2, 1, 3, 0, 5, 4, 6))
    return tl.reshape(tile, (WARPS, PARTS * ROWS, BLOCK_K // WARPS))


@triton.jit(do_not_specialize=["num_rows"])
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
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies several rows on the tensor cores. Features are the M dimension of the
    matmul, and rows of x the N dimension. Each warp takes a share of the columns, and the warps'
    results are summed at the end."""
    PARTS: tl.constexpr = 2 if SILU else 1
    first = tl.program_id(0) * BLOCK_N
    weight = _load_tile(weight_ptr, first, out_features, 0, K, BLOCK_N, PARTS, BLOCK_K, WARPS)
    feature = first + tl.arange(0, BLOCK_N)[:, None]
    in_weight = feature < out_features
    bias, up_bias = _load_bias(bias_ptr, feature, in_weight, out_features, SILU)
    pdl_wait(PDL)
    x = _load_tile(x_ptr, 0, num_rows, 0, K, BLOCK_M, 1, BLOCK_K, WARPS)
    acc = tl.zeros([WARPS, PARTS * BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(BLOCK_K, K, BLOCK_K, loop_unroll_factor=UNROLL):
        acc = tl.dot(weight, tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")
        weight = _load_tile(
            weight_ptr, first, out_features, start, K, BLOCK_N, PARTS, BLOCK_K, WARPS
        )
        x = _load_tile(x_ptr, 0, num_rows, start, K, BLOCK_M, 1, BLOCK_K, WARPS)
    acc = tl.dot(weight, tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")
    y = tl.sum(acc, axis=0)
    up = y
    if SILU:
        y, up = tl.split(tl.permute(tl.reshape(y, (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
    out = _epilogue(y, up, bias_ptr, bias, up_bias, SILU, out_ptr.dtype.element_ty)
    row = tl.arange(0, BLOCK_M)[None, :]
    mask = (row < num_rows) & in_weight
    tl.store(out_ptr + row * out_features + feature, out, mask=mask)


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool = False
) -> torch.Tensor:
    """x W^T + b in one launch or, with ``silu``, SwiGLU(x W^T + b).

    Args:
        x: [N, in], contiguous, N from 1 to MAX_ROWS.
        weight: [out, in] or, with ``silu``, [2 out, in]: gate above up.

    Returns:
        [N, out].
    """
    if len(x) == 1:
        return skinny_norm_linear(x, weight, bias, silu)[0]
    out_features, width = _check(x, weight, silu)
    out = x.new_empty(len(x), out_features)
    block_n, block_k, num_warps = matrix_config(x, out_features, silu)
    is_half = x.dtype is not torch.float32
    _matrix_kernel[(cdiv(out_features, block_n),)](
        x,
        weight,
        bias,
        out,
        out_features,
        len(x),
        K=width,
        BLOCK_M=8 if len(x) <= 8 else MAX_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        WARPS=num_warps,
        # In an unrolled loop the compiler issues loads ahead of the matmuls, as far as registers
        # allow. An fp32 matmul has too many instructions to unroll the loop.
        UNROLL=max(1, cdiv(width, block_k) - 1) if is_half else 1,
        SILU=silu,
        num_warps=num_warps,
        num_stages=1,
        **REGISTER_LIMIT,
        **pdl_options(x),
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
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies ``skinny_linear`` to RMSNorm(x + residual), for a single row x [1, in].

    Args:
        weight: as in ``skinny_linear``; or in FP8, or uint8, the bits of FP8 numbers.
        norm: [in], the weight of the RMSNorm; None to multiply x itself, without a norm.
        eps: eps of the RMSNorm.
        residual: [1, in]; None for no residual add. It needs ``norm``.
        scales: fp32, those of an FP8 weight: of its rows, or of blocks of GROUP x GROUP elements,
            [rows / GROUP, in / GROUP].

    Returns:
        The result [1, out], and x + residual [1, in].
    """
    return _multiply_vector(x, weight, bias, silu, norm, eps, residual, scales)


def skinny_norm_and_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Does what ``skinny_norm_linear`` does without SwiGLU, and returns the norm too.

    Returns:
        RMSNorm(x + residual) [1, in], its product [1, out], and x + residual [1, in].
    """
    normed = torch.empty_like(x)
    return normed, *_multiply_vector(x, weight, bias, False, norm, eps, residual, None, normed)


def _multiply_vector(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    norm: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    scales: torch.Tensor | None,
    normed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``skinny_norm_linear``. Writes the norm to ``normed``, unless it is None."""
    out_features, width = _check(x, weight, silu)
    assert len(x) == 1 and (residual is None or norm is not None)
    out = x.new_empty(1, out_features)
    total = x if residual is None else torch.empty_like(x)
    config = vector_config if scales is None else fp8_vector_config
    block_n, block_k, num_warps = config(out_features, width, silu)
    has_groups = scales is not None and scales.dim() > 1
    assert not has_groups or not (out_features % GROUP or width % GROUP)
    num_programs = cdiv(out_features, block_n)
    _vector_kernel[(num_programs,)](
        x,
        weight,
        scales,
        bias,
        out,
        residual,
        norm,
        total,
        normed,
        eps,
        out_features,
        K=width,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        # The 16 numbers of FP8 that a thread loads at once. With their sum in one register, there
        # is room for more loads in flight.
        LENGTH=1 if scales is None else min(16, block_k),
        GROUP=GROUP if has_groups else None,
        NORMED=next_power_of_2(cdiv(width, num_programs)),
        SILU=silu,
        num_warps=num_warps,
        **pdl_options(x),
    )
    return out, total


def _check(x: torch.Tensor, weight: torch.Tensor, silu: bool) -> tuple[int, int]:
    """Checks the arguments. Returns the numbers of output and input features."""
    assert 0 < len(x) <= MAX_ROWS and x.is_contiguous() and weight.is_contiguous()
    assert x.shape[1:] == weight.shape[1:]
    return weight.size(0) // (2 if silu else 1), weight.size(1)


def vector_config(out_features: int, width: int, silu: bool) -> tuple[int, int, int]:
    """Returns BLOCK_N, BLOCK_K and num_warps.

    Those that are not in TUNED_VECTORS were tuned on an H200 for the matrices of 0.5B to 32B
    models, for the smallest models in whole decode steps.
    """
    if tuned := TUNED_VECTORS.get((out_features, width, silu)):
        return tuned
    if silu:
        config = (8, 1024, 4) if width < 2048 else (1, 1024, 4) if width <= 4096 else (1, 2048, 4)
    elif width <= 1024:
        config = 8, 1024, 8
    elif out_features <= 1024:
        config = (4, 2048, 8) if width <= 2048 else (2, 2048, 4)
    else:
        config = 4, 2048 if 4096 < width < 8192 else 1024, 4
    block_n, block_k, num_warps = config
    return block_n, min(block_k, next_power_of_2(width)), num_warps


def fp8_vector_config(out_features: int, width: int, silu: bool) -> tuple[int, int, int]:
    """The same for FP8 weights, tuned for the matrices of Qwen3-0.6B and 8B."""
    if tuned := TUNED_FP8_VECTORS.get((out_features, width, silu)):
        return tuned
    if width <= 1024:
        block_n, block_k, num_warps = (4 if silu else 8), 1024, 2
    elif out_features <= 1024:
        block_n, block_k, num_warps = 2, 2048, 8
    elif width <= 4096:
        block_n, block_k, num_warps = 4 if silu or out_features <= 4096 else 8, 2048, 4
    else:
        block_n, block_k, num_warps = 2, 2048, 2
    return block_n, min(block_k, next_power_of_2(width)), num_warps


def matrix_config(x: torch.Tensor, out_features: int, silu: bool) -> tuple[int, int, int]:
    """Returns BLOCK_N, BLOCK_K (at least 32 columns per warp) and num_warps, tuned as in
    ``vector_config``."""
    if x.dtype is torch.float32:
        return 8 if silu else 16, 256, 8
    width = x.size(1)
    padded_width = next_power_of_2(width)
    if silu and width > 1024:
        return 8, 512, 4
    if out_features <= 1024 < width < 4096:  # a program has one tile, 64 registers per thread
        return 8, padded_width, padded_width // 512
    if width >= 12288:
        return 16, 1024, 4
    return 8, min(1024, max(512, padded_width)), 4
