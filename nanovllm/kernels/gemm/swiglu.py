"""A GEMM with SwiGLU in its epilogue, for prefills on Hopper: the launcher of swiglu_kernel.py."""

import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.fallback import run_or_replace
from nanovllm.kernels.gemm.hopper_gemm import (
    BLOCK_K,
    BLOCK_N,
    ROWS,
    describe_inputs,
)
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import num_multiprocessors

KERNEL = "GEMM with SwiGLU"


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Computes silu(x G^T) * (x U^T), rounded once and without a bias. If the kernel does not
    compile, which is logged once, other kernels do it.

    Args:
        x: [N, in], fp16 or bf16, contiguous.
        weight: [2 I, in], G above U, contiguous. ``hopper_gemm.supports`` accepts it.

    Returns:
        [N, I].
    """
    return run_or_replace(
        KERNEL,
        x.device,
        lambda: launch(x, weight),
        lambda: silu_and_mul(F.linear(x, weight)),
    )


def launch(x: Tensor, weight: Tensor, is_rounded: bool = False) -> Tensor:
    """Launches the kernel of ``gated_linear``.

    Args:
        is_rounded: whether to round the results of both matmuls and of silu, as ``silu_and_mul``
            does. Otherwise only the result is rounded.
    """
    x_desc, weight_desc = describe_inputs(x, weight)
    # Deferred, because Gluon is experimental: the caller can do without it.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from nanovllm.kernels.gemm.swiglu_kernel import swiglu_kernel

    inner = len(weight) // 2
    out = x.new_empty(len(x), inner)
    num_m, num_n = cdiv(len(x), 2 * ROWS), cdiv(inner, BLOCK_N)
    swiglu_kernel[(min(num_m * num_n, num_multiprocessors(x.device)),)](
        x_desc,
        weight_desc,
        TensorDescriptor.from_tensor(out, [ROWS, BLOCK_N], x_desc.layout),
        num_m,
        num_n,
        cdiv(x.size(1), BLOCK_K),
        inner,
        is_rounded,
        num_warps=4,
    )
    return out
