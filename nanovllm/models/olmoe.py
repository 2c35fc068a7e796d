"""OLMoE (arXiv:2409.02060): a mixture of experts in every layer, and an RMSNorm over all query
heads and one over all key heads."""

from dataclasses import replace
from typing import Any

from nanovllm.models.experts import EXPERT_NAMES, read_moe
from nanovllm.models.family import WEIGHT_NAMES, Family, equal_layers
from nanovllm.models.model_config import LayerSpec

DEFAULTS: dict[str, Any] = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
DEFAULTS |= {"num_experts": 64, "num_local_experts": None, "num_experts_per_tok": 8}
DEFAULTS |= {"norm_topk_prob": False, "clip_qkv": None, "eos_token_id": 50279}


def olmoe_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    if "clip_qkv" in hf:
        raise ValueError("clip_qkv is not supported: only checkpoints with clip_qkv null are")
    mixture = read_moe(hf, "intermediate_size", hf["norm_topk_prob"])
    layers = equal_layers(hf, qk_norm="all_heads", mlp_bias=False)
    return [replace(layer, mlp=mixture) for layer in layers]


OLMOE = Family("OlmoeForCausalLM", "olmoe", olmoe_layers, DEFAULTS, WEIGHT_NAMES + EXPERT_NAMES)
