"""Phi-3 (arXiv:2404.14219), Phi-3.5 and Phi-4: fused projections, partial RoPE and LongRoPE."""

from typing import Any

from nanovllm.models.family import Family, equal_layers, with_windows
from nanovllm.models.model_config import LayerSpec
from nanovllm.models.rope import read_rope, rope_parameters, type_of


def phi3_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    rope = rope_parameters(hf)
    if type_of(rope) in ("su", "yarn"):  # early names of LongRoPE
        rope = {**rope, "rope_type": "longrope"}
    flags = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), False)  # whatever the config says
    layers = equal_layers(hf, rope=read_rope(hf, rope, interleaved=False), **flags)
    return with_windows({**hf, "layer_types": None}, layers, lambda layer: True)


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    layers=phi3_layers,
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
    },
    weight_names=(),  # qkv_proj and gate_up_proj are fused in the checkpoint too
)
