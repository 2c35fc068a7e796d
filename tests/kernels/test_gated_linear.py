"""SwiGLU within a product: a stand-in for the package and, where there is a GPU, the package."""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import gated_linear as module
from nanovllm.kernels.gated_linear import MIN_BYTES, gated_linear, is_gated
from nanovllm.kernels.linear import norm_linear
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference
from tests.kernels.oracle import assert_as_good_as_eager


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@dataclass(frozen=True)
class GemmConfig:
    """The fields that we set, of those that the real one has."""

    tile_m: int = 128
    tile_n: int = 192
    pingpong: bool = True
    is_dynamic_persistent: bool = True
    cluster_m: int = 2
    cluster_n: int = 1


def gemm_act(
    A,
    B,
    C=None,
    bias=None,
    activation=None,
    alpha=1.0,
    preact_out=None,
    postact_out=None,
    out_dtype=None,
    postact_dtype=None,
    cu_seqlens_m=None,
    A_idx=None,
    store_preact=True,
    dynamic_scheduler=False,
    tuned=True,
    config=None,
    concat_layout=None,
):
    """What the arguments that we pass mean to the real function, which has this signature."""
    assert activation == "swiglu" and concat_layout == ("B",) and not tuned and not store_preact
    assert config.tile_n == 192 and not config.is_dynamic_persistent
    postact_out.copy_(F.silu(A @ B[:, : B.size(1) // 2]) * (A @ B[:, B.size(1) // 2 :]))
    return None, postact_out


@pytest.fixture
def package(monkeypatch):
    """quack-kernels' names, on any device."""
    for name, value in {"gemm_config": GemmConfig, "gemm_interface": gemm_act}.items():
        part = ModuleType(f"quack.{name}")
        setattr(part, value.__name__, value)
        monkeypatch.setitem(sys.modules, part.__name__, part)
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    module._package.cache_clear()
    yield
    module._package.cache_clear()


@pytest.mark.parametrize("width", [64, 4096])
def test_gate_is_above_up(package, width):
    x, weight = torch.randn(5, width), torch.randn(48, width) / width**0.5
    torch.testing.assert_close(gated_linear(x, weight), silu_and_mul_reference(x @ weight.t()))


def test_a_cpu_has_no_such_product(package):
    x, weight = torch.randn(2, 64), torch.empty(MIN_BYTES // 8, 64)
    assert not is_gated(x, weight, None)


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
def test_large_products_take_it(dtype, monkeypatch):
    needs_the_package()
    num_rows = -(-MIN_BYTES // (2 * 1536 * dtype.itemsize))
    x, weight = make(num_rows, 1536, 256, dtype)
    taken = []
    monkeypatch.setattr(
        "nanovllm.kernels.linear.gated_linear",
        lambda x, weight: taken.append(len(x)) or gated_linear(x, weight),
    )
    norm = torch.ones(256, dtype=dtype, device="cuda")
    y, total = norm_linear(x, None, norm, 1e-6, weight, None, silu=True)
    assert taken == [num_rows] and y.shape == (num_rows, 1536) and total is x
    bias = torch.zeros(len(weight), dtype=dtype, device="cuda")
    for fewer in ((x[1:], None), (x, bias)):
        other, _ = norm_linear(fewer[0], None, norm, 1e-6, weight, fewer[1], silu=True)
        torch.testing.assert_close(other, y[-len(other) :], rtol=2e-2, atol=2e-2)
    assert len(taken) == 1
