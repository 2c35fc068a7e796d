"""Granite 3 (ibm-granite/granite-3.3-8b-instruct): Llama's architecture, with four multipliers.

Granite MoE (ibm-granite/granite-3.1-3b-a800m-instruct) has a mixture of experts in every layer.
"""

from dataclasses import replace
from typing import Any

from nanovllm.models.experts import DOWN, GATE_UP, read_moe
from nanovllm.models.family import MLP, WEIGHT_NAMES, Family, equal_layers, with_fields
from nanovllm.models.model_config import LayerSpec

DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048, "eos_token_id": 2}
DEFAULTS |= {"embedding_multiplier": 1.0, "attention_multiplier": 1.0}
DEFAULTS |= {"residual_multiplier": 1.0, "logits_scaling": 1.0}
BLOCK = "model.layers.{layer}.block_sparse_moe."
MOE_NAMES = (  # as on the hub, and as in transformers' memory
    (BLOCK + "router.layer.weight", MLP + "gate.weight"),
    (BLOCK + "router.weight", MLP + "gate.weight"),
    (BLOCK + "input_linear.weight", GATE_UP),
    (BLOCK + "experts.gate_up_proj", GATE_UP),
    (BLOCK + "output_linear.weight", DOWN),
    (BLOCK + "experts.down_proj", DOWN),
)


def granite_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    layers = equal_layers(hf, scale=hf["attention_multiplier"])
    return with_fields(layers, output_scale=hf["residual_multiplier"])


def granite_numerics(hf: dict[str, Any]) -> dict[str, float]:
    return {
        "embedding_scale": hf["embedding_multiplier"],
        "logits_scale": 1 / hf["logits_scaling"],
    }


GRANITE = Family(
    "GraniteForCausalLM", "granite", granite_layers, DEFAULTS, numerics=granite_numerics
)
GRANITE_MOE = replace(
    GRANITE,
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    layers=lambda hf: with_fields(granite_layers(hf), mlp=read_moe(hf)),
    defaults={**DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2},
    weight_names=WEIGHT_NAMES + MOE_NAMES,
)
