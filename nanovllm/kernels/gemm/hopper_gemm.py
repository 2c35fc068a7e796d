"""What the launchers of the GEMMs for Hopper share: swiglu.py, qkv.py and moe/hopper_grouped.py,
whose main loop is in hopper_loop.py, or in block_loop.py for FP8; decode_gemm.py and block_gemm.py.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.fallback import has_failed
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import HAS_TRITON, is_hopper

# A tile of the result has 2 * ROWS rows, one wgmma instruction's for each consumer, and 2 * BLOCK_N
# columns, which are those of two boxes of the weight. Tuned on an H200.
ROWS, BLOCK_N, BLOCK_K = 64, 128, 64
DTYPES = torch.bfloat16, torch.float16
# At least a kernel's STAGES - 1. With fewer steps in a tile, the first consumer could arrive twice
# at the LAG barrier before the second one waits there.
MIN_STEPS = 3


def supports(kernel: str, weight: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> bool:
    """Returns whether the kernel, which has this name in ``run_or_replace``, can multiply by a
    weight [out, in] on its device."""
    num_features, width = weight.shape
    if not HAS_TRITON or not is_hopper(weight.device):
        return False
    if width * weight.itemsize % 16 or num_features % 16 or weight.dtype not in dtypes:
        return False
    is_wide = cdiv(width, BLOCK_K) >= MIN_STEPS
    return is_wide and not has_failed(kernel, weight.device)


def describe_inputs(x: Tensor, weight: Tensor) -> tuple[Any, Any]:
    """Describes the inputs of a GEMM to the TMA."""
    # Deferred, because Gluon is experimental: the caller can do without it.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    assert cdiv(x.size(1), BLOCK_K) >= MIN_STEPS
    layout = NVMMASharedLayout(128, 16, 2)
    x_desc = TensorDescriptor.from_tensor(x, [2 * ROWS, BLOCK_K], layout)
    return x_desc, TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K], layout)
