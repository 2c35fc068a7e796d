"""What takes the place of a kernel that does not compile or cannot be launched.

The kernels for Hopper are in Gluon. It is experimental, so a new version of Triton may break them.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from nanovllm.utils.memory import is_out_of_memory

logger = logging.getLogger("nanovllm")
T = TypeVar("T")

_failed: set[tuple[str, torch.device]] = set()  # kernels, and where they failed


def has_failed(kernel: str, device: torch.device) -> bool:
    return (kernel, device) in _failed


def run_or_replace(
    kernel: str, device: torch.device, run: Callable[[], T], replace: Callable[[], T]
) -> T:
    """Returns ``run()`` or, if the kernel fails or did before, ``replace()``. Logs the failure.

    Args:
        kernel: what the log calls it.

    Raises:
        torch.AcceleratorError: an earlier kernel has failed, and the device is of no more use.
        Exception: the GPU's memory was not enough (``is_out_of_memory``).
    """
    if has_failed(kernel, device):
        return replace()
    try:
        return run()
    except Exception as error:  # compilers may raise any exception
        if isinstance(error, torch.AcceleratorError) or is_out_of_memory(error):
            raise
        _failed.add((kernel, device))
        logger.warning(
            "the %s for Hopper failed, so a slower kernel runs: %s: %s",
            kernel,
            type(error).__name__,
            error,
        )
        return replace()
