"""Granite MoE (ibm-granite/granite-3.1-3b-a800m-instruct): Granite 3, with a mixture of experts in
every layer."""

from dataclasses import replace
from typing import Any

from nanovllm.models.experts import DOWN, GATE_UP, read_moe
from nanovllm.models.family import MLP, WEIGHT_NAMES, Family
from nanovllm.models.granite import DEFAULTS, granite_layers, granite_numerics
from nanovllm.models.model_config import LayerSpec

BLOCK = "model.layers.{layer}.block_sparse_moe."
NAMES = (  # as on the hub, and as in transformers' memory
    (BLOCK + "router.layer.weight", MLP + "gate.weight"),
    (BLOCK + "router.weight", MLP + "gate.weight"),
    (BLOCK + "input_linear.weight", GATE_UP),
    (BLOCK + "experts.gate_up_proj", GATE_UP),
    (BLOCK + "output_linear.weight", DOWN),
    (BLOCK + "experts.down_proj", DOWN),
)


def granite_moe_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    mixture = read_moe(hf, "intermediate_size", norm_topk_prob=True)
    return [replace(layer, mlp=mixture) for layer in granite_layers(hf)]


GRANITE_MOE = Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    layers=granite_moe_layers,
    defaults={**DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2},
    weight_names=WEIGHT_NAMES + NAMES,
    numerics=granite_numerics,
)
