"""OLMo 2 (arXiv:2501.00656) and OLMo 3: norms after attention and MLP, q/k norms over all heads.

In OLMo 3, three of four layers have a sliding window, and RoPE is scaled in the fourth only.
OLMoE (arXiv:2409.02060) has Llama's norms, and a mixture of experts in every layer.
"""

from dataclasses import replace
from typing import Any

from nanovllm.models.experts import EXPERT_NAMES, read_moe
from nanovllm.models.family import (
    OUTPUT_NORM_NAMES,
    WEIGHT_NAMES,
    Family,
    equal_layers,
    with_fields,
    with_layer_types,
)
from nanovllm.models.model_config import LayerSpec

COMMON: dict[str, Any] = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}


def olmo_layers(hf: dict[str, Any], **flags: Any) -> list[LayerSpec]:
    layers = equal_layers(hf, qk_norm="all_heads", mlp_bias=False, **flags)
    return with_fields(layers, input_norms=False, output_norms=True)


def olmo3_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    layers = olmo_layers(hf, rope=None)
    return with_layer_types(hf, layers, lambda layer: layer % 4 != 3, sliding_theta=5e5)


def olmoe_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    if "clip_qkv" in hf:
        raise ValueError("clip_qkv is not supported: only checkpoints with clip_qkv null are")
    layers = equal_layers(hf, qk_norm="all_heads", mlp_bias=False)
    return with_fields(layers, mlp=read_moe(hf, norm_topk_prob=hf["norm_topk_prob"]))


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    layers=olmo_layers,
    defaults={**COMMON, "max_position_embeddings": 2048},
    weight_names=WEIGHT_NAMES + OUTPUT_NORM_NAMES[:2],
    numerics=lambda hf: {"norm_in_fp32": True},
)
OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    layers=olmo3_layers,
    defaults={**OLMO2.defaults, "rope_theta": 5e5, "sliding_window": 4096, "layer_types": None},
)
OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    layers=olmoe_layers,
    defaults={
        **COMMON,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_local_experts": None,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "clip_qkv": None,
    },
    weight_names=WEIGHT_NAMES + EXPERT_NAMES,
)
