"""GLM-4 (arXiv:2406.12793): interleaved RoPE, in half of each head.

GLM-4-0414 also has norms after attention and MLP.
"""

from dataclasses import replace
from typing import Any

from nanovllm.models.family import QKV_NAMES, Family, equal_layers, with_fields
from nanovllm.models.model_config import LayerSpec
from nanovllm.models.rope import read_rope

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}


def glm_layers(hf: dict[str, Any], output_norms: bool = False) -> list[LayerSpec]:
    rope = read_rope(hf, interleaved=True)
    layers = equal_layers(hf, rope=rope, o_bias=False, mlp_bias=False)
    return with_fields(layers, output_norms=output_norms)


# gate_up_proj is fused in the checkpoint too.
GLM = Family("GlmForCausalLM", "glm", glm_layers, DEFAULTS, QKV_NAMES)
GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    layers=lambda hf: glm_layers(hf, output_norms=True),
)
