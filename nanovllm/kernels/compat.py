"""Whether Triton is there. Every kernel file defines its kernels either way; without Triton the
decorator does nothing, they are never launched, and the PyTorch references serve."""

from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # no Triton on this platform
    HAS_TRITON = False

    class _Absent:
        """Stands in for the names that kernel signatures mention."""

        constexpr = object

        @staticmethod
        def jit(function: Any = None, **_: Any) -> Any:
            return function if function is not None else lambda f: f

    triton = tl = _Absent()

__all__ = ["HAS_TRITON", "tl", "triton", "use_triton"]


def use_triton(x: torch.Tensor) -> bool:
    """Whether kernels on x's device are Triton's."""
    return HAS_TRITON and x.is_cuda
