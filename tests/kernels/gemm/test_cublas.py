"""cuBLAS' workspace and kernels."""

import os
from contextlib import nullcontext

import pytest
import torch

from nanovllm.kernels.gemm import cublas
from nanovllm.kernels.gemm.cublas import load_kernels, small_cublas_workspace


@pytest.mark.parametrize("theirs", [None, ":4096:8"])
def test_the_workspace_is_small_for_a_while(theirs, monkeypatch):
    """Unless the user has asked for another."""
    cleared = []
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(1), raising=False
    )
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", theirs or "")
    if theirs is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with pytest.raises(KeyError), small_cublas_workspace():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (theirs or ":256:1")
        assert len(cleared) == (theirs is None)
        raise KeyError
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == theirs
    assert len(cleared) == 2 * (theirs is None)


def test_kernels_are_loaded_for_each_shape_and_number_of_rows(monkeypatch):
    """Without more memory than there is."""
    found = []

    def linear(x: torch.Tensor, weight: torch.Tensor) -> None:
        found.append((len(x), *weight.shape))
        assert x.dtype == weight.dtype and x.size(1) == weight.size(1)
        if len(found) == 5:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(cublas, "small_cublas_workspace", nullcontext)
    monkeypatch.setattr(cublas.F, "linear", linear)
    weights = [torch.empty(shape, dtype=torch.bfloat16) for shape in [(6, 4), (2, 8), (6, 4)]]
    load_kernels(weights, [80, 96])
    assert sorted(found) == [(80, 2, 8), (80, 6, 4), (96, 2, 8), (96, 6, 4)]
    load_kernels([*weights, torch.empty(3, 2)], [80])  # runs out of memory
    assert len(found) == 5
