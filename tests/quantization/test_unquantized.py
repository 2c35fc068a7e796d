"""Unquantised weights: which kernel multiplies, what is fused, and loading into a packed weight."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoints.weights import load_model
from nanovllm.kernels.gemm import hopper_gemm, qkv, tiled
from nanovllm.kernels.gemm.skinny import skinny_linear, skinny_norm_and_linear, skinny_norm_linear
from nanovllm.kernels.gemm.tiled import tile_linear
from nanovllm.kernels.rms_norm import rms_norm_reference
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nanovllm.models.weight_names import WeightNames
from nanovllm.quantization import unquantized
from nanovllm.quantization.unquantized import UnquantizedWeight, choose_kernel
from nanovllm.utils.distributed import TPGroup, use_tp_group
from tests.kernels.oracle import assert_as_good_as_eager

MIB = 1 << 20
BF16 = torch.bfloat16


class Norm(NamedTuple):
    weight: torch.Tensor
    eps: float


def make_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> UnquantizedWeight:
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.weight.weight_loader = layer.weight_loader = None
    linear_weight = UnquantizedWeight(layer)
    linear_weight.bias = bias
    return linear_weight


@pytest.fixture
def choose(monkeypatch):
    """(operation, rows, out, in) -> the kernel that a Hopper GPU, or another one, would run."""
    monkeypatch.setattr(unquantized, "use_triton", lambda x: True)

    def call(operation, rows, out, width, *, dtype=BF16, bias=None, memory=228, hopper=True):
        monkeypatch.setattr(hopper_gemm, "supports", lambda *_: hopper)
        monkeypatch.setattr(tiled, "shared_memory", lambda device: memory << 10)
        x, weight = (torch.empty(n, width, dtype=dtype, device="meta") for n in (rows, out))
        kernel = choose_kernel(operation, x, weight, bias)
        if isinstance(kernel, partial):
            assert kernel.keywords == {"silu": True} and operation == "matmul_swiglu"
            return kernel.func
        return kernel

    return call


def test_which_matmuls_are_skinny(choose):
    def is_skinny(*shape: int) -> bool:
        operations = "matmul", "matmul_swiglu"
        found = {choose(name, *shape, hopper=False) is skinny_linear for name in operations}
        assert len(found) == 1, "with SwiGLU and without"
        return found.pop()

    assert is_skinny(1, 64, 64) and is_skinny(16, 64, 4095) and is_skinny(8, 24576, 12288)
    assert not is_skinny(17, 64, 64) and not is_skinny(9, 64, 4096) and not is_skinny(0, 64, 64)
    assert not is_skinny(1, 151_936, 1024)
    assert is_skinny(16, 3072, 3072) and is_skinny(8, 6144, 2560) and not is_skinny(16, 6144, 2560)
    assert choose("matmul", 9, 64, 4096, hopper=False) is F.linear
    assert choose("matmul", 1, 151_936, 1024, hopper=False) is F.linear


def test_which_matmuls_have_the_kernel_for_decodes(choose):
    """On Hopper, those of 2 to 256 rows, fewer with large weights; and one row of LM heads."""
    kernels = {
        "matmul": unquantized.decode_linear,
        "matmul_swiglu": unquantized.decode_swiglu,
        "matmul_add": unquantized.decode_linear_add,
    }
    for operation, kernel in kernels.items():
        for rows in (2, 9, 64, 256):
            for bias in (None, torch.empty(4096, device="meta")):
                assert choose(operation, rows, 4096, 1024, bias=bias) is kernel
        assert choose(operation, 1, 151_936, 1024) is choose(operation, 64, 151_936, 1024) is kernel
        assert choose(operation, 65, 151_936, 1024) is not kernel
        assert choose(operation, 128, 24_576, 4096) is kernel
        assert choose(operation, 129, 24_576, 4096) is not kernel
        assert choose(operation, 1, 4096, 1024) is not kernel
        assert choose(operation, 257, 4096, 1024) is not kernel


def test_which_matmuls_are_tiled(choose):
    def is_tiled(*shape: int, **options) -> bool:
        return choose("matmul", *shape, hopper=False, **options) is tile_linear

    assert all(is_tiled(n, *shape) for n in (17, 64) for shape in ((4096, 1024), (1024, 3072)))
    assert not is_tiled(16, 1024, 1024) and not is_tiled(65, 1024, 1024)
    assert not is_tiled(32, 1000, 1024) and not is_tiled(32, 1024, 1000)
    assert not is_tiled(32, 8192, 1024)
    assert not is_tiled(32, 1024, 1024, dtype=torch.float32)
    assert not is_tiled(32, 1024, 1024, memory=99)


def test_which_matmuls_have_a_norm_or_a_swiglu_fused(choose):
    assert choose("norm_matmul", 1, 64, 4096) is skinny_norm_linear
    assert choose("norm_matmul", 2, 64, 4096) is choose("norm_matmul", 1, 151_936, 64) is None
    assert choose("norm_and_matmul", 1, 128, 2048) is skinny_norm_and_linear
    assert choose("norm_and_matmul", 2, 128, 2048) is None
    assert choose("matmul_swiglu", 1024, 64, 4096) is unquantized._gated_linear
    assert choose("matmul_swiglu", 1023, 64, 4096) is None
    assert choose("matmul_swiglu", 1024, 64, 64, bias=torch.empty(64, device="meta")) is None


def test_which_projections_have_rope_fused(monkeypatch):
    weight, bias, residual = torch.randn(384, 64), torch.zeros(384), torch.randn(1024, 64)
    rope, slots, launched = object(), object(), []

    def qkv_linear(x: torch.Tensor, *args: object) -> str:
        launched.append((x, *args))
        return "qkv"

    monkeypatch.setattr(qkv, "qkv_linear", qkv_linear)
    monkeypatch.setattr(qkv, "supports", lambda *args: True)
    monkeypatch.setattr(hopper_gemm, "supports", lambda *_: True)
    x, norm = torch.randn(1024, 64), Norm(torch.ones(64), 1e-6)
    fused = make_weight(weight).norm_matmul_rope(x, residual, norm, rope, slots)
    normed, total = rms_norm_reference(x, norm.weight, norm.eps, residual)
    assert fused[0] == "qkv" and torch.equal(fused[1], total)
    ((found, *others),) = launched
    assert torch.equal(found, normed) and torch.equal(others[0], weight)
    assert others[1:] == [rope, slots]

    def is_fused(rows: slice = slice(None), bias=None, slots=slots) -> bool:
        args = x[rows], residual[rows], norm, rope, slots
        return make_weight(weight, bias).norm_matmul_rope(*args) is not None

    assert is_fused()
    assert not is_fused(slice(1, None)) and not is_fused(bias=bias) and not is_fused(slots=None)
    for module in (qkv, hopper_gemm):
        with monkeypatch.context() as context:
            context.setattr(module, "supports", lambda *args: False)
            assert not is_fused()


def test_a_cpu_uses_pytorch():
    x, weight = torch.randn(4, 64), torch.empty(128, 64)
    assert choose_kernel("matmul", x, weight, None) is F.linear
    fused = "matmul_swiglu", "matmul_rope", "norm_matmul", "norm_and_matmul", "matmul_add"
    for operation in fused:
        for num_rows in (1, 4, 32, 1024):
            assert choose_kernel(operation, x.new_empty(num_rows, 64), weight, None) is None


@pytest.mark.parametrize("shape", [(2, 3, 64), (64,)], ids=str)
def test_other_than_matrices_take_pytorchs_matmul(choose, shape):
    x, weight = torch.empty(shape, device="meta"), torch.empty(32, 64, device="meta")
    assert choose_kernel("matmul", x, weight, None) is F.linear
    strided = torch.empty(64, 2, device="meta").t()
    assert choose_kernel("matmul", strided, weight, None) is F.linear


def make(num_rows: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    shapes = (num_rows, 96), (64, 96), (64,), (num_rows, 64)
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


def test_small_projections_leave_the_residual_as_it_is(device):
    x, weight, bias, residual = make(5, torch.float32, device)
    before = residual.clone()
    y, stream = make_weight(weight, bias).matmul_add(x, residual)
    torch.testing.assert_close(y, F.linear(x, weight, bias))
    assert stream is residual and torch.equal(residual, before)


@pytest.mark.gpu
def test_large_projections_add_to_the_residual(dtype):
    x, weight, bias, residual = make(16 * MIB // (64 * dtype.itemsize), dtype, "cuda")
    eager = residual + F.linear(x, weight)
    exact = residual.double() + x.double() @ weight.double().t()
    y, stream = make_weight(weight).matmul_add(x, residual)
    assert stream is None and y.data_ptr() == residual.data_ptr()
    assert_as_good_as_eager(y, eager, exact)
    # addmm has no second addend, and a smaller residual is added by the norm.
    assert make_weight(weight, bias).matmul_add(x, residual)[1] is residual
    assert make_weight(weight).matmul_add(x[1:], residual[1:])[1] is not None


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("layout", ["plain", "packed", "fused"])
def test_norm_and_swiglu_around_a_matmul(num_rows, layout, device, monkeypatch):
    x, weight, bias, _ = make(num_rows, torch.float32, device)
    residual, norm = torch.randn_like(x), Norm(torch.randn(96, device=device), 1e-6)
    linear_weight = make_weight(weight, bias)
    if layout == "packed":
        linear_weight.pack()
    if layout == "fused":  # the kernels of a GPU, in Triton's interpreter
        monkeypatch.setattr(unquantized, "use_triton", lambda x: True)
        assert choose_kernel("matmul_swiglu", x, weight, bias) is not None
    for total, args in ((x, None), (x + residual, residual)):
        normed = rms_norm_reference(total, *norm)[0]
        y = F.linear(normed, weight, bias)
        with torch.inference_mode():
            results = linear_weight.norm_and_matmul(x, args, norm)
            found, found_total = linear_weight.norm_matmul(x, args, norm, None)
            gated, _ = linear_weight.norm_matmul(x, args, norm, SiluAndMul())
        torch.testing.assert_close(found, y, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found_total, total)
        torch.testing.assert_close(gated, silu_and_mul_reference(y), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(results, (normed, y, total), rtol=1e-4, atol=1e-4)


def make_layer(name: str) -> LinearBase:
    if name == "qkv":
        return QKVParallelLinear(8, 3, 4, 2, bias=True)
    if name == "merged":
        return MergedColumnParallelLinear(8, [6, 10], bias=True)
    return RowParallelLinear(8, 6, bias=True) if name == "row" else ReplicatedLinear(8, 6, True)


def fill(layer: LinearBase, seed: int) -> None:
    """Loads tensors for two ranks, of which this is the second."""
    generator = torch.Generator().manual_seed(seed)
    for shard_id, shard in layer.shards.items():
        args = () if shard_id is None else (shard_id,)
        num_features, width = layer.weight.shape
        shape = [len(range(num_features)[shard.rows]), width]
        shape[shard.dim] *= shard.num_parts
        for param, whole in ((layer.weight, shape), (layer.bias, shape[:1])):
            param.weight_loader(param, torch.randn(whole, generator=generator), *args)


@pytest.mark.parametrize("loads_in_inference_mode", [False, True])
@pytest.mark.parametrize("name", ["qkv", "merged", "row", "replicated"])
def test_loading_into_a_packed_weight(name, loads_in_inference_mode, device):
    """Equals a new layer with the new weights, packed alike, at the same address on a GPU."""
    with use_tp_group(TPGroup(1, 2)), torch.device(device):
        layer, expected = make_layer(name), make_layer(name)
    fill(layer, 0)
    fill(expected, 1)
    with torch.inference_mode():
        layer.linear_weight.pack()
        expected.linear_weight.pack()
    weight, address = layer.weight, layer.weight.data_ptr() if device == "cuda" else None
    with torch.inference_mode(loads_in_inference_mode):
        fill(layer, 1)
    assert layer.weight is weight and layer.weight.is_mkldnn == expected.weight.is_mkldnn
    assert device != "cuda" or layer.weight.data_ptr() == address
    x = torch.randn(5, layer.weight.size(1), device=device)
    with torch.inference_mode():
        found, wanted = (each.linear_weight.matmul(x) for each in (layer, expected))
    assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match=r"shape|evenly"):
        shard_id = next(iter(layer.shards))
        args = () if shard_id is None else (shard_id,)
        layer.weight.weight_loader(layer.weight, torch.zeros(3, 5), *args)


class Tied(nn.Module):
    """Embedding and head, which share a weight or not."""

    weight_names = WeightNames((), {})

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = VocabParallelEmbedding(40, 8), ParallelLMHead(40, 8)
        if tied:
            self.head.weight = self.embedding.weight

    def load(self, *weights: torch.Tensor) -> None:
        names = ("embedding.weight", "head.weight")
        load_model(self, zip(names, weights, strict=False))
        self.head.linear_weight.pack()


@pytest.mark.parametrize("tied", [False, True])
def test_loading_an_output_head_again(tied, device):
    """Guards a packed copy that keeps the old weights, and a tied head that asks for its own."""
    with torch.device(device):
        model, x, ids = Tied(tied), torch.randn(3, 8), torch.arange(40)
    for _ in range(2):
        weights = torch.randn(1 if tied else 2, 40, 8, device=device)
        with torch.inference_mode():
            model.load(*weights)
            torch.testing.assert_close(model.head(x), x @ weights[-1].t())
            assert torch.equal(model.embedding(ids), weights[0])
    assert len([*model.named_parameters()]) == (1 if tied else 2)


@pytest.mark.gpu
def test_a_cuda_graph_uses_reloaded_weights():
    with torch.device("cuda"):
        layer, x = ReplicatedLinear(64, 64), torch.randn(4, 64)
    layer.weight.weight_loader(layer.weight, torch.randn(64, 64))
    with torch.inference_mode():
        layer.linear_weight.pack()
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        new = torch.randn(64, 64)
        layer.weight.weight_loader(layer.weight, new)
        layer.linear_weight.pack()
        graph.replay()
        torch.testing.assert_close(y, x @ new.cuda().t(), rtol=1e-4, atol=1e-4)
