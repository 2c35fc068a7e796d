"""cuBLAS' workspace, and loading of its kernels."""

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.nn.functional as F


def free_workspaces() -> None:
    """Frees the workspaces that PyTorch keeps for each thread, by default of 32 MiB. It is for
    start-up, and only one thread of a process may call it at a time."""
    torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def small_cublas_workspace() -> Iterator[None]:
    """Limits cuBLAS to a workspace of 256 KiB instead of 32 MiB within the context. With 16 to 192
    rows cuBLAS then chooses kernels that are up to 6% faster. A CUBLAS_WORKSPACE_CONFIG that the
    user has set is kept.

    Use it only at start-up, for CUDA graphs: while the variable is set, PyTorch parses it in every
    matmul, which costs 50 us of host time. It frees all workspaces: see ``free_workspaces``.
    """
    if "CUBLAS_WORKSPACE_CONFIG" in os.environ:
        yield
        return
    free_workspaces()  # existing ones have the default size
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":256:1"
    try:
        with warnings.catch_warnings():  # cuBLASLt asks for 1 MiB, and works without
            warnings.filterwarnings("ignore", "Requested unified CUBLASLT workspace")
            yield
    finally:
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]
        free_workspaces()


@torch.inference_mode()
def load_kernels(weights: Iterable[torch.Tensor], row_counts: list[int]) -> None:
    """Makes cuBLAS load the kernels that it chooses for each weight [out, in] with each number of
    rows, as in a CUDA graph. Loading a kernel takes up to 5 ms. The values of the weights
    do not matter, so this may run while they are loaded."""
    with small_cublas_workspace(), suppress(torch.OutOfMemoryError):  # steps may be smaller
        for weight in {weight.shape: weight for weight in weights}.values():
            for num_rows in row_counts:
                F.linear(weight.new_empty(num_rows, weight.size(1)), weight)
