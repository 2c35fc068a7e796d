"""Experts whose weights are in FP8, in layers and in engines."""

from typing import Any

import pytest
import torch
from torch import nn

from nanovllm import LLM, SamplingParams
from nanovllm.kernels import fp8 as kernels_fp8
from nanovllm.kernels.fp8 import FP8, Fp8Rows, dequantize, pack_rows, quantize, quantize_blocks
from nanovllm.kernels.moe.route import route_triton
from nanovllm.layers import moe
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.moe import MoE
from nanovllm.quantization import experts, fp8_experts
from nanovllm.quantization.base import use_quantization
from nanovllm.utils.distributed import TPGroup, use_tp_group

HIDDEN, EXPERTS, COLUMNS, GROUP = 32, 3, 64, 16
CPU = {"device": "cpu", "num_kvcache_blocks": 16}


@pytest.fixture(params=["fp8", "fp8_groups"])
def method(request, monkeypatch):
    """Layers are those of a GPU, and are computed by the reference of its kernels."""
    for module in (kernels_fp8, fp8_experts):
        monkeypatch.setattr(module, "GROUP", GROUP)
    choose = experts._fp8_class
    monkeypatch.setattr(experts, "_fp8_class", lambda method, on_cpu: choose(method, False))
    return request.param


def make_layer(method: str, rank: int = 0, num_ranks: int = 1, **fields: Any) -> MoE:
    with use_quantization({"quant_method": method}), use_tp_group(TPGroup(rank, num_ranks)):
        return MoE(HIDDEN, EXPERTS, 2, COLUMNS, True, **fields)


def quantized(weight: torch.Tensor, method: str) -> Fp8Rows:
    """A weight with a scale for each row, or for each group of a row."""
    rows = quantize_blocks(weight) if method == "fp8_groups" else quantize(weight)
    if rows.scales.dim() == 2:
        rows = Fp8Rows(rows.codes, rows.scales.repeat_interleave(GROUP, 0))
    return rows


def rounded(weight: torch.Tensor, method: str) -> torch.Tensor:
    return torch.stack([dequantize(quantized(one, method)) for one in weight])


def load(layer: MoE, name: str, tensor: torch.Tensor, *shard: int, **expert: int) -> None:
    param = getattr(layer.experts, name)
    param.weight_loader(param, tensor, *shard, **expert)


