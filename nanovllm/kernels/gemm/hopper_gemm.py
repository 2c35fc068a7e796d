"""What the launchers of the GEMMs for Hopper share: swiglu.py, qkv.py and moe/hopper_grouped.py,
whose main loop is in hopper_loop.py, and decode_gemm.py."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import HAS_TRITON, is_hopper

logger = logging.getLogger("nanovllm")
T = TypeVar("T")

# A tile of the result has 2 * ROWS rows, one wgmma instruction's for each consumer, and 2 * BLOCK_N
# columns, which are those of two boxes of the weight. Tuned on an H200.
ROWS, BLOCK_N, BLOCK_K = 64, 128, 64
DTYPES = torch.bfloat16, torch.float16
# At least a kernel's STAGES - 1. With fewer steps in a tile, the first consumer could arrive twice
# at the LAG barrier before the second one waits there.
MIN_STEPS = 3
_failed: set[tuple[str, torch.device]] = set()  # kinds of kernels, and where they do not compile


def supports(kind: str, weight: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> bool:
    """Returns whether the kernel of this kind can multiply by a weight [out, in] on its
    device."""
    num_features, width = weight.shape
    if not HAS_TRITON or not is_hopper(weight.device):
        return False
    if width * weight.itemsize % 16 or num_features % 16 or weight.dtype not in dtypes:
        return False
    is_wide = cdiv(width, BLOCK_K) >= MIN_STEPS
    return is_wide and (kind, weight.device) not in _failed


def run_or_replace(
    kind: str, device: torch.device, run: Callable[[], T], replace: Callable[[], T]
) -> T:
    """Returns ``run()`` or, if the kernel does not compile, ``replace()``. Logs that once.
    Afterwards ``supports`` refuses the kernel.

    Args:
        kind: what the kernel has in its epilogue or is for.
    """
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers may raise any exception
        _failed.add((kind, device))
        logger.warning(
            "the GEMM with %s for Hopper failed, so a slower one runs: %s: %s",
            kind,
            type(error).__name__,
            error,
        )
        return replace()


def describe_inputs(x: Tensor, weight: Tensor) -> tuple[Any, Any]:
    """Describes the inputs of a GEMM to the TMA."""
    # Deferred, because Gluon is experimental: the caller can do without it.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    assert cdiv(x.size(1), BLOCK_K) >= MIN_STEPS
    layout = NVMMASharedLayout(128, 16, 2)
    x_desc = TensorDescriptor.from_tensor(x, [2 * ROWS, BLOCK_K], layout)
    return x_desc, TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K], layout)
