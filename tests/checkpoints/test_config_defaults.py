"""A config.json is read as transformers reads it, whatever it leaves out."""

import json
from copy import deepcopy
from typing import Any

import pytest
from transformers import AutoConfig

from nanovllm.checkpoints.checkpoint import SafetensorsCheckpoint
from nanovllm.models.registry import FAMILIES, get_family

FULL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": [3, 4],
    "torch_dtype": "bfloat16",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LEFT_OUT = "num_key_value_heads head_dim max_position_embeddings rms_norm_eps hidden_act "
LEFT_OUT += "attention_bias mlp_bias tie_word_embeddings eos_token_id"
ADDED = [
    {"sliding_window": 128},
    {"sliding_window": None},
    {"sliding_window": 128, "use_sliding_window": True},
    {"sliding_window": 128, "use_sliding_window": False},
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": None},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 256}},
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0}},
    {
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
]
CONFIGS = [{name: FULL[name] for name in FULL if name != left} for left in LEFT_OUT.split()]
CONFIGS += [{**FULL, **added} for added in ADDED]


SMOLLM3 = [
    {"no_rope_layers": [1, 0, 1]},
    {"no_rope_layers": [0, 1, 1, 0, 1]},
    {"no_rope_layers": None, "no_rope_layer_interval": 2},
    {"no_rope_layer_interval": 1},
    {"no_rope_layers": [1, 0, 1], "layer_types": ["full_attention"] * 3},
]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
OWN = {
    "smollm3": SMOLLM3,
    "gemma2": [
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        {"query_pre_attn_scalar": 144, "layer_types": ["full_attention"] * 3},
    ],
    "gemma3_text": [
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window_pattern": 2},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 5e5},
        {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 5e5}}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ],
    "olmo3": [{"rope_scaling": YARN, "rope_theta": 5e5}, {"layer_types": ["full_attention"] * 3}],
    "ministral3": [{"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.2}}],
    "granite": [{"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "logits_scaling": 8}],
    "qwen3_moe": [
        {"num_experts": 16, "norm_topk_prob": True, "moe_intermediate_size": 24},
        {"num_local_experts": 16, "num_experts_per_tok": 3},
        {"mlp_only_layers": [0, 2], "decoder_sparse_step": 2},
    ],
    "granitemoe": [{"num_local_experts": 40, "residual_multiplier": 0.2}],
    "gpt_oss": [{"swiglu_limit": 5.0}, {"layer_types": ["full_attention"] * 3}],
    "glm": [{"partial_rotary_factor": 0.25}, {"attention_bias": True}],
    "phi3": [
        {
            "rope_scaling": {"type": kind, "short_factor": [1.5] * 4, "long_factor": [4.0] * 4},
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 1024,
            "num_attention_heads": 8,
        }
        for kind in ("longrope", "yarn")
    ],
    "qwen2": [{"use_sliding_window": True}, {"use_sliding_window": True, "max_window_layers": 2}],
    "llama": [{"rope_scaling": YARN}, {"rope_scaling": {**YARN, "mscale": 2, "mscale_all_dim": 1}}],
}


def is_valid(model_type: str, config: dict[str, Any]) -> bool:
    """Whether transformers itself accepts it."""
    scaling = {**config.get("rope_parameters", {}), **(config.get("rope_scaling") or {})}
    if model_type == "phi3":
        return scaling.get("rope_type", scaling.get("type", "default")) == "default"
    if model_type in ("gemma3_text", "olmo3") and "rope_parameters" in config and scaling:
        return "rope_scaling" not in config
    if model_type == "gpt_oss" and not config.get("use_sliding_window", True):
        return False
    windowed = model_type in ("gemma2", "gemma3_text", "gpt_oss", "olmo3")
    return not windowed or config.get("sliding_window", 1) is not None


CASES = [
    (family, config)
    for family in FAMILIES
    for config in CONFIGS
    if is_valid(family.model_type, config)
]
CASES += [(get_family(name), {**FULL, **added}) for name, many in OWN.items() for added in many]


@pytest.mark.parametrize(
    ("family", "config"), CASES, ids=lambda value: getattr(value, "model_type", "")
)
def test_it_is_read_as_transformers_reads_it(family, config, tmp_path):
    raw = {"architectures": [family.architecture], **config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = SafetensorsCheckpoint(tmp_path)
    # A copy, because transformers changes the parameters of RoPE in place.
    hf = AutoConfig.for_model(family.model_type, **deepcopy(config)).to_dict()
    assert ours.config == family.read(hf)
    eos = hf["eos_token_id"]
    assert ours.eos_token_ids == set(eos if isinstance(eos, list) else [eos] if eos else [])


def test_layers_without_rope_are_transformers_own(tmp_path):
    for added in SMOLLM3:
        raw = {"architectures": ["SmolLM3ForCausalLM"], **FULL, **added}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        layers = SafetensorsCheckpoint(tmp_path).config.layers
        hf = AutoConfig.for_model("smollm3", **FULL, **added)
        assert [layer.attention.rope is not None for layer in layers] == [
            bool(rope) for rope in hf.no_rope_layers[:3]
        ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts must be a positive int up to 1024, got 0"),
        ({"num_experts": "8"}, "num_experts must be a positive int"),
        ({"num_experts": 10**9}, "num_experts must be a positive int"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok must be .* up to 128, got 129"),
        ({"moe_intermediate_size": 1.5}, "moe_intermediate_size must be"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive int"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers"),
    ],
    ids=str,
)
def test_invalid_mixtures_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        get_family("qwen3_moe").read({**FULL, **changes})
