"""Whether Triton is there. Every kernel file defines its kernels either way; without Triton the
decorator does nothing, they are never launched, and the PyTorch references serve."""

from functools import cache
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

__all__ = ["HAS_TRITON", "chained", "shared_memory", "tl", "triton", "use_triton"]


def use_triton(x: torch.Tensor) -> bool:
    """Whether kernels on x's device are Triton's."""
    return HAS_TRITON and x.is_cuda


def chained(x: torch.Tensor) -> dict[str, bool]:
    """Launch arguments of a kernel on x's device that may start while the one before it ends
    (programmatic dependent launch, from Hopper on), which saves a microsecond or so each.

    Such a kernel takes ``PDL`` and, where that is true, begins with ``gdc_launch_dependents``
    and waits with ``gdc_wait`` before it reads what another kernel of this step writes, and before
    it writes.
    """
    if not x.is_cuda or not _has_pdl(x.device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program can have on a CUDA GPU; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


@cache
def _has_pdl(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
