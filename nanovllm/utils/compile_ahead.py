"""Triton kernels compiled before they are needed, several at once."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock, get_ident
from typing import Any

import torch

from nanovllm.utils.triton_compat import HAS_TRITON, triton

_lock = Lock()  # of Triton's method, which is replaced for a while


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within, a launch of a kernel compiles it, in a thread, and runs nothing: what kernels would
    have written is undefined. At the end all kernels can be launched at once; those that cannot be
    compiled raise when they are launched. Affects only the calling thread; other threads launch as
    before, and wait to enter.

    Compilation runs in C++ for the most part, without Python's lock.
    """
    if not HAS_TRITON:
        yield
        return
    with _lock:
        kernel_type, thread = triton.JITFunction, get_ident()
        run = kernel_type.run
        kernels: dict[int, Any] = {}  # by id: a model launches each many times

        def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            only = warmup or get_ident() == thread
            kernel = run(self, *args, grid=grid, warmup=only, **kwargs)
            if only:
                kernels[id(kernel)] = kernel
            return kernel

        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        kernel_type.run = compile_kernel
        try:
            with ThreadPoolExecutor() as executor:
                with triton.AsyncCompileMode(executor, ignore_errors=True):
                    yield
                if device is not None:
                    list(executor.map(partial(_load, device), kernels.values()))
        finally:
            kernel_type.run = run


def _load(device: int, kernel: Any) -> None:
    """Loads a compiled kernel, or a future one, and builds its launcher: a C compiler needs 0.3 s
    for each new signature."""
    with suppress(Exception), torch.cuda.device(device):
        compiled = kernel.result() if hasattr(kernel, "result") else kernel
        _ = compiled.run  # loads it at the first access
