"""A GEMM with SwiGLU in its epilogue: a stand-in for the package and, on a GPU, the package."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.gemm import swiglu as module
from nanovllm.kernels.gemm.swiglu import check_gated_linear, gated_linear, supports
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference
from nanovllm.layers.activation import SiluAndMul
from tests.kernels.oracle import assert_as_good_as_eager
from tests.quantization.test_unquantized import Norm, make_weight


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


class Gemm:
    """What the arguments that we pass mean to the real one, whose methods have this signature."""

    def gemm(
        self,
        A,
        B,
        D,
        C=None,
        *,
        epi_args,
        tile_M=128,
        tile_N=256,
        cluster_M=2,
        cluster_N=1,
        tile_K=None,
        pingpong=False,
        persistent=True,
        concat_layout=None,
    ):
        assert D is None and concat_layout == ("B",) and tile_N == 192 and cluster_N == 2
        assert pingpong == (tile_M == 128)
        gate, up = (A @ half.t() for half in B.chunk(2))
        epi_args["mAuxOut"].copy_(F.silu(gate) * up)


def linear_act_mod(activation, *, gated, has_c, has_rowvec, has_colvec, sr=False, has_alpha=False):
    assert activation == "swiglu" and gated and not (has_c or has_rowvec or has_colvec)
    return Gemm()


@pytest.fixture
def package(monkeypatch):
    """quack-kernels' names, on any device."""
    library = ModuleType("quack.epilogue.library")
    library.linear_act_mod = linear_act_mod
    for part in (ModuleType("quack"), ModuleType("quack.epilogue"), library):
        monkeypatch.setitem(sys.modules, part.__name__, part)
    module._gemm_module.cache_clear()
    yield
    module._gemm_module.cache_clear()


@pytest.mark.parametrize("wrong", [lambda w: w.flip(0), lambda w: w.roll(64, 0)])
def test_a_gemm_that_is_wrong_is_not_used(package, monkeypatch, wrong):
    args = torch.device("cpu"), torch.float32, 64
    check_gated_linear(*args)
    monkeypatch.setattr(
        module, "gated_linear", lambda x, weight: gated_linear(x, wrong(weight).contiguous())
    )
    with pytest.raises(AssertionError):
        check_gated_linear(*args)


@pytest.mark.parametrize("width", [64, 4096])
def test_gate_is_above_up(package, width):
    x, weight = torch.randn(5, width), torch.randn(48, width) / width**0.5
    torch.testing.assert_close(gated_linear(x, weight), silu_and_mul_reference(x @ weight.t()))


def test_a_cpu_has_no_such_gemm(package):
    assert not supports(torch.empty(128, 64))


def make(num_rows, inner, width, dtype):
    x = torch.randn(num_rows, width, device="cuda").to(dtype)
    return x, (torch.randn(2 * inner, width, device="cuda") / width**0.5).to(dtype)


def needs_the_package():
    pytest.importorskip("quack")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not Hopper")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "inner", "width"),
    [(1, 64, 64), (127, 104, 72), (300, 1000, 576), (5000, 3072, 1024), (1025, 1536, 4096)],
)
def test_as_good_as_two_kernels(num_rows, inner, width, dtype):
    needs_the_package()
    x, weight = make(num_rows, inner, width, dtype)
    exact = silu_and_mul_reference(x.double() @ weight.double().t())
    eager = silu_and_mul_reference(F.linear(x, weight))
    assert_as_good_as_eager(gated_linear(x, weight), eager, exact)


@pytest.mark.gpu
def test_rows_do_not_mix(dtype):
    needs_the_package()
    x, weight = make(700, 512, 256, dtype)
    alone = gated_linear(x, weight)
    x[300] = float("nan")
    y = gated_linear(x, weight)
    assert y[300].isnan().all()
    y[300] = alone[300]
    assert torch.equal(y, alone)


@pytest.mark.gpu
def test_large_matmuls_take_it(dtype, monkeypatch):
    needs_the_package()
    x, weight = make(1024, 1536, 256, dtype)
    assert supports(weight)
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
