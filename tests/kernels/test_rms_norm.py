import pytest
import torch

from nanovllm.kernels.rms_norm import rms_norm_reference, rms_norm_triton
from tests.kernels.oracle import assert_as_good_as_eager, poisoned

EPS = 1e-6


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(1, 64), (5, 123), (3, 576), (7, 1024), (2, 5120)])
def test_norm(shape, dtype, device, monkeypatch):
    poisoned(monkeypatch)
    x = torch.randn(shape, device=device).to(dtype) * 3
    weight = torch.rand(shape[-1], device=device).to(dtype) + 0.5
    before = x.clone()
    out, total = rms_norm_triton(x, weight, EPS)
    assert total is x and torch.equal(x, before)
    assert_as_good_as_eager(out, rms_norm_reference(x, weight, EPS)[0], exact(x, weight))


def test_an_fp32_weight_is_applied_before_the_result_is_rounded(dtype, device):
    """As in Gemma and OLMo 2: the result has no more than the error of one rounding."""
    x = torch.randn(5, 123, device=device).to(dtype) * 3
    weight = torch.rand(123, device=device) + 0.5
    out, _ = rms_norm_triton(x, weight, EPS)
    assert out.dtype == dtype
    torch.testing.assert_close(out, rms_norm_reference(x, weight, EPS)[0])
    rounding = 0.51 * torch.finfo(dtype).eps if dtype is not torch.float32 else 1e-6
    torch.testing.assert_close(out.double(), exact(x, weight), rtol=rounding, atol=0)


@pytest.mark.parametrize("shape", [(1, 64), (5, 123), (4, 1024)])
def test_add_and_norm_returns_the_new_residual_and_changes_no_input(
    shape, dtype, device, monkeypatch
):
    poisoned(monkeypatch)
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1], device=device).to(dtype) + 0.5
    before = x.clone(), residual.clone()
    out, total = rms_norm_triton(x, weight, EPS, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    assert_as_good_as_eager(out, rms_norm_reference(total, weight, EPS)[0], exact(total, weight))


def test_parts_of_a_split_k_are_added_and_rounded_before_the_residual(dtype, device, monkeypatch):
    """In order: 2^24 + 1 rounds to 2^24 in fp32, so each other order has another sum."""
    poisoned(monkeypatch)
    parts = torch.randn(3, 5, 123, device=device)
    parts[:, :, 0] = torch.tensor([1, 2**24, -(2**24)], device=device)[:, None]
    residual = torch.randn(5, 123, device=device).to(dtype)
    weight = torch.rand(123, device=device).to(dtype) + 0.5
    x = (parts[0] + parts[1] + parts[2]).to(dtype)
    assert not x[:, 0].any()
    for norm in (rms_norm_triton, rms_norm_reference):
        expected = norm(x, weight, EPS, residual)
        found = norm(parts, weight, EPS, residual)
        assert {tensor.dtype for tensor in (*found, *expected)} == {dtype}
        assert all(map(torch.equal, found, expected))
