"""A mixture of experts against transformers' block on the same weights."""

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from nanovllm.kernels.moe.route import route_triton
from nanovllm.layers import moe
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.moe import MoE
from nanovllm.quantization import experts
from nanovllm.utils.distributed import TPGroup, use_tp_group

HIDDEN, EXPERTS, TOP_K, COLUMNS = 24, 6, 3, 16
MIXTRAL = MixtralConfig(
    hidden_size=HIDDEN,
    intermediate_size=COLUMNS,
    num_local_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
)
QWEN3 = Qwen3MoeConfig(
    hidden_size=HIDDEN,
    moe_intermediate_size=COLUMNS,
    num_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    norm_topk_prob=False,
)
BLOCKS = {True: (MixtralSparseMoeBlock, MIXTRAL), False: (Qwen3MoeSparseMoeBlock, QWEN3)}


def make_block(norm_topk_prob: bool) -> nn.Module:
    block_class, config = BLOCKS[norm_topk_prob]
    block = block_class(config)
    for param in block.parameters():
        nn.init.normal_(param, std=0.3)
    return block


def make_layer(block: nn.Module, norm_topk_prob: bool, one_by_one: bool = False) -> MoE:
    """Our layer, loaded with transformers' weights: fused as they are in memory, or cut up as they
    are on the hub."""
    layer = MoE(HIDDEN, EXPERTS, TOP_K, COLUMNS, norm_topk_prob)
    layer.gate.weight.data.copy_(block.gate.weight)
    gate_up, down = layer.experts.gate_up_proj, layer.experts.down_proj
    with torch.no_grad():
        if not one_by_one:
            gate_up.weight_loader(gate_up, block.experts.gate_up_proj)
            down.weight_loader(down, block.experts.down_proj)
            return layer
        for expert in range(EXPERTS):
            for shard_id, half in enumerate(block.experts.gate_up_proj[expert].chunk(2)):
                gate_up.weight_loader(gate_up, half, shard_id, expert=expert)
            down.weight_loader(down, block.experts.down_proj[expert], expert=expert)
    return layer


