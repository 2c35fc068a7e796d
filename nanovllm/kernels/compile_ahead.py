"""Triton kernels compiled before they are needed, several at once."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

from nanovllm.kernels.compat import HAS_TRITON, triton

_lock = Lock()  # of Triton's method, which is replaced for a while


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within, a launch of a kernel compiles it, in a thread, and runs nothing: what kernels would
    have written is undefined. At the end all are compiled; those that cannot be will say so when
    they are launched. Only the thread that enters is meant; others launch as ever, and wait to
    enter.

    What they compile runs in C++ for the most part, without Python's lock.
    """
    if not HAS_TRITON:
        yield
        return
    with _lock:
        kernel_type, thread = triton.JITFunction, get_ident()
        run = kernel_type.run

        def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            only = warmup or get_ident() == thread
            return run(self, *args, grid=grid, warmup=only, **kwargs)

        kernel_type.run = compile_kernel
        try:
            with (
                ThreadPoolExecutor() as executor,
                triton.AsyncCompileMode(executor, ignore_errors=True),
            ):
                yield
        finally:
            kernel_type.run = run
