"""A GEMM with SwiGLU in its epilogue: on a GPU, and run by an emulator on a CPU."""

import logging

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import fallback
from nanovllm.kernels.gemm import hopper_gemm
from nanovllm.kernels.gemm import swiglu as module
from nanovllm.kernels.gemm.swiglu import gated_linear
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference
from nanovllm.layers.activation import SiluAndMul
from tests.kernels.gluon_emulator import emulated_gemm
from tests.kernels.oracle import assert_as_good_as_eager
from tests.quantization.test_unquantized import Norm, make_weight

CPU = torch.device("cpu")


def supports(weight: torch.Tensor) -> bool:
    return hopper_gemm.supports(module.KERNEL, weight)


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def emulator():
    with emulated_gemm("gemm.swiglu_kernel", module):
        yield


@pytest.mark.parametrize(
    ("num_rows", "inner", "width"),
    [(1, 64, 136), (127, 104, 200), (300, 400, 256), (2500, 128, 136)],
)
def test_the_kernel_is_a_gemm_with_swiglu_in_the_emulator(emulator, num_rows, inner, width, dtype):
    check_shape(num_rows, inner, width, dtype, "cpu")


def check_shape(num_rows, inner, width, dtype, device) -> None:
    x, weight = make(num_rows, inner, width, dtype, device)
    exact = silu_and_mul_reference(x.double() @ weight.double().t())
    eager = silu_and_mul_reference(F.linear(x, weight))
    for is_rounded in (False, True):
        assert_as_good_as_eager(module.launch(x, weight, is_rounded), eager, exact)


def test_results_of_both_matmuls_and_of_silu_are_rounded(emulator):
    """As in two kernels. Whole numbers have exact sums, many of which bf16 has to round."""
    x, weight = torch.randint(-9, 9, (130, 136)).bfloat16(), torch.randint(-3, 4, (128, 136))
    weight = (weight / 64).bfloat16()
    gate, up = (x.double() @ weight.double().t()).bfloat16().chunk(2, -1)
    expected = (gate.float() / (1 + torch.exp(-gate.float()))).bfloat16() * up
    assert torch.equal(module.launch(x, weight, True), expected)
    assert not torch.equal(module.launch(x, weight, False), expected)


def test_a_kernel_that_does_not_compile_is_replaced_with_one_warning(monkeypatch, caplog):
    def broken(*args: torch.Tensor) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(module, "launch", broken)
    monkeypatch.setattr(fallback, "_failed", set())
    x, weight = make(3, 64, 64, torch.bfloat16, "cpu")
    with caplog.at_level(logging.WARNING, "nanovllm"):
        y = gated_linear(x, weight)
    assert torch.equal(y, silu_and_mul_reference(F.linear(x, weight)))
    assert fallback._failed == {(module.KERNEL, CPU)}
    assert [r.getMessage() for r in caplog.records] == [
        "the GEMM with SwiGLU for Hopper failed, so a slower kernel runs: "
        "RuntimeError: PassManager::run failed"
    ]


def test_running_out_of_memory_is_no_failure_of_the_kernel(monkeypatch):
    def full(*args: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "launch", full)
    monkeypatch.setattr(fallback, "_failed", set())
    with pytest.raises(torch.OutOfMemoryError):
        gated_linear(*make(3, 64, 64, torch.bfloat16, "cpu"))
    assert not fallback._failed


def test_a_cpu_has_no_such_gemm():
    assert not supports(torch.empty(128, 64))


def make(num_rows, inner, width, dtype, device="cuda"):
    x = torch.randn(num_rows, width, device=device).to(dtype)
    return x, (torch.randn(2 * inner, width, device=device) / width**0.5).to(dtype)


NEEDS_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize(
    ("num_rows", "inner", "width"),
    [
        (1, 64, 136),
        (127, 104, 200),
        (300, 1000, 576),
        (9000, 1536, 136),
        (16384, 3072, 1024),
        (9000, 1536, 4096),
    ],
)
def test_as_good_as_two_kernels(num_rows, inner, width, dtype):
    check_shape(num_rows, inner, width, dtype, "cuda")


@pytest.mark.gpu
@NEEDS_HOPPER
def test_rows_do_not_mix(dtype):
    x, weight = make(700, 512, 256, dtype)
    alone = module.launch(x, weight)
    x[300] = float("nan")
    y = module.launch(x, weight)
    assert y[300].isnan().all()
    y[300] = alone[300]
    assert torch.equal(y, alone)


@pytest.mark.gpu
@NEEDS_HOPPER
def test_large_matmuls_take_it(dtype, monkeypatch):
    x, weight = make(1024, 1536, 256, dtype)
    assert supports(weight) and not supports(weight[:, :128].contiguous())
    taken = []
    monkeypatch.setattr(
        module, "gated_linear", lambda x, weight: taken.append(len(x)) or gated_linear(x, weight)
    )
    norm = Norm(torch.ones(256, dtype=dtype, device="cuda"), 1e-6)
    y, total = make_weight(weight).norm_matmul(x, None, norm, SiluAndMul())
    assert taken == [1024] and y.shape == (1024, 1536) and total is x
    bias = torch.zeros(len(weight), dtype=dtype, device="cuda")
    for fewer in ((x[1:], None), (x, bias)):
        other, _ = make_weight(weight, fewer[1]).norm_matmul(fewer[0], None, norm, SiluAndMul())
        torch.testing.assert_close(other, y[-len(other) :], rtol=2e-2, atol=2e-2)
    assert len(taken) == 1
    monkeypatch.setattr(fallback, "_failed", {(module.KERNEL, x.device)})
    assert not supports(weight)
