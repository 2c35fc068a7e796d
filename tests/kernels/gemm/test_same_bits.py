"""Tests which kernels replace the batch-invariant GEMM."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.gemm import same_bits
from nanovllm.kernels.gemm.cublas import small_cublas_workspace
from nanovllm.kernels.gemm.invariant import invariant_linear
from nanovllm.kernels.gemm.same_bits import SameBits, compare, cublas_linear, swiglu_linear
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.activation import GeluTanhAndMul, SiluAndMul
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from nanovllm.quantization import batch_invariant
from nanovllm.quantization.base import use_batch_invariance, use_quantization
from nanovllm.quantization.batch_invariant import BATCH_INVARIANT, choose_identical_kernels

ROWS = [8, 32, 48, 64]


def linear(x, weight, bias=None, residual=None):
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


@pytest.fixture
def fakes(monkeypatch):
    """All GEMMs are F.linear. For the numbers of rows in ``wrong``, and the operations in it, the
    last element of another GEMM's result is wrong."""
    wrong = set()

    def with_errors(y, name):
        if len(y) in wrong or name in wrong:
            y[-1, -1] += 0.5
        return y

    def cublas(x, weight, residual=None):
        name = "plain" if residual is None else "add"
        return with_errors(linear(x, weight, None, residual), name)

    def with_swiglu(x, weight):
        return with_errors(silu_and_mul(F.linear(x, weight)), "swiglu")

    def decode(x, weight, residual=None):
        wrong_rows = {f"decode {len(x)}", "decode"} & wrong
        y = linear(x, weight, None, residual)
        return with_errors(y, wrong_rows.pop()) if wrong_rows else y

    def decode_with_swiglu(x, weight):
        return with_errors(silu_and_mul(F.linear(x, weight)), "decode swiglu")

    for name, kernel in (
        ("invariant_linear", linear),
        ("cublas_linear", cublas),
        ("swiglu_linear", with_swiglu),
        ("decode_linear", decode),
        ("decode_swiglu", decode_with_swiglu),
    ):
        monkeypatch.setattr(same_bits, name, kernel)
    monkeypatch.setattr(
        same_bits.decode_gemm,
        "is_fastest",
        lambda num_rows, weight: num_rows <= 48 and "unsupported" not in wrong,
    )
    monkeypatch.setattr(same_bits.hopper_gemm, "supports", lambda *_: "unsupported" not in wrong)
    return wrong


@pytest.mark.parametrize(
    ("wrong", "rows", "has_swiglu", "decode_rows"),
    [
        (set(), {32, 48, 64}, True, {8, 32, 48}),
        ({64}, {32, 48}, True, {8, 32, 48}),
        ({"plain"}, set(), True, {8, 32, 48}),
        ({"add"}, set(), True, {8, 32, 48}),
        ({"swiglu"}, {32, 48, 64}, False, {8, 32, 48}),
        ({"decode 32"}, {32, 48, 64}, True, {8, 48}),
        ({"decode"}, {32, 48, 64}, True, set()),
        ({"decode swiglu"}, {32, 48, 64}, True, set()),
        ({"unsupported"}, {32, 48, 64}, False, set()),
    ],
    ids=str,
)
def test_kernels_with_other_bits_are_not_used(wrong, rows, has_swiglu, decode_rows, fakes):
    fakes |= wrong
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.empty(16, 8, dtype=dtype)
        found = compare(weight, ROWS)
        assert found == SameBits(frozenset(rows), has_swiglu, frozenset(decode_rows))
    assert compare(weight, []) == SameBits(frozenset(), has_swiglu)


def test_zeros_have_signs(fakes, monkeypatch):
    monkeypatch.setattr(same_bits, "invariant_linear", lambda *args: 0.0 * linear(*args).abs())
    monkeypatch.setattr(same_bits, "cublas_linear", lambda *args: -0.0 * linear(*args[:2]).abs())
    assert not compare(torch.empty(16, 8), ROWS).cublas_rows


def test_a_kernel_that_falls_back_to_others_is_not_used(fakes, monkeypatch):
    """Because each call would try to compile it."""

    def broken(x, weight):
        fakes.add("unsupported")
        return silu_and_mul(F.linear(x, weight))

    monkeypatch.setattr(same_bits, "swiglu_linear", broken)
    assert not compare(torch.empty(16, 8), ROWS).has_swiglu


def test_a_weight_with_parts_has_only_the_kernel_for_decodes(fakes):
    """The others would have to cut its columns at the same places."""
    expected = SameBits(decode_rows=frozenset({8, 32, 48}))
    assert compare(torch.empty(64, 4096), ROWS) == expected


def test_running_out_of_memory_ends_the_comparison(fakes, monkeypatch):
    def full(x, weight, residual=None):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(same_bits, "cublas_linear", full)
    assert compare(torch.randn(16, 8), ROWS) == SameBits()


def test_cublas_adds_the_residual_in_place():
    x, weight, residual = torch.randn(3, 8), torch.randn(16, 8), torch.randn(3, 16)
    expected = x @ weight.t() + residual
    found = cublas_linear(x, weight, residual)
    torch.testing.assert_close(found, expected)
    assert found is residual
    torch.testing.assert_close(cublas_linear(x, weight), x @ weight.t())


