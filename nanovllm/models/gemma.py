"""Gemma 2 (arXiv:2408.00118) and the text models of Gemma 3 (arXiv:2503.19786).

Norms stand before and after attention and MLP, and multiply by 1 + weight. Some layers have a
sliding window. Gemma 2 has softcaps, and Gemma 3 q/k norms and two rotary embeddings.
"""

import math
from dataclasses import replace
from typing import Any

from nanovllm.models.family import (
    OUTPUT_NORM_NAMES,
    WEIGHT_NAMES,
    Family,
    equal_layers,
    with_fields,
    with_layer_types,
    with_windows,
)
from nanovllm.models.model_config import LayerSpec

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "use_bidirectional_attention": None,
    "eos_token_id": 1,
}


def gemma_layers(hf: dict[str, Any], **flags: Any) -> list[LayerSpec]:
    if hf.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported, only causal attention")
    scale = hf["query_pre_attn_scalar"] ** -0.5
    layers = equal_layers(hf, scale=scale, mlp_bias=False, **flags)
    return with_fields(layers, output_norms=True)


def gemma2_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    layers = gemma_layers(hf, softcap=hf.get("attn_logit_softcapping"))
    return with_windows(hf, layers, lambda layer: layer % 2 == 0)


def gemma3_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    if hf.get("attn_logit_softcapping"):
        raise ValueError("attn_logit_softcapping is not supported in Gemma 3")
    every = hf["sliding_window_pattern"]
    layers = gemma_layers(hf, qk_norm="head", rope=None)
    theta = hf["rope_local_base_freq"]
    return with_layer_types(hf, layers, lambda layer: (layer + 1) % every != 0, theta)


def gemma_numerics(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "norm_in_fp32": True,
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(hf["hidden_size"]),
        "logits_softcap": hf.get("final_logit_softcapping"),
    }


GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    layers=gemma2_layers,
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    weight_names=WEIGHT_NAMES + OUTPUT_NORM_NAMES,
    numerics=gemma_numerics,
)
GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    layers=gemma3_layers,
    defaults={
        **DEFAULTS,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
)
