"""OLMo 2 (arXiv:2501.00656) and OLMo 3: norms after attention and MLP, q/k norms over all heads.

In OLMo 3, three of four layers have a sliding window, and RoPE is scaled in the fourth only.
"""

from dataclasses import replace
from typing import Any

from nanovllm.models.family import (
    OUTPUT_NORM_NAMES,
    WEIGHT_NAMES,
    Family,
    equal_layers,
    with_layer_types,
)
from nanovllm.models.model_config import LayerSpec

DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}
COMMON: dict[str, Any] = {
    "weight_names": WEIGHT_NAMES + OUTPUT_NORM_NAMES[:2],
    "numerics": lambda hf: {"norm_in_fp32": True},
}


def olmo_layers(hf: dict[str, Any], **flags: Any) -> list[LayerSpec]:
    layer = equal_layers(hf, qk_norm="all_heads", mlp_bias=False, **flags)[0]
    return [replace(layer, input_norms=False, output_norms=True)] * hf["num_hidden_layers"]


def olmo3_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    layers = olmo_layers(hf, rope=None)
    return with_layer_types(hf, layers, lambda layer: layer % 4 != 3, sliding_theta=5e5)


OLMO2 = Family("Olmo2ForCausalLM", "olmo2", olmo_layers, DEFAULTS, **COMMON)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    "olmo3",
    olmo3_layers,
    {**DEFAULTS, "rope_theta": 5e5, "sliding_window": 4096, "layer_types": None},
    **COMMON,
)
