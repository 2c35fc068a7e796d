"""The interface of ``LinearWeight``: a class with a format of its own, registered in the table, is
all that another quantisation takes."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanovllm import quantization
from nanovllm.checkpoints.checkpoint import open_checkpoint
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.moe import MoE
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.quantization import unquantized
from nanovllm.quantization.base import (
    InputFormat,
    LinearWeight,
    Shard,
    get_quantization_config,
    use_batch_invariance,
    use_quantization,
)
from nanovllm.utils.distributed import TPGroup, use_tp_group


class Int8(NamedTuple):
    """A row-wise quantised activation."""

    values: torch.Tensor
    scales: torch.Tensor  # [N, 1]

    @classmethod
    def of(cls, x: torch.Tensor) -> "Int8":
        scales = x.abs().amax(-1, keepdim=True) / 127
        return cls((x / scales).round().to(torch.int8), scales)


def quantized_rms_norm(*args: Any) -> tuple[Int8, torch.Tensor]:
    normed, total = rms_norm(*args)
    return Int8.of(normed), total


INT8 = InputFormat(quantized_rms_norm, lambda x: Int8.of(silu_and_mul(x)), silu_and_mul)


class BlockScaledWeight(LinearWeight):
    """int8 weights with a scale per block of rows and columns; int8 inputs."""

    input_format = INT8
    taken: list[type]

    def create_parameters(self, input_size: int, output_size: int) -> None:
        self.block = get_quantization_config()["block_size"]
        codes = torch.empty(output_size, input_size, dtype=torch.int8)
        scales = torch.empty(output_size // self.block, input_size // self.block)
        self.layer.weight = nn.Parameter(codes, requires_grad=False)
        self.layer.weight_scale_inv = nn.Parameter(scales, requires_grad=False)

    def load(self, param: nn.Parameter, tensor: torch.Tensor, shard: Shard) -> None:
        block = self.block if param is self.layer.weight_scale_inv else 1
        rows = param.data
        if shard.rows != slice(None):
            rows = param.data[shard.rows.start // block : shard.rows.stop // block]
        rows.copy_(tensor.chunk(shard.num_parts, shard.dim)[shard.part])

    def matmul(self, x: torch.Tensor | Int8) -> torch.Tensor:
        self.taken.append(type(x))
        x = Int8.of(x) if isinstance(x, torch.Tensor) else x
        scales = self.layer.weight_scale_inv
        whole = scales.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        return F.linear(x.values.float() * x.scales, self.layer.weight.float() * whole, self.bias)


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """What kinds of input matmuls took."""
    monkeypatch.setitem(quantization.WEIGHT_CLASSES, "int8", BlockScaledWeight)
    monkeypatch.setattr(BlockScaledWeight, "taken", [], raising=False)
    return BlockScaledWeight.taken


CONFIG = {"quant_method": "int8", "block_size": 2}


def load(layer: LinearBase, shard_id: Any, out: int, width: int) -> torch.Tensor:
    """Loads a random weight; returns it dequantised."""
    codes = torch.randint(-99, 100, (out, width), dtype=torch.int8)
    scales = torch.rand(out // 2, width // 2) / 99
    args = () if shard_id is None else (shard_id,)
    for name, tensor in (("weight", codes), ("weight_scale_inv", scales)):
        param = layer.get_parameter(name)
        param.weight_loader(param, tensor, *args)
    return codes.float() * scales.repeat_interleave(2, 0).repeat_interleave(2, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_loads_weights_and_scales(rank):
    with use_quantization(CONFIG), use_tp_group(TPGroup(rank, 2)):
        qkv = QKVParallelLinear(8, 4, 4, 2)
        row = RowParallelLinear(16, 8)
    q, k, v = (load(qkv, name, n * 4, 8) for name, n in (("q", 4), ("k", 2), ("v", 2)))
    whole = load(row, None, 8, 16)
    x = torch.randn(5, 8)
    expected = torch.cat([part.chunk(2)[rank] for part in (q, k, v)])
    torch.testing.assert_close(qkv(x), x @ expected.t(), rtol=0.05, atol=0.05)
    expected = whole.chunk(2, 1)[rank]
    found = row.linear_weight.matmul(x)
    torch.testing.assert_close(found, x @ expected.t(), rtol=0.05, atol=0.05)


def test_norm_and_swiglu_produce_the_input_of_the_next_layer(taken):
    with use_quantization(CONFIG):
        gate_up, down = MergedColumnParallelLinear(8, [6, 6]), RowParallelLinear(6, 8)
    norm, act_fn = RMSNorm(8), SiluAndMul(down.linear_weight.input_format)
    gate, up = (load(gate_up, i, 6, 8) for i in range(2))
    weight = load(down, None, 8, 6)
    x, residual = torch.randn(2, 5, 8)
    with torch.inference_mode():
        y, total = gate_up.linear_weight.norm_matmul(x, residual, norm, act_fn)
        y, stream = down.forward_add(total, y)
        normed = norm(x + residual)
    expected = (F.silu(normed @ gate.t()) * (normed @ up.t())) @ weight.t()
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05 * expected.abs().max().item())
    assert stream is total and torch.equal(total, x + residual)
    assert taken == [Int8, Int8]


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("has_fused_kernels", [False, True])
def test_an_unquantized_layer_feeds_a_quantized_one(
    num_rows, has_fused_kernels, device, monkeypatch, taken
):
    """Some checkpoints leave some layers as they are. Guards a SwiGLU in a fused kernel, which
    returns a plain tensor."""
    if has_fused_kernels:
        monkeypatch.setattr(unquantized, "use_triton", lambda x: True)
    with torch.device(device):
        gate_up, norm, x = (
            MergedColumnParallelLinear(8, [6, 6]),
            RMSNorm(8),
            torch.randn(num_rows, 8),
        )
        with use_quantization(CONFIG):
            down = RowParallelLinear(6, 8)
    nn.init.normal_(gate_up.weight)
    weight = load(down, None, 8, 6).to(device)
    with torch.inference_mode():
        act_fn = SiluAndMul(down.linear_weight.input_format)
        y, _ = gate_up.linear_weight.norm_matmul(x, None, norm, act_fn)
        normed = norm(x)
        expected = silu_and_mul(normed @ gate_up.weight.t()) @ weight.t()
        torch.testing.assert_close(down(y), expected, rtol=0.05, atol=0.1)
    assert taken == [Int8]


def test_a_decoder_is_built_of_them(tiny_models, taken):
    """Every linear layer but the output head, without a word in the model's code."""
    config = open_checkpoint(str(tiny_models.path("qwen3"))).config
    with use_quantization(CONFIG):
        model = DecoderForCausalLM(config, 64)
    layers = [module for module in model.modules() if isinstance(module, LinearBase)]
    assert len(layers) == 4 * len(config.layers)
    assert all(isinstance(layer.linear_weight, BlockScaledWeight) for layer in layers)
    assert "model.layers.0.mlp.down_proj.weight_scale_inv" in dict(model.named_parameters())
    assert model.model.layers[0].mlp.act_fn.function is INT8.silu_and_mul
    assert model.lm_head.weight.is_floating_point()


def test_an_unknown_quantization_is_refused():
    with (
        use_quantization({"quant_method": "magic"}),
        pytest.raises(ValueError, match="'magic' quantisation is not supported"),
    ):
        RowParallelLinear(4, 4)
    assert RowParallelLinear(4, 4).weight.is_floating_point(), "only within"


def test_a_format_of_linear_layers_alone_is_refused_for_experts_and_with_batch_invariance():
    with use_quantization(CONFIG):
        with pytest.raises(ValueError, match="'int8' quantisation of experts is not supported"):
            MoE(8, 4, 2, 8, True)
        with use_batch_invariance(True), pytest.raises(ValueError, match=r"'int8'.*batch_inv"):
            RowParallelLinear(4, 4)
