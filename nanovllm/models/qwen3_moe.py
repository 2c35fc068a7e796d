"""Qwen3-MoE (arXiv:2505.09388): Qwen3, with a mixture of experts in some or all layers."""

from dataclasses import replace
from typing import Any

from nanovllm.models.experts import EXPERT_NAMES, read_moe
from nanovllm.models.family import WEIGHT_NAMES, Family, equal_layers, with_windows
from nanovllm.models.model_config import LayerSpec

DEFAULTS: dict[str, Any] = {"num_key_value_heads": 4, "max_position_embeddings": 32768}
DEFAULTS |= {"use_sliding_window": False, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
DEFAULTS |= {
    "num_experts": 128,
    "num_local_experts": None,
    "norm_topk_prob": False,
    "sliding_window": 4096,
}
DEFAULTS |= {"decoder_sparse_step": 1, "mlp_only_layers": None}


def qwen3_moe_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    dense = equal_layers(hf, qk_norm="head", mlp_bias=False)
    mixture = replace(dense[0], mlp=read_moe(hf, "moe_intermediate_size", hf["norm_topk_prob"]))
    step, mlp_only = hf["decoder_sparse_step"], hf.get("mlp_only_layers", [])
    if type(step) is not int or step < 1:
        raise ValueError(f"decoder_sparse_step must be a positive int, got {step!r:.80}")
    if not isinstance(mlp_only, list):
        raise ValueError(f"mlp_only_layers must be a list of layers, got {mlp_only!r:.80}")
    layers = [
        layer if i in mlp_only or (i + 1) % step else mixture for i, layer in enumerate(dense)
    ]
    return with_windows({**hf, "layer_types": None}, layers, lambda layer: True)


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe_layers, DEFAULTS, WEIGHT_NAMES + EXPERT_NAMES
)
