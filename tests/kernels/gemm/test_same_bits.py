"""Which kernels take the place of the batch-invariant GEMM."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.gemm import same_bits
from nanovllm.kernels.gemm.cublas import small_cublas_workspace
from nanovllm.kernels.gemm.invariant import invariant_linear
from nanovllm.kernels.gemm.same_bits import compare, fastest_linear, fastest_swiglu
from nanovllm.kernels.silu_and_mul import silu_and_mul

ROWS = [8, 32, 48, 64]


@pytest.fixture
def nothing_compared(monkeypatch):
    monkeypatch.setattr(same_bits, "_cublas_rows", {})
    monkeypatch.setattr(same_bits, "_swiglu", set())


@pytest.fixture
def fakes(nothing_compared, monkeypatch):
    """The invariant GEMM is F.linear. cuBLAS and the GEMM with SwiGLU are too, but with the numbers
    of rows in ``wrong`` some bit differs."""
    wrong = set()

    def linear(x, weight, bias=None, residual=None):
        y = F.linear(x, weight, bias)
        return y if residual is None else y + residual

    def with_errors(y):
        if len(y) in wrong:
            y[-1, -1] += 0.5
        return y

    monkeypatch.setattr(same_bits, "invariant_linear", linear)
    monkeypatch.setattr(
        same_bits,
        "_cublas_linear",
        lambda x, weight, residual: with_errors(linear(x, weight, None, residual)),
    )
    monkeypatch.setattr(
        same_bits,
        "_swiglu_linear",
        lambda x, weight: with_errors(silu_and_mul(F.linear(x, weight))),
    )
    monkeypatch.setattr(same_bits.hopper_gemm, "supports", lambda epilogue, weight: True)
    return wrong


def test_kernels_with_other_bits_are_not_used(fakes, monkeypatch):
    weight = torch.randn(16, 8)
    fakes.add(48)
    compare(weight, ROWS)
    fakes.update(range(2000))  # now a result shows which kernel computed it
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for capturing in (False, True):
        for rows in (*ROWS, 33):
            x = torch.randn(rows, 8)
            is_cublas = not torch.equal(fastest_linear(x, weight, None), F.linear(x, weight))
            assert is_cublas == (capturing and rows in (32, 64)), rows
    bias = torch.randn(16)
    assert torch.equal(fastest_linear(x, weight, bias), F.linear(x, weight, bias))
    assert fastest_swiglu(torch.randn(1023, 8), weight) is None
    assert fastest_swiglu(torch.randn(1024, 8), weight).shape == (1024, 8)
    compare(weight, [48])  # has been compared
    assert same_bits._cublas_rows == {same_bits._key(weight): {32, 64}}


def test_swiglu_with_other_bits_is_not_used(fakes):
    fakes.add(same_bits.MIN_SWIGLU_ROWS)
    compare(torch.randn(16, 8), [])
    assert not same_bits._swiglu


def test_a_weight_with_parts_has_no_other_kernel(fakes):
    """cuBLAS would have to cut its columns at the same places."""
    compare(torch.empty(64, 4096), ROWS)
    assert not same_bits._cublas_rows


def test_running_out_of_memory_ends_the_comparison(fakes, monkeypatch):
    def full(x, weight, residual):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(same_bits, "_cublas_linear", full)
    weight = torch.randn(16, 8)
    compare(weight, ROWS)
    assert same_bits._cublas_rows == {same_bits._key(weight): set()} and not same_bits._swiglu


@pytest.mark.gpu
@pytest.mark.parametrize(("out", "width"), [(6144, 1024), (4096, 4096), (2560, 9728)], ids=str)
def test_the_bits_are_the_same_in_a_cuda_graph(out, width, nothing_compared):
    """With other values than those that were compared; NaN in a row stays there."""
    weight = torch.randn(out, width, dtype=torch.bfloat16, device="cuda") / width**0.5
    rows = [16, 32, 64, 96, 128, 256, 512, 1024, 2048]
    with torch.inference_mode(), small_cublas_workspace():
        compare(weight, rows)
        found_rows = same_bits._cublas_rows[same_bits._key(weight)]
        assert len(found_rows) >= 5, "cuBLAS is of no use"
        for num_rows in found_rows:
            x = torch.randn(num_rows, width, device="cuda").bfloat16() * 3
            x[num_rows // 2] = float("nan")
            residual = torch.randn(num_rows, out, device="cuda").bfloat16()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                plain = fastest_linear(x, weight, None)
                added = fastest_linear(x, weight, None, residual.clone())
            graph.replay()
            for found, expected in (
                (plain, invariant_linear(x, weight, None)),
                (added, invariant_linear(x, weight, None, residual)),
            ):
                isnan = expected.isnan()
                assert torch.equal(found.isnan(), isnan)
                assert torch.equal(found[~isnan], expected[~isnan])


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_swiglu_in_the_epilogue_has_the_same_bits(nothing_compared):
    weight = torch.randn(6144, 1024, dtype=torch.bfloat16, device="cuda") / 32
    compare(weight, [])
    for num_rows in (1024, 1500, 16_384):
        x = torch.randn(num_rows, 1024, device="cuda").bfloat16() * 5
        found = fastest_swiglu(x, weight)
        assert torch.equal(found, silu_and_mul(invariant_linear(x, weight, None)))
