"""Mistral (arXiv:2310.06825): Llama's architecture, with a sliding window in all layers or none."""

from typing import Any

from nanovllm.models.family import Family, equal_layers, with_windows
from nanovllm.models.model_config import LayerSpec


def mistral_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    layers = equal_layers(hf, qkv_bias=False, o_bias=False, mlp_bias=False)
    return with_windows({**hf, "layer_types": None}, layers, lambda layer: True)


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    layers=mistral_layers,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
)
