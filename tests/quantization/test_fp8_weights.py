"""Linear layers and engines whose weights are quantised to FP8 as they are loaded."""

import logging

import pytest
import torch
import torch.nn.functional as F

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.fp8 import FP8, Fp8Rows, dequantize, pack_rows, quantize, quantize_blocks
from nanovllm.kernels.gemm import decode_gemm
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.quantization import fp8
from nanovllm.quantization.base import use_batch_invariance, use_quantization
from nanovllm.quantization.batch_invariant import RoundedToFp8Weight
from nanovllm.utils.distributed import TPGroup, use_tp_group

CONFIG = {"quant_method": "fp8"}
CLASSES = [fp8.DequantizedFp8Weight, fp8.StoredFp8Weight, fp8.Fp8Weight]
CPU = {"device": "cpu", "num_kvcache_blocks": 16}


@pytest.fixture(params=CLASSES, ids=lambda c: c.__name__)
def weight_class(request, monkeypatch):
    """On a CPU, where matmuls run in PyTorch, with each of the classes."""
    monkeypatch.setattr(fp8, "new_fp8_weight", lambda layer, has_groups: request.param(layer))
    return request.param


def rounded(weight: torch.Tensor) -> torch.Tensor:
    scales = weight.abs().amax(1, keepdim=True) / torch.tensor(448.0, device=weight.device)
    return (weight * (1 / scales)).to(FP8).float() * scales


def stored(layer: LinearBase) -> torch.Tensor:
    weight = layer.weight.data
    return weight if weight.dtype is not FP8 else dequantize(Fp8Rows(weight, layer.weight_scale))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_part_of_the_same_weights(rank, weight_class):
    q, k, v = (torch.randn(n, 8) for n in (16, 8, 8))
    gate, up, down = torch.randn(6, 8), torch.randn(6, 8), torch.randn(8, 6)
    with use_quantization(CONFIG), use_tp_group(TPGroup(rank, 2)):
        qkv = QKVParallelLinear(8, 4, 4, 2, bias=True)
        merged, row = MergedColumnParallelLinear(8, [6, 6]), RowParallelLinear(6, 8)
    for shard_id, tensor in zip("qkv", (q, k, v), strict=True):
        qkv.weight_loader(qkv.weight, tensor, shard_id)
        qkv.weight_loader(qkv.bias, tensor[:, 0], shard_id)
    merged.weight_loader(merged.weight, torch.cat((gate, up)))
    row.weight_loader(row.weight, down)
    parts = [rounded(part).chunk(2)[rank] for part in (q, k, v)]
    assert torch.equal(stored(qkv), torch.cat(parts))
    assert torch.equal(qkv.bias, torch.cat([part[:, 0].chunk(2)[rank] for part in (q, k, v)]))
    assert torch.equal(stored(merged), torch.cat([rounded(p).chunk(2)[rank] for p in (gate, up)]))
    assert torch.equal(stored(row), rounded(down).chunk(2, 1)[rank])
    for tensor, match in ((torch.randn(3, 3), "shape"), (torch.ones(8, 6).int(), "dtype")):
        with pytest.raises(ValueError, match=match):
            row.weight_loader(row.weight, tensor)


def test_an_mlp(weight_class):
    """Norm, SwiGLU and matmuls, with inputs that are rounded or not, as the class promises."""
    with use_quantization(CONFIG):
        gate_up, down = MergedColumnParallelLinear(64, [48, 48]), RowParallelLinear(48, 64)
    weights = torch.randn(96, 64), torch.randn(64, 48)
    for layer, weight in zip((gate_up, down), weights, strict=True):
        layer.weight_loader(layer.weight, weight)
    norm, x, residual = RMSNorm(64), *torch.randn(2, 5, 64)
    act_fn = SiluAndMul(down.linear_weight.input_format)
    round_input = rounded if weight_class is fp8.Fp8Weight else lambda x: x
    with torch.inference_mode():
        y, total = gate_up.linear_weight.norm_matmul(x, residual, norm, act_fn)
        y = down(y)
        gate, up = F.linear(round_input(norm(x + residual)), rounded(weights[0])).chunk(2, 1)
        expected = F.linear(round_input(F.silu(gate) * up), rounded(weights[1]))
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=0.05)
        assert (y - expected).norm() / expected.norm() < 5e-3
        plain = F.linear(F.silu(gate) * up, weights[1])
        assert (y - plain).norm() / plain.norm() > 5e-3, "rounding shows"
    assert torch.equal(total, x + residual)


def test_dummy_weights(weight_class):
    with use_quantization(CONFIG):
        layer = RowParallelLinear(64, 96)
    fill = getattr(layer.weight, "fill_with_dummy_weights", None)
    if fill is not None:
        fill(layer.weight, torch.Generator().manual_seed(0))
        assert stored(layer).std() == pytest.approx(0.02, rel=0.05)


