"""SiluAndMul against the formula in fp64."""

import pytest
import torch

from nanovllm.layers.activation import SiluAndMul

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (5, 246), (3, 2, 40), (0, 16)], ids=str)
def test_equals_the_formula(dtype, shape):
    x = (4 * torch.randn(shape)).to(dtype)
    gate, up = x.double().chunk(2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    output = SiluAndMul()(x)
    assert output.dtype == dtype
    # One rounding after silu, one after the product.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=4 * eps, atol=4 * eps**2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_input_stays_as_it_is(dtype):
    """Guards an in-place product that lands in the packed gate-up projection."""
    x = torch.randn(4, 32, dtype=dtype)
    copy = x.clone()
    SiluAndMul()(x).fill_(7)
    assert torch.equal(x, copy)


def test_the_first_half_is_the_gate():
    x = torch.tensor([[0.0, 30.0, 5.0, 7.0]])
    assert SiluAndMul()(x).tolist() == [[0.0, 210.0]]


def test_strided_input():
    x = torch.randn(8, 6).T
    assert torch.equal(SiluAndMul()(x), SiluAndMul()(x.contiguous()))
