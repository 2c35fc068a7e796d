"""Granite 3 (ibm-granite/granite-3.3-8b-instruct): Llama's architecture, with four multipliers."""

from dataclasses import replace
from typing import Any

from nanovllm.models.family import Family, equal_layers
from nanovllm.models.model_config import LayerSpec
from nanovllm.models.rope import positive

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier")
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048, "eos_token_id": 2}
DEFAULTS |= dict.fromkeys((*MULTIPLIERS, "logits_scaling"), 1.0)


def granite_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    attention, residual = (positive(name, hf.get(name)) for name in MULTIPLIERS[1:])
    layer = equal_layers(hf, scale=attention)[0]
    return [replace(layer, output_scale=residual)] * hf["num_hidden_layers"]


def granite_numerics(hf: dict[str, Any]) -> dict[str, float]:
    return {
        "embedding_scale": positive("embedding_multiplier", hf.get("embedding_multiplier")),
        "logits_scale": 1 / positive("logits_scaling", hf.get("logits_scaling")),
    }


GRANITE = Family(
    "GraniteForCausalLM", "granite", granite_layers, DEFAULTS, numerics=granite_numerics
)
