"""A GEMM with SwiGLU in its epilogue, for prefills on Hopper: the launcher of swiglu_kernel.py."""

import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.silu_and_mul import silu_and_mul_reference
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import HAS_TRITON, num_multiprocessors

logger = logging.getLogger("nanovllm")

# A tile of the result has 2 * ROWS rows, one wgmma instruction's for each consumer, and BLOCK_N
# columns. They take BLOCK_N rows of G, and as many of U. Tuned on an H200.
ROWS, BLOCK_N, BLOCK_K = 64, 128, 64
DTYPES = torch.bfloat16, torch.float16


def supports(weight: Tensor) -> bool:
    """Returns whether ``gated_linear`` can multiply by this weight [2 I, in] on its device.

    The first call for each number of columns runs a small test.
    """
    num_features, width = weight.shape
    if not weight.is_cuda or width % 8 or num_features % 16:  # rows start at multiples of 16 bytes
        return False
    return _works(weight.device, weight.dtype, width)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Computes silu(x G^T) * (x U^T), rounded once and without a bias.

    Args:
        x: [N, in], fp16 or bf16, contiguous.
        weight: [2 I, in], G above U, contiguous.

    Returns:
        [N, I].
    """
    # Deferred, because Gluon is experimental: the caller can do without it.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from nanovllm.kernels.gemm.swiglu_kernel import swiglu_kernel

    layout = NVMMASharedLayout(128, 16, 2)
    inner = len(weight) // 2
    out = x.new_empty(len(x), inner)
    num_m, num_n = cdiv(len(x), 2 * ROWS), cdiv(inner, BLOCK_N)
    swiglu_kernel[(min(num_m * num_n, num_multiprocessors(x.device)),)](
        TensorDescriptor.from_tensor(x, [2 * ROWS, BLOCK_K], layout),
        TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K], layout),
        TensorDescriptor.from_tensor(out, [ROWS, BLOCK_N], layout),
        num_m,
        num_n,
        cdiv(x.size(1), BLOCK_K),
        inner,
        num_warps=4,
    )
    return out


@cache
def _works(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Returns whether the kernel supports this GPU and dtype, compiles, and is correct for small
    matrices with ``width`` columns."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if dtype not in DTYPES or not HAS_TRITON:
        return False
    try:
        check_gated_linear(device, dtype, width)
    except Exception as error:  # compilers may raise any exception
        logger.warning(
            "the GEMM with SwiGLU for Hopper failed, so prefill takes about 5%% longer: %s: %s",
            type(error).__name__,
            error,
        )
        return False
    return True


def check_gated_linear(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Tries ``gated_linear`` on small matrices. Raises any exception of ``gated_linear``, or
    AssertionError if the result is wrong."""
    generator = torch.Generator(device).manual_seed(0)
    both = torch.randn(3 + 128, width, device=device, generator=generator, dtype=torch.float32)
    x, weight = both[:3].to(dtype), (both[3:] / width**0.5).to(dtype)
    expected = silu_and_mul_reference(F.linear(x.float(), weight.float()))
    torch.testing.assert_close(gated_linear(x, weight).float(), expected, rtol=0.02, atol=0.02)
