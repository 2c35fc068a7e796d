"""What takes the place of a kernel that does not compile.

The kernels for Hopper are in Gluon. It is experimental, so a new version of Triton may break them.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

logger = logging.getLogger("nanovllm")
T = TypeVar("T")

_failed: set[tuple[str, torch.device]] = set()  # kernels, and where they do not compile


def has_failed(kernel: str, device: torch.device) -> bool:
    return (kernel, device) in _failed


def run_or_replace(
    kernel: str, device: torch.device, run: Callable[[], T], replace: Callable[[], T]
) -> T:
    """Returns ``run()`` or, if the kernel does not compile or did not before, ``replace()``. Logs
    once that it does not.

    Args:
        kernel: what the log calls it.
    """
    if has_failed(kernel, device):
        return replace()
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers may raise any exception
        _failed.add((kernel, device))
        logger.warning(
            "the %s for Hopper failed, so a slower kernel runs: %s: %s",
            kernel,
            type(error).__name__,
            error,
        )
        return replace()
