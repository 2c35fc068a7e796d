import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.silu_and_mul import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_reference,
    gelu_tanh_and_mul_triton,
    silu_and_mul,
    silu_and_mul_reference,
    silu_and_mul_triton,
)
from tests.kernels.oracle import assert_as_good_as_eager, poisoned


@pytest.mark.parametrize("shape", [(1, 2), (5, 246), (3, 2 * 1536), (2, 2 * 3072)])
def test_silu_and_mul(shape, dtype, device, monkeypatch):
    poisoned(monkeypatch)
    x = torch.randn(shape, device=device).to(dtype) * 4
    gate, up = x.double().chunk(2, -1)
    out = silu_and_mul_triton(x)
    assert_as_good_as_eager(out, silu_and_mul_reference(x), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (5, 246), (3, 2, 40), (0, 16)], ids=str)
def test_reference_equals_the_formula(dtype, shape):
    x = (4 * torch.randn(shape)).to(dtype)
    gate, up = x.double().chunk(2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    output = silu_and_mul(x)
    assert output.dtype == dtype
    # One rounding after silu, one after the product.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=4 * eps, atol=4 * eps**2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_input_stays_as_it_is(dtype):
    """Guards an in-place product that lands in the packed gate-up projection."""
    x = torch.randn(4, 32, dtype=dtype)
    copy = x.clone()
    silu_and_mul(x).fill_(7)
    assert torch.equal(x, copy)


def test_the_first_half_is_the_gate():
    x = torch.tensor([[0.0, 30.0, 5.0, 7.0]])
    assert silu_and_mul(x).tolist() == [[0.0, 210.0]]


def test_strided_input():
    x = torch.randn(8, 6).T
    assert torch.equal(silu_and_mul(x), silu_and_mul(x.contiguous()))


@pytest.mark.parametrize("shape", [(1, 2), (5, 246), (3, 2 * 1536)])
def test_gelu_tanh_and_mul(shape, dtype, device, monkeypatch):
    poisoned(monkeypatch)
    x = torch.randn(shape, device=device).to(dtype) * 4
    gate, up = x.double().chunk(2, -1)
    exact = F.gelu(gate, approximate="tanh") * up
    out = gelu_tanh_and_mul_triton(x)
    assert_as_good_as_eager(out, gelu_tanh_and_mul_reference(x), exact)
    assert torch.equal(gelu_tanh_and_mul(x), gelu_tanh_and_mul_reference(x)) or x.is_cuda


def test_gelu_of_large_gates_is_finite(device):
    x = torch.tensor([[-1e4, 1e4, -50.0, 50.0, 2.0, 2.0, 2.0, 2.0]], device=device)
    assert gelu_tanh_and_mul_triton(x).tolist() == [[0.0, 2e4, 0.0, 100.0]]
