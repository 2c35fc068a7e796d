"""Mistral (arXiv:2310.06825): Llama's architecture, with a sliding window in all layers or none.

Mixtral (arXiv:2401.04088) has a mixture of experts in every layer. Ministral 3 has YaRN, and
queries that are scaled by their position.
"""

from dataclasses import replace
from typing import Any

from nanovllm.models.experts import DOWN, EXPERT_NAMES, GATE_UP, read_moe
from nanovllm.models.family import (
    MLP,
    WEIGHT_NAMES,
    Family,
    equal_layers,
    with_attention,
    with_fields,
    with_windows,
)
from nanovllm.models.model_config import LayerSpec
from nanovllm.models.rope import positive, read_rope, rope_parameters

COMMON: dict[str, Any] = {"num_key_value_heads": 8, "eos_token_id": 2}
MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
BLOCK = "model.layers.{layer}.block_sparse_moe."
MIXTRAL_NAMES = (
    (BLOCK + "gate.weight", MLP + "gate.weight"),
    (MLP + "gate.weight", MLP + "gate.weight"),
    (BLOCK + "experts.{expert}.w1.weight", GATE_UP, 0),
    (BLOCK + "experts.{expert}.w3.weight", GATE_UP, 1),
    (BLOCK + "experts.{expert}.w2.weight", DOWN),
)


def mistral_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    layers = equal_layers(hf, qkv_bias=False, o_bias=False, mlp_bias=False)
    return with_windows({**hf, "layer_types": None}, layers, lambda layer: True)


def ministral3_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    rope, fields = read_rope(hf), rope_parameters(hf)
    if (beta := fields.get("llama_4_scaling_beta")) is not None:
        length = fields.get("original_max_position_embeddings")
        scaling = (
            positive("llama_4_scaling_beta", beta),
            int(positive("original_max_position_embeddings", length)),
        )
        rope = replace(rope, query_scaling=scaling)
    return [with_attention(layer, rope=rope) for layer in mistral_layers(hf)]


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    layers=mistral_layers,
    defaults={**COMMON, "max_position_embeddings": 131072, "sliding_window": 4096},
)
MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    layers=lambda hf: with_fields(mistral_layers(hf), mlp=read_moe(hf)),
    defaults={
        **COMMON,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    weight_names=WEIGHT_NAMES + EXPERT_NAMES[3:] + MIXTRAL_NAMES,
)
MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    layers=ministral3_layers,
    defaults={
        **COMMON,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": MINISTRAL3_ROPE,
    },
)
