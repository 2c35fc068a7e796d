"""Ministral 3: Mistral with YaRN, and queries that are scaled by their position."""

from dataclasses import replace
from typing import Any

from nanovllm.models.family import Family, with_attention
from nanovllm.models.mistral import mistral_layers
from nanovllm.models.model_config import LayerSpec
from nanovllm.models.rope import positive, read_rope, rope_parameters

ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


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


MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    layers=ministral3_layers,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": ROPE,
        "eos_token_id": 2,
    },
)
