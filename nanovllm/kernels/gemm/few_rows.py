"""The batch-invariant GEMM for up to ROWS rows on Hopper, alone or with SwiGLU: the launcher of
few_rows_kernel.py."""

import torch
from torch import Tensor

from nanovllm.kernels.gemm import hopper_gemm
from nanovllm.kernels.gemm.invariant import (
    add_parts,
    invariant_linear,
    invariant_linear_add,
    part_columns,
)
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import pdl_options

EPILOGUE = "few rows"
ROWS, BLOCK_N, BLOCK_K = 8, 64, 256
STAGES = 4  # at most: 128 KB of the weight in flight, all of it for up to 1,024 columns
MAX_STEPS = 22  # tiles of x in shared memory, of 4 KB


def supports(weight: Tensor) -> bool:
    """Returns whether ``few_rows_linear`` has a kernel for a weight [out, in]."""
    width, columns = weight.size(1), part_columns(*weight.shape)
    is_whole = columns >= width or columns % BLOCK_K == 0  # no tile has columns of two parts
    is_small = min(columns, width) <= MAX_STEPS * BLOCK_K
    return is_whole and is_small and hopper_gemm.supports(EPILOGUE, weight)


def fits(weight: Tensor) -> bool:
    """Returns whether ``supports`` holds, and shared memory holds all columns of a part."""
    columns = min(part_columns(*weight.shape), weight.size(1))
    return columns <= STAGES * BLOCK_K and supports(weight)


def few_rows_linear(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """Computes ``invariant_linear`` without a bias for up to ROWS rows: [N, in], [out, in] ->
    [N, out]. ``supports`` says for which weights."""

    def run() -> Tensor:
        sums = launch(x, weight, residual)
        if sums.dim() == 2:
            return sums
        out = x.new_empty(sums.shape[1:])
        add_parts(sums, None, residual, out)
        return out

    return hopper_gemm.run_or_replace(
        EPILOGUE, x.device, run, lambda: invariant_linear(x, weight, None, residual)
    )


def few_rows_linear_add(
    x: Tensor, weight: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Computes ``invariant_linear_add`` as ``few_rows_linear`` does."""

    def run() -> tuple[Tensor, Tensor | None]:
        sums = launch(x, weight, residual)
        return sums, residual if sums.dim() == 3 else None

    return hopper_gemm.run_or_replace(
        EPILOGUE, x.device, run, lambda: invariant_linear_add(x, weight, None, residual)
    )


def few_rows_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """Computes ``silu_and_mul(few_rows_linear(x, weight))``, with the same bits: [N, in],
    [2 I, in] -> [N, I]. It is one kernel, if the weight has one part."""
    if part_columns(*weight.shape) < weight.size(1):
        return silu_and_mul(few_rows_linear(x, weight))
    return hopper_gemm.run_or_replace(
        EPILOGUE,
        x.device,
        lambda: launch(x, weight, swiglu=True),
        lambda: silu_and_mul(invariant_linear(x, weight, None)),
    )


def launch(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, swiglu: bool = False
) -> Tensor:
    """Returns the result [N, out] or, of a split-K, the parts, fp32 [parts, N, out], without the
    residual. With ``swiglu``, returns SwiGLU of the result."""
    # Deferred, because Gluon is experimental: the caller can do without it.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from nanovllm.kernels.gemm.few_rows_kernel import few_rows_kernel

    (num_rows, width), out_features = x.shape, len(weight)
    assert num_rows <= ROWS and x.is_contiguous() and weight.is_contiguous()
    columns = part_columns(out_features, width)
    parts, num_steps = cdiv(width, columns), cdiv(min(columns, width), BLOCK_K)
    grid = cdiv(out_features, BLOCK_N), parts
    layout = NVMMASharedLayout(128, 16, 2)
    weight_desc = TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K], layout)
    if swiglu:
        assert parts == 1 and residual is None
        out_features //= 2
        # A box has 8 rows of gate, the same 8 of up, the next 8 of gate, and so on: 16 rows are
        # those of a warp, and each thread has the sums of its rows i and i + 8.
        weight_desc = TensorDescriptor(
            weight,
            [out_features // 8, 2, 8, width],
            [8 * width, out_features * width, width, 1],
            [BLOCK_N // 16, 2, 8, BLOCK_K],
            NVMMASharedLayout(128, 16, 4),
        )
    if parts > 1:
        out = x.new_empty(parts, num_rows, out_features, dtype=torch.float32)
        residual = None
    else:
        out = x.new_empty(num_rows, out_features)
    few_rows_kernel[grid](
        TensorDescriptor.from_tensor(x, [ROWS, BLOCK_K], layout),
        weight_desc,
        out if residual is None else residual,
        out,
        num_rows,
        out_features,
        columns,
        NUM_STEPS=num_steps,
        STAGES=min(num_steps, STAGES),
        HAS_RESIDUAL=residual is not None,
        SWIGLU=swiglu,
        num_warps=4,
        **pdl_options(x),
    )
    return out
