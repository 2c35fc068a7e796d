"""Qwen3 (arXiv:2505.09388): Llama's architecture, with an RMSNorm on each query and key head.

Qwen3-MoE has a mixture of experts in some or all layers.
"""

from dataclasses import replace
from typing import Any

from nanovllm.models.experts import EXPERT_NAMES, read_moe
from nanovllm.models.family import WEIGHT_NAMES, Family, equal_layers, with_windows
from nanovllm.models.model_config import LayerSpec
from nanovllm.models.qwen2 import DEFAULTS, qwen_layers

MOE_DEFAULTS: dict[str, Any] = {"num_key_value_heads": 4, "max_position_embeddings": 32768}
MOE_DEFAULTS |= {"use_sliding_window": False, "sliding_window": 4096}
MOE_DEFAULTS |= {"num_experts": 128, "num_local_experts": None, "num_experts_per_tok": 8}
MOE_DEFAULTS |= {"moe_intermediate_size": 768, "norm_topk_prob": False}
MOE_DEFAULTS |= {"decoder_sparse_step": 1, "mlp_only_layers": None}


def qwen3_moe_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    dense = equal_layers(hf, qk_norm="head", mlp_bias=False)
    moe = read_moe(hf, "moe_intermediate_size", norm_topk_prob=hf["norm_topk_prob"])
    mixture = replace(dense[0], mlp=moe)
    step, mlp_only = hf["decoder_sparse_step"], hf.get("mlp_only_layers", [])
    if not isinstance(mlp_only, list):
        raise ValueError(f"mlp_only_layers must be a list of layers, got {mlp_only!r:.80}")
    layers = [
        layer if i in mlp_only or (i + 1) % step else mixture for i, layer in enumerate(dense)
    ]
    return with_windows({**hf, "layer_types": None}, layers, lambda layer: True)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    layers=lambda hf: qwen_layers(hf, qk_norm="head"),
    defaults={"head_dim": 128, **DEFAULTS},
)
QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    layers=qwen3_moe_layers,
    defaults=MOE_DEFAULTS,
    weight_names=WEIGHT_NAMES + EXPERT_NAMES,
)
