"""A mixture of experts against transformers' block on the same weights."""

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.moe import MoE
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


def test_a_token_is_computed_with_a_share_of_the_parameters():
    """CUDA graphs of prefills are captured for fewer tokens of a model with more parameters."""
    layer = MoE(HIDDEN, EXPERTS, TOP_K, COLUMNS, True)
    active = sum(p.numel() * getattr(p, "active_share", 1) for p in layer.parameters())
    assert active == HIDDEN * (EXPERTS + 3 * TOP_K * COLUMNS)
