"""Mixtral (arXiv:2401.04088): Mistral, with a mixture of experts in every layer."""

from dataclasses import replace
from typing import Any

from nanovllm.models.experts import DOWN, EXPERT_NAMES, GATE_UP, read_moe
from nanovllm.models.family import MLP, WEIGHT_NAMES, Family, equal_layers, with_windows
from nanovllm.models.model_config import LayerSpec

DEFAULTS: dict[str, Any] = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
DEFAULTS |= {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "eos_token_id": 2}
DEFAULTS |= {"num_local_experts": 8, "num_experts_per_tok": 2}
BLOCK = "model.layers.{layer}.block_sparse_moe."
HUB_NAMES = (
    (BLOCK + "gate.weight", MLP + "gate.weight"),
    (MLP + "gate.weight", MLP + "gate.weight"),
    (BLOCK + "experts.{expert}.w1.weight", GATE_UP, 0),
    (BLOCK + "experts.{expert}.w3.weight", GATE_UP, 1),
    (BLOCK + "experts.{expert}.w2.weight", DOWN),
)


def mixtral_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    mixture = read_moe(hf, "intermediate_size", norm_topk_prob=True)
    layers = equal_layers(hf, qkv_bias=False, o_bias=False, mlp_bias=False)
    mixtures = [replace(layer, mlp=mixture) for layer in layers]
    return with_windows({**hf, "layer_types": None}, mixtures, lambda layer: True)


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    layers=mixtral_layers,
    defaults=DEFAULTS,
    weight_names=WEIGHT_NAMES + EXPERT_NAMES[3:] + HUB_NAMES,
)
