"""Whether Triton is there, and where other compilers keep their kernels.

Every kernel file defines its kernels either way; without Triton the decorator does nothing, they
are never launched, and the PyTorch references serve.
"""

import os
from functools import cache
from pathlib import Path
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

__all__ = [
    "HAS_TRITON",
    "chained",
    "keep_compiled_kernels",
    "num_multiprocessors",
    "shared_memory",
    "tl",
    "triton",
    "use_triton",
]


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


def keep_compiled_kernels() -> None:
    """Has flash-attn 4 and quack keep the kernels that they compile, in the user's cache: by
    themselves they compile at each start, or keep them in /tmp, where anyone could have put some
    for us to load. Before their first import; what the environment says already stays."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache / "flash_attn_4"))
    os.environ.setdefault("QUACK_CACHE_DIR", str(cache / "quack"))


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program can have on a CUDA GPU; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA GPU; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _has_pdl(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
