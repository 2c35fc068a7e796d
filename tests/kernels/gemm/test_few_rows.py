"""The batch-invariant GEMM for few rows: on a GPU, and run by an emulator on a CPU."""

import pytest
import torch

from nanovllm.kernels.gemm import few_rows
from nanovllm.kernels.gemm.few_rows import (
    ROWS,
    few_rows_linear,
    few_rows_linear_add,
    few_rows_swiglu,
    launch,
    supports,
)
from nanovllm.kernels.gemm.invariant import invariant_linear
from nanovllm.kernels.gemm.same_bits import compare
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul
from tests.kernels.gluon_emulator import emulated
from tests.kernels.oracle import assert_as_good_as_eager

# Output and input features: of one tile of columns, of several stages, and in two parts.
SHAPES = (64, 200), (80, 1600), (64, 2048)


def make(num_rows, out, width, dtype, device):
    x = torch.randn(num_rows, width, device=device).to(dtype)
    weight = (torch.randn(out, width, device=device) / width**0.5).to(dtype)
    return x, weight, torch.randn(num_rows, out, device=device).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, ROWS])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_the_kernel_is_a_gemm_in_the_emulator(out, width, num_rows, dtype, monkeypatch):
    columns = 1024 if width == 2048 else -(-width // 128) * 128
    monkeypatch.setattr(few_rows, "part_columns", lambda *_: columns)
    x, weight, residual = make(num_rows, out, width, dtype, "cpu")
    exact, eager = x.double() @ weight.double().t(), x @ weight.t()
    with emulated("nanovllm.kernels.hopper", "nanovllm.kernels.gemm.few_rows_kernel"):
        plain, found = launch(x, weight), launch(x, weight, residual)
    if width == 2048:  # the parts, to which a norm adds the residual
        assert torch.equal(plain, found)
        plain = plain.sum(0).to(dtype)
        found = plain + residual
    assert_as_good_as_eager(plain, eager, exact)
    assert_as_good_as_eager(found, eager + residual, exact + residual.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, ROWS])
@pytest.mark.parametrize(("out", "width"), [(64, 200), (208, 1600)])
def test_the_kernel_with_swiglu_is_a_gemm_and_swiglu(out, width, num_rows, dtype):
    x, weight, _ = make(num_rows, out, width, dtype, "cpu")
    with emulated("nanovllm.kernels.hopper", "nanovllm.kernels.gemm.few_rows_kernel"):
        expected = silu_and_mul(launch(x, weight))
        found = launch(x, weight, swiglu=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_tiles_have_columns_of_one_part(monkeypatch):
    monkeypatch.setattr(few_rows.hopper_gemm, "supports", lambda *_: True)
    supported = (4096, 1024), (4096, 200), (1024, 2048), (1024, 3072), (6144, 4096)
    refused = (1024, 2176), (4096, 12_288)
    for shapes, expected in ((supported, True), (refused, False)):
        for shape in shapes:
            assert supports(torch.empty(shape, device="meta")) == expected, shape


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("out", "width"), [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (6144, 4096)]
)
def test_the_bits_are_those_of_the_other_kernel(out, width, dtype):
    for num_rows in range(1, ROWS + 1):
        x, weight, residual = make(num_rows, out, width, dtype, "cuda")
        assert compare(weight, []).has_few_rows
        for given in (None, residual):
            expected = invariant_linear(x, weight, None, given)
            assert torch.equal(few_rows_linear(x, weight, given), expected)
        found, rest = few_rows_linear_add(x, weight, residual)
        assert torch.equal(rms_norm(found, weight[:, 0].contiguous(), 1e-6, rest)[1], expected)
        expected = silu_and_mul(invariant_linear(x, weight, None))
        assert torch.equal(few_rows_swiglu(x, weight), expected)