def run(layer: MoE, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The layer's output, without the residual and with a norm that has no effect."""
    norm = RMSNorm(HIDDEN, eps=0.0)
    norm.weight.data.fill_(1.0)
    out, left = layer(x, residual, norm, None)
    return out - (x + residual) if left is None else out


def rms_normed(x: torch.Tensor) -> torch.Tensor:
    return x / x.pow(2).mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("one_by_one", [False, True], ids=["fused", "one-by-one"])
@pytest.mark.parametrize("norm_topk_prob", [True, False], ids=["mixtral", "qwen3"])
@torch.no_grad()
def test_equals_transformers(norm_topk_prob, one_by_one):
    block = make_block(norm_topk_prob)
    layer = make_layer(block, norm_topk_prob, one_by_one)
    for num_tokens in (1, 5, 40):
        x, residual = torch.randn(2, num_tokens, HIDDEN)
        expected = block(rms_normed(x + residual)[None])[0]
        torch.testing.assert_close(run(layer, x, residual), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("one_by_one", [False, True], ids=["fused", "one-by-one"])
@torch.no_grad()
def test_ranks_have_parts_of_all_experts(one_by_one):
    """The ranks' results add up to that of one rank."""
    block = make_block(True)
    x, residual = torch.randn(2, 9, HIDDEN)
    parts = []
    for rank in range(2):
        with use_tp_group(TPGroup(rank, 2)):
            layer = make_layer(block, True, one_by_one)
        assert layer.experts.gate_up_proj.shape == (EXPERTS, COLUMNS, HIDDEN)
        assert layer.experts.down_proj.shape == (EXPERTS, HIDDEN, COLUMNS // 2)
        object.__setattr__(layer.tp, "size", 1)  # without the all-reduce
        parts.append(run(layer, x, residual))
    expected = block(rms_normed(x + residual)[None])[0]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "shard_id", "expert"),
    [((EXPERTS, COLUMNS, HIDDEN), None, None), ((COLUMNS - 1, HIDDEN), 0, 1), ((HIDDEN,), 1, 2)],
)
def test_other_shapes_are_refused(shape, shard_id, expert):
    gate_up = MoE(HIDDEN, EXPERTS, TOP_K, COLUMNS, True).experts.gate_up_proj
    with pytest.raises(ValueError, match="the model needs shape"):
        gate_up.weight_loader(gate_up, torch.zeros(shape), shard_id, expert=expert)


@pytest.mark.parametrize("shape", [(0, 0), (3, 128), (3, 128, 1, 16), (3, 128, 32), (0, 0, 2, 16)])
def test_other_shapes_of_mxfp4_are_refused(shape, monkeypatch):
    monkeypatch.setattr(experts, "UnquantizedExperts", experts.Mxfp4Experts)
    param = MoE(64, 3, 2, 64, True, mxfp4=True).experts.gate_up_proj_blocks
    with pytest.raises(ValueError, match="the model needs shape"):
        param.weight_loader(param, torch.zeros(shape, dtype=torch.uint8))


def test_a_token_is_computed_with_a_share_of_the_parameters():
    """CUDA graphs of prefills are captured for fewer tokens of a model with more parameters."""
    layer = MoE(HIDDEN, EXPERTS, TOP_K, COLUMNS, True)
    active = sum(p.numel() * getattr(p, "active_share", 1) for p in layer.parameters())
    assert active == HIDDEN * (EXPERTS + 3 * TOP_K * COLUMNS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are interpreted")
@torch.no_grad()
def test_the_kernels_in_a_layer(monkeypatch):
    """One token with GEMVs, and six with grouped GEMMs, as KERNELS chooses."""
    monkeypatch.setattr(experts, "use_triton", lambda x: True)
    monkeypatch.setattr(moe, "route", route_triton)
    block = make_block(True)
    layer = make_layer(block, True)
    for num_tokens in (1, 6):
        x, residual = torch.randn(2, num_tokens, HIDDEN)
        expected = block(rms_normed(x + residual)[None])[0]
        torch.testing.assert_close(run(layer, x, residual), expected, rtol=1e-4, atol=1e-4)


GPT_OSS = GptOssConfig(
    hidden_size=64,
    intermediate_size=128,
    num_local_experts=3,
    num_experts_per_tok=2,
    swiglu_limit=7.0,
)


@pytest.mark.parametrize("is_packed", [False, True], ids=["on-load", "packed"])
@torch.no_grad()
def test_mxfp4_on_two_ranks(is_packed, monkeypatch):
    """Against transformers' layer with the weights that transformers dequantises. A GPU keeps
    them packed; here the reference of its kernels dequantises them in each step."""
    block = GptOssMLP(GPT_OSS)
    for param in block.parameters():
        nn.init.normal_(param, std=0.3)
    packed = {}
    for name, rows, width in (("gate_up_proj", 256, 64), ("down_proj", 64, 128)):
        blocks = torch.randint(0, 256, (3, rows, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(123, 126, (3, rows, width // 32)).to(torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        getattr(block.experts, name).copy_(dense)
    if is_packed:
        monkeypatch.setattr(experts, "UnquantizedExperts", experts.Mxfp4Experts)
    x, residual = torch.randn(2, 7, 64)
    parts = []
    for rank in range(2):
        with use_tp_group(TPGroup(rank, 2)):
            layer = MoE(64, 3, 2, 128, True, True, GPT_OSS.swiglu_limit, 1.702, True, True)
        layer.gate.weight.copy_(block.router.weight)
        layer.gate.bias.copy_(block.router.bias)
        params = dict(layer.experts.named_parameters())
        for name, tensor in packed.items():
            if is_packed:
                params[name].weight_loader(params[name], tensor)
            else:
                param = params[name.removesuffix("_blocks").removesuffix("_scales")]
                param.weight_loader(param, tensor, name.rsplit("_", 1)[1])
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            params[name].weight_loader(params[name], getattr(block.experts, name))
        object.__setattr__(layer.tp, "size", 1)  # without the all-reduce
        norm = RMSNorm(64, eps=0.0)
        parts.append(layer(x, residual, norm, torch.clone)[0])
    expected = block(rms_normed(x + residual)[None])[0][0]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 256, 16, 4), (3, 256, 64), (3, 0, 4, 16), (64,)], ids=str)
def test_packed_weights_of_other_shapes_are_refused(shape, monkeypatch):
    """Also those with as many bytes as the model needs."""
    monkeypatch.setattr(experts, "UnquantizedExperts", experts.Mxfp4Experts)
    blocks = MoE(128, 3, 2, 128, True, True, None, 1.0, True, True).experts.gate_up_proj_blocks
    with pytest.raises(ValueError, match="the model needs shape"):
        blocks.weight_loader(blocks, torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"dtype torch\.int8 is not supported"):
        blocks.weight_loader(blocks, torch.zeros(3, 256, 4, 16, dtype=torch.int8))