class Model(torch.nn.Module):
    """Layers with and without biases, and an LM head; in FP8 too, which is rounded."""

    def __init__(self) -> None:
        super().__init__()
        with use_batch_invariance(True):
            self.plain = MergedColumnParallelLinear(8, [8, 8])
            self.biased = ReplicatedLinear(8, 16, bias=True)
            self.lm_head = ParallelLMHead(16, 8)
            with use_quantization({"quant_method": "fp8"}):
                self.rounded = ReplicatedLinear(8, 16)
        for param in self.parameters():
            param.data.normal_()


def test_a_weight_uses_them_where_they_were_compared(fakes, monkeypatch):
    """cuBLAS in graphs only, where there is no other kernel, and all without a bias."""

    monkeypatch.setattr(batch_invariant, "small_cublas_workspace", nullcontext)
    model, capturing = Model(), False
    used = []
    for name in ("cublas_linear", "swiglu_linear", "decode_linear", "decode_swiglu"):
        kernel = getattr(same_bits, name)
        monkeypatch.setattr(
            batch_invariant, name, lambda *args, f=kernel: used.append(len(args[0])) or f(*args)
        )
    decode = batch_invariant.decode_linear
    monkeypatch.setattr(batch_invariant, "decode_linear_add", lambda *args: (decode(*args), None))
    monkeypatch.setattr(batch_invariant, "batch_invariant_linear", linear)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    def rows_used(layer, operation="matmul", rows=(8, 9, 32, 33, 64, 1023, 1024)):
        used.clear()
        for num_rows in rows:
            x, weight = torch.randn(num_rows, 8), layer.linear_weight
            y = F.linear(x, layer.weight, layer.bias)
            if operation == "matmul":
                torch.testing.assert_close(weight.matmul(x), y)
            elif operation == "add":
                residual = torch.randn(num_rows, 16)
                expected = y + residual
                found, rest = weight.matmul_add(x, residual)
                torch.testing.assert_close(found if rest is None else found + rest, expected)
            else:
                expected = operation(BATCH_INVARIANT)(y)
                found = weight.matmul_swiglu(x, operation(BATCH_INVARIANT))
                torch.testing.assert_close(found, expected)
        return [*used]

    assert rows_used(model.plain) == []
    choose_identical_kernels(model, {8, 32, 64})
    assert model.plain.linear_weight.same_bits == SameBits(
        frozenset({32, 64}), True, frozenset({8, 32})
    )
    assert model.lm_head.linear_weight.same_bits == SameBits(), "its results are fp32"
    assert rows_used(model.plain) == rows_used(model.plain, "add") == [8, 32]
    assert rows_used(model.plain, SiluAndMul) == [8, 32, 1024]
    assert rows_used(model.plain, GeluTanhAndMul) == [8, 32]
    assert rows_used(model.biased, SiluAndMul) == []
    capturing, rows = True, [8, 32, 64]
    for layer, expected in ((model.plain, rows), (model.rounded, rows), (model.biased, [])):
        assert rows_used(layer) == rows_used(layer, "add") == expected
    choose_identical_kernels(model, set())
    assert rows_used(model.plain) == [], "an engine without graphs"


@pytest.mark.gpu
@pytest.mark.parametrize(("out", "width"), [(6144, 1024), (4096, 4096), (2560, 9728)], ids=str)
def test_the_bits_are_the_same_in_a_cuda_graph(out, width):
    """With other values than those that were compared; NaN in a row stays there."""
    weight = torch.randn(out, width, dtype=torch.bfloat16, device="cuda") / width**0.5
    with torch.inference_mode(), small_cublas_workspace():
        found = compare(weight, [16, 32, 64, 96, 128, 256, 512, 1024, 2048])
        assert len(found.cublas_rows) >= 5, "cuBLAS is identical for too few numbers of rows"
        for num_rows in found.cublas_rows:
            x = torch.randn(num_rows, width, device="cuda").bfloat16() * 3
            x[num_rows // 2] = float("nan")
            residual = torch.randn(num_rows, out, device="cuda").bfloat16()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                plain = cublas_linear(x, weight)
                added = cublas_linear(x, weight, residual.clone())
            graph.replay()
            for result, expected in (
                (plain, invariant_linear(x, weight, None)),
                (added, invariant_linear(x, weight, None, residual)),
            ):
                isnan = expected.isnan()
                assert torch.equal(result.isnan(), isnan)
                assert torch.equal(result[~isnan], expected[~isnan])


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_swiglu_in_the_epilogue_has_the_same_bits():
    weight = torch.randn(6144, 1024, dtype=torch.bfloat16, device="cuda") / 32
    assert compare(weight, []).has_swiglu
    for num_rows in (1024, 1500, 16_384):
        x = torch.randn(num_rows, 1024, device="cuda").bfloat16() * 5
        expected = silu_and_mul(invariant_linear(x, weight, None))
        assert torch.equal(swiglu_linear(x, weight), expected)
