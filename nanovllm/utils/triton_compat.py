"""Makes Triton an optional dependency.

Without Triton, kernel files can still be imported: the decorator ``triton.jit`` does nothing, and
the PyTorch references run instead of kernels.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # no Triton on this platform
    HAS_TRITON = False

    class _Absent:
        """Placeholder for ``triton`` and ``tl``, with the names that are used at import."""

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

        @staticmethod
        def jit(function: Any = None, **_: Any) -> Any:
            return function if function is not None else lambda f: f

    triton = tl = _Absent()

# The fewest columns of a matmul for which Triton uses wgmma in programs of four warps on Hopper.
MIN_WGMMA_COLUMNS = 16
if HAS_TRITON and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8):
    MIN_WGMMA_COLUMNS = 8
HOPPER_MULTIPROCESSORS = 132  # for which grids are tuned, whatever the GPU has
F = TypeVar("F", bound=Callable[..., Any])


def use_triton(x: torch.Tensor) -> bool:
    """Returns whether operations on x run Triton kernels."""
    return HAS_TRITON and x.is_cuda


def by_device(reference: F, kernel: F, tensor: int = 0) -> F:
    """Returns the function that launches a kernel for tensors that ``use_triton`` accepts, and
    calls its PyTorch reference for others.

    Args:
        reference: the PyTorch function. Its docstring describes the kernel too.
        kernel: the function that launches the kernel, with the same arguments.
        tensor: the index of the positional argument whose device decides.
    """

    @wraps(reference)
    def function(*args: Any) -> Any:
        return (kernel if use_triton(args[tensor]) else reference)(*args)

    return cast(F, function)


def pdl_options(x: torch.Tensor) -> dict[str, bool]:
    """Returns launch arguments for programmatic dependent launch (PDL, on Hopper and later).

    With PDL, a kernel may start while the previous kernel finishes, which saves about a microsecond
    per launch. The kernel needs a parameter ``PDL``, and must call ``pdl_wait`` before it reads
    results of other kernels of the step, and before it writes. There are two exceptions. If the
    previous kernel calls ``gdc_wait`` before ``gdc_launch_dependents``, a kernel may read what
    earlier kernels wrote before its own wait, with ``cache_modifier=".cg"``. And attention may read
    what was written before the step's first kernel with PDL (see ``ModelRunner.run_model``).
    """
    if not is_hopper_or_newer(x.device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def register_limit(count: int) -> dict[str, int]:
    """Returns the launch argument that limits a thread to ``count`` registers. ROCm has none. With
    a limit, the compiler uses as many as it allows, and issues more loads early."""
    return {} if torch.version.hip else {"maxnreg": count}


@triton.jit
def pdl_wait(PDL: tl.constexpr) -> None:
    """In a kernel with PDL, allows the next kernel to start, and waits for the previous one.

    A kernel that has other work in between calls ``gdc_launch_dependents`` and ``gdc_wait`` itself.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_l2(address: tl.tensor, size: tl.tensor) -> None:
    """Loads ``size`` bytes from each address into the L2 cache, without waiting for them. Sizes are
    int32 and multiples of 16; 0 for none. For GPUs from Hopper on."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [address.to(tl.int64, bitcast=True), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@cache
def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that one program can use on a CUDA GPU; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of a CUDA GPU; that of a Hopper GPU for a
    CPU, in Triton's interpreter."""
    if device.type != "cuda":
        return HOPPER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a CUDA GPU; (0, 0) of other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def is_hopper(device: torch.device) -> bool:
    """Returns whether a device is a Hopper GPU, which has wgmma."""
    return compute_capability(device) == (9, 0)


def is_hopper_or_newer(device: torch.device) -> bool:
    """Returns whether a device has TMA and PDL."""
    return compute_capability(device) >= (9, 0)
