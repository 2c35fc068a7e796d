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