def packed_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight as checkpoints are read: each row has the scales of its blocks."""
    rows = quantize_blocks(weight)
    return pack_rows(Fp8Rows(rows.codes, rows.scales.repeat_interleave(fp8.GROUP, 0)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("grouped_class", [fp8.StoredGroupedFp8Weight, fp8.GroupedFp8Weight])
def test_groups_of_columns(grouped_class, rank, packed, monkeypatch):
    """Each rank has its part of the weights, also if the checkpoint has them in FP8."""
    monkeypatch.setattr(fp8, "new_fp8_weight", lambda layer, has_groups: grouped_class(layer))
    weights = gate, up, down = [
        torch.randn(shape) for shape in ((256, 384), (256, 384), (128, 256))
    ]
    with use_quantization({"quant_method": "fp8_groups"}), use_tp_group(TPGroup(rank, 2)):
        merged, row = MergedColumnParallelLinear(384, [256, 256]), RowParallelLinear(256, 128)
    if packed:
        gate, up, down = (packed_blocks(weight) for weight in weights)
    merged.weight_loader(merged.weight, torch.cat((gate, up)))
    row.weight_loader(row.weight, down)
    gate, up, down = (dequantize(quantize_blocks(weight)) for weight in weights)
    expected = torch.cat((gate.chunk(2)[rank], up.chunk(2)[rank]))
    assert torch.equal(stored(merged), expected)
    assert torch.equal(stored(row), down.chunk(2, 1)[rank])
    x = torch.randn(3, 384)
    y = merged.linear_weight.matmul(x)
    error = (y - x @ expected.t()).norm() / y.norm()
    assert error < (0.05 if grouped_class is fp8.GroupedFp8Weight else 1e-5)
    with pytest.raises(ValueError, match="shape"):
        row.weight_loader(row.weight, packed_blocks(weights[0]))
    damaged = packed_blocks(weights[2])
    damaged[3, 5] = 255
    with pytest.raises(ValueError, match="NaN"):
        row.weight_loader(row.weight, damaged)
    assert torch.equal(stored(row), down.chunk(2, 1)[rank])


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), fp8.StoredFp8Weight), ((8, 9), fp8.Fp8Weight)]
)
def test_the_device_decides(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cuda"))
    assert type(fp8.new_fp8_weight(torch.nn.Module())) is expected


def test_a_cpu_generates_with_rounded_weights(tiny_models, caplog):
    """Also after ``load_weights``, of which it gets unquantised tensors."""
    path, params = tiny_models.path("qwen3"), SamplingParams(max_tokens=4, temperature=0)
    prompt = [[5, 6, 7]]

    def weights(llm: LLM) -> dict[str, torch.Tensor]:
        model = llm.model_runner.model
        return {n: p.to_dense().clone() for n, p in model.named_parameters()}

    with LLM(path, **CPU) as llm:
        plain = weights(llm)
    with caplog.at_level(logging.INFO, "nanovllm"), LLM(path, quantization="fp8", **CPU) as llm:
        found = weights(llm)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        name = "model.layers.0.mlp.down_proj.weight"
        new = torch.randn_like(plain[name])
        llm.load_weights([(name, new)])
        assert torch.equal(weights(llm)[name], dequantize(quantize(new)))
    assert caplog.text.count("weights are rounded to FP8") == 1 and len(output["token_ids"]) == 4
    assert "(weights rounded to FP8)" in caplog.text
    for name, weight in plain.items():
        is_rounded = "proj" in name and weight.dim() == 2
        assert torch.equal(found[name], rounded(weight) if is_rounded else weight), name


@pytest.mark.parametrize("has_groups", [False, True])
def test_one_row_is_quantized_too_where_the_weight_is_large(has_groups, monkeypatch):
    """On Hopper, and with scales of rows."""
    monkeypatch.setattr(fp8, "use_triton", lambda x: True)
    monkeypatch.setattr(fp8, "MIN_QUANTIZED_ROW_NUMEL", 128 * 256)
    weight_class = fp8.GroupedFp8Weight if has_groups else fp8.Fp8Weight
    monkeypatch.setattr(fp8, "new_fp8_weight", lambda layer, has_groups: weight_class(layer))
    with use_quantization(CONFIG):
        large, small = RowParallelLinear(256, 128), RowParallelLinear(128, 128)
    for is_hopper in (True, False):
        kernel = decode_gemm if is_hopper else None
        monkeypatch.setattr(fp8, "hopper_kernel", lambda *_, result=kernel: result)
        for layer, width in ((large, 256), (small, 128)):
            uses_skinny = layer.linear_weight._uses_skinny(torch.zeros(1, width))
            assert uses_skinny == (has_groups or not is_hopper or layer is small)
            assert not layer.linear_weight._uses_skinny(torch.zeros(2, width))


def test_batch_invariant_weights_are_rounded():
    with use_quantization(CONFIG), use_batch_invariance(True):
        layer = RowParallelLinear(8, 4)
    assert isinstance(layer.linear_weight, RoundedToFp8Weight)
    weight = torch.randn(4, 8)
    layer.weight_loader(layer.weight, weight)
    layer.linear_weight.pack()
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), x @ rounded(weight).t())


@pytest.mark.gpu
def test_a_gpu_keeps_fp8_weights(tiny_models):
    path = tiny_models.path("qwen3")
    settings = {"dtype": "bfloat16", "num_kvcache_blocks": 64}  # it may share the GPU
    with LLM(path, device="cuda", quantization="fp8", **settings) as llm:
        layers = [m for m in llm.model_runner.model.modules() if isinstance(m, LinearBase)]
        assert layers and all(layer.weight.dtype is FP8 for layer in layers)
        outputs = llm.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=8), use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [8] * 3
