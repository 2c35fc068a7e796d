"""A GEMM with SwiGLU in its epilogue, for prefills on Hopper: the launcher of swiglu_kernel.py."""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import HAS_TRITON, num_multiprocessors

logger = logging.getLogger("nanovllm")

# A tile of the result has 2 * ROWS rows, one wgmma instruction's for each consumer, and BLOCK_N
# columns. They take BLOCK_N rows of G, and as many of U. Tuned on an H200.
ROWS, BLOCK_N, BLOCK_K = 64, 128, 64
DTYPES = torch.bfloat16, torch.float16
# With fewer steps in a tile, the first consumer could start two tiles before the second starts one.
MIN_STEPS = 3
_failed: set[torch.device] = set()  # where the kernel does not compile


def supports(weight: Tensor) -> bool:
    """Returns whether ``gated_linear`` can multiply by this weight [2 I, in] on its device."""
    num_features, width = weight.shape
    if not weight.is_cuda or torch.version.hip is not None or not HAS_TRITON:
        return False
    if width % 8 or num_features % 16 or weight.dtype not in DTYPES:  # rows of 16 bytes
        return False
    is_hopper = torch.cuda.get_device_capability(weight.device) == (9, 0)
    is_wide = cdiv(width, BLOCK_K) >= MIN_STEPS
    return is_hopper and is_wide and weight.device not in _failed


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Computes silu(x G^T) * (x U^T), rounded once and without a bias. If the kernel does not
    compile, which is logged once, other kernels do it.

    Args:
        x: [N, in], fp16 or bf16, contiguous.
        weight: [2 I, in], G above U, contiguous.

    Returns:
        [N, I].
    """
    try:
        return _launch(x, weight)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers may raise any exception
        _failed.add(x.device)
        logger.warning(
            "the GEMM with SwiGLU for Hopper failed, so prefill is slower: %s: %s",
            type(error).__name__,
            error,
        )
        return silu_and_mul(F.linear(x, weight))


def _launch(x: Tensor, weight: Tensor) -> Tensor:
    # Deferred, because Gluon is experimental: the caller can do without it.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from nanovllm.kernels.gemm.swiglu_kernel import swiglu_kernel

    assert cdiv(x.size(1), BLOCK_K) >= MIN_STEPS
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
