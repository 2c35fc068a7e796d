"""Products that go back into the residual stream, and cuBLAS' workspace."""

import os

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.gemm.linear import MIN_BYTES_TO_ADD, linear_add, small_cublas_workspace
from tests.kernels.oracle import assert_as_good_as_eager


def make(num_rows: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    shapes = (num_rows, 96), (64, 96), (64,), (num_rows, 64)
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


def test_the_stream_stays_beside_the_product(device):
    x, weight, bias, residual = make(5, torch.float32, device)
    before = residual.clone()
    y, stream = linear_add(x, weight, bias, residual)
    torch.testing.assert_close(y, F.linear(x, weight, bias))
    assert stream is residual and torch.equal(residual, before)


@pytest.mark.gpu
def test_large_products_add_to_the_stream(dtype):
    x, weight, bias, residual = make(MIN_BYTES_TO_ADD // (64 * dtype.itemsize), dtype, "cuda")
    eager = residual + F.linear(x, weight)
    exact = residual.double() + x.double() @ weight.double().t()
    y, stream = linear_add(x, weight, None, residual)
    assert stream is None and y.data_ptr() == residual.data_ptr()
    assert_as_good_as_eager(y, eager, exact)
    assert linear_add(x, weight, bias, residual)[1] is residual  # two sums at once are not served


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
