"""Compiles Triton kernels ahead of their first launch, in parallel."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock, get_ident
from typing import Any

import torch

from nanovllm.utils.triton_compat import HAS_TRITON, triton

_lock = Lock()  # guards the patch of JITFunction.run


@contextmanager
def compiling_only() -> Iterator[None]:
    """Context manager in which a kernel launch compiles the kernel, in a thread pool, and does not
    run it. The outputs of kernels are therefore undefined.

    All compilations are finished when the context exits. A kernel that fails to compile raises when
    it is launched later. Affects only the calling thread: other threads launch kernels as usual,
    and block if they enter this context too.

    Threads help because compilation mostly runs in C++, without the GIL.
    """
    if not HAS_TRITON:
        yield
        return
    with _lock:
        kernel_type, thread = triton.JITFunction, get_ident()
        run = kernel_type.run
        kernels: dict[int, Any] = {}  # by id, because a model launches each kernel many times

        def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            compile_only = warmup or get_ident() == thread
            kernel = run(self, *args, grid=grid, warmup=compile_only, **kwargs)
            if compile_only:
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
    """Loads a kernel and builds its launcher, for which a C compiler runs for 0.3 s per signature.
    ``kernel`` is a compiled kernel or the future of one."""
    with suppress(Exception), torch.cuda.device(device):
        compiled = kernel.result() if hasattr(kernel, "result") else kernel
        _ = compiled.run  # loads it at the first access
