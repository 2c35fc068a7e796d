"""cuBLAS' workspace."""

import os

import pytest
import torch

from nanovllm.kernels.gemm.cublas import small_cublas_workspace


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