@pytest.mark.parametrize("form", ["one by one", "fused", "packed", "packed and fused"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_part_of_the_same_weights(rank, form, method):
    layer = make_layer(method, rank, 2)
    gate, up, down = (
        torch.randn(EXPERTS, *n) for n in [(COLUMNS, HIDDEN)] * 2 + [(HIDDEN, COLUMNS)]
    )
    gate_up = torch.cat((gate, up), 1)

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        if "packed" not in form:
            return tensor
        if tensor.dim() == 3:
            return torch.stack([*map(packed, tensor)])
        return pack_rows(quantized(tensor, method))

    if "fused" in form:
        load(layer, "gate_up_proj", packed(gate_up))
        load(layer, "down_proj", packed(down))
    else:
        for expert in range(EXPERTS):
            load(layer, "gate_up_proj", packed(gate[expert]), 0, expert=expert)
            load(layer, "gate_up_proj", packed(up[expert]), 1, expert=expert)
            load(layer, "down_proj", packed(down[expert]), expert=expert)
    found = layer.experts.weights._experts
    assert found.gate_up.dtype is found.down.dtype is FP8
    assert (found.group == GROUP) == (method == "fp8_groups")
    found = found.dequantized(torch.float32)
    parts = [rounded(weight, method).chunk(2, 1)[rank] for weight in (gate, up)]
    assert torch.equal(found.gate_up, torch.cat(parts, 1))
    assert torch.equal(found.down, rounded(down, method).chunk(2, 2)[rank])


def test_interleaved_weights_and_biases(method):
    """As gpt-oss has them: [E, in, out], and gate and up alternate."""
    if method == "fp8_groups":
        with pytest.raises(AssertionError):
            make_layer(method, interleaved=True)
        return
    layer = make_layer(method, interleaved=True, bias=True, limit=7.0, alpha=1.7)
    weight, bias = torch.randn(EXPERTS, 2 * COLUMNS, HIDDEN), torch.randn(EXPERTS, 2 * COLUMNS)
    load(layer, "gate_up_proj", weight.transpose(1, 2))
    load(layer, "gate_up_proj_bias", bias)
    found = layer.experts.weights._experts.dequantized(torch.float32)
    expected = rounded(weight, method)
    assert torch.equal(found.gate_up, torch.cat((expected[:, ::2], expected[:, 1::2]), 1))
    assert torch.equal(found.gate_up_bias, torch.cat((bias[:, ::2], bias[:, 1::2]), 1))


def test_other_shapes_and_dtypes_are_refused(method):
    layer = make_layer(method)
    fill = layer.experts.gate_up_proj.fill_with_dummy_weights
    fill(layer.experts.gate_up_proj, torch.Generator().manual_seed(0))
    before = layer.experts.gate_up_proj.view(torch.uint8).clone()
    good = torch.randn(COLUMNS, HIDDEN)
    tall = torch.randn(2 * COLUMNS, HIDDEN)
    for bad in (good[1:], good[:, 1:], tall, pack_rows(quantized(tall, method)), good[0]):
        with pytest.raises(ValueError, match="the model needs shape"):
            load(layer, "gate_up_proj", bad, 0, expert=1)
    with pytest.raises(ValueError, match=r"dtype torch\.int32"):
        load(layer, "gate_up_proj", good.int(), 0, expert=1)
    damaged = pack_rows(quantized(good, method))
    damaged[3, 5] = 127
    with pytest.raises(ValueError, match="NaN"):
        load(layer, "gate_up_proj", damaged, 0, expert=1)
    assert torch.equal(layer.experts.gate_up_proj.view(torch.uint8), before)


def test_dummy_weights_and_the_router(method):
    layer = make_layer(method)
    for param in layer.experts.parameters():
        param.fill_with_dummy_weights(param, torch.Generator().manual_seed(0))
    found = layer.experts.weights._experts.dequantized(torch.float32)
    assert found.gate_up.std() == pytest.approx(0.02, rel=0.05)
    assert found.down.std() == pytest.approx(0.02, rel=0.05)
    assert layer.gate.weight.dtype is torch.float32


@pytest.mark.parametrize(("capability", "dtype"), [((8, 0), torch.uint8), ((8, 9), FP8)])
def test_the_device_decides(capability, dtype, monkeypatch):
    """GPUs without FP8 matmuls get the bits of FP8 numbers."""
    with use_quantization({"quant_method": "fp8"}):
        layer = MoE(HIDDEN, EXPERTS, 2, COLUMNS, True)
    assert type(layer.experts.weights) is fp8_experts.DequantizedFp8Experts
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cuda"))
    weights = experts.new_expert_weights(nn.Module(), None, 1.0, False, False)
    assert type(weights) is experts.UnquantizedExperts
    with use_quantization({"quant_method": "fp8"}):
        mxfp4 = experts.new_expert_weights(nn.Module(), 7.0, 1.7, True, True)
        weights = experts.new_expert_weights(nn.Module(), None, 1.0, False, False)
    assert type(mxfp4) is experts.Mxfp4Experts, "which has fewer bits"
    with torch.device("cpu"):
        weights.create_parameters(EXPERTS, HIDDEN, COLUMNS, False)
    assert weights._experts.gate_up.dtype is dtype
    assert weights._experts.dequantized(torch.float32).down.shape == (EXPERTS, HIDDEN, COLUMNS)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are interpreted")
@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("method", ["fp8", "fp8_groups"])
@pytest.mark.parametrize("num_tokens", [1, 6])
@torch.no_grad()
def test_the_kernels_in_a_layer(num_tokens, method, monkeypatch):
    """Against a layer with the dequantised weights. Inputs of one token are not quantised."""
    size = kernels_fp8.GROUP
    plain = MoE(size, EXPERTS, 2, size, True)
    choose = experts._fp8_class
    monkeypatch.setattr(experts, "_fp8_class", lambda method, on_cpu: choose(method, False))
    with use_quantization({"quant_method": method}):
        layer = MoE(size, EXPERTS, 2, size, True)
    for param in layer.experts.parameters():
        param.fill_with_dummy_weights(param, torch.Generator().manual_seed(0))
    weights = layer.experts.weights._experts.dequantized(torch.float32)
    plain.experts.gate_up_proj.copy_(weights.gate_up)
    plain.experts.down_proj.copy_(weights.down)
    gate = torch.randn(EXPERTS, size)
    norm, x, residual = RMSNorm(size), *torch.randn(2, num_tokens, size)
    results = []
    for each in (plain, layer):
        each.gate.weight.copy_(gate)
        results.append(each(x, residual, norm, torch.clone)[0])
        monkeypatch.setattr(experts, "use_triton", lambda x: True)
        monkeypatch.setattr(moe, "route", route_triton)
    error = (results[1] - results[0]).norm() / results[0].norm()
    assert error < 1e-5 if num_tokens == 1 else 1e-3 < error < 0.05


def test_a_cpu_generates_with_rounded_weights(tiny_models):
    path, name = tiny_models.path("qwen3-moe"), "model.layers.0.mlp.experts.gate_up_proj"
    with LLM(path, **CPU) as llm:
        plain = llm.model_runner.model.get_parameter(name).clone()
        router = llm.model_runner.model.model.layers[0].mlp.gate.weight.to_dense().clone()
    with LLM(path, quantization="fp8", **CPU) as llm:
        model = llm.model_runner.model
        assert torch.equal(model.get_parameter(name), dequantize(quantize(plain)))
        assert torch.equal(model.model.layers[0].mlp.gate.weight.to_dense(), router)
        new = torch.randn_like(plain[2, :32])
        llm.load_weights([("model.layers.0.mlp.experts.2.gate_proj.weight", new)])
        assert torch.equal(model.get_parameter(name)[2, :32], dequantize(quantize(new)))
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(output["token_ids"]) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("num_prompts", [1, 20])
def test_a_gpu_keeps_fp8_weights(num_prompts, tiny_models):
    path, params = tiny_models.path("qwen3-moe"), SamplingParams(max_tokens=8, ignore_eos=True)
    settings = {"dtype": "bfloat16", "num_kvcache_blocks": 64}  # it may share the GPU
    with LLM(path, device="cuda", quantization="fp8", **settings) as llm:
        weights = llm.model_runner.model.model.layers[0].mlp.experts
        assert weights.gate_up_proj.dtype is weights.down_proj.dtype is FP8
        outputs = llm.generate([[5, 6, 7]] * num_prompts, params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [8] * num_prompts
