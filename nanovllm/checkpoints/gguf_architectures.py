"""llama.cpp's architectures: their names of tensors and metadata, and what their files leave out.

llama.cpp stacks the weights of all experts in one tensor: one for gate, one for up, one for down.
Each is read expert by expert: ``{{expert}}`` in a name is filled in when the tensor is split.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from nanovllm.models.experts import DOWN, EXPERT, EXPERT_NAMES, GATE_UP
from nanovllm.models.family import ATTENTION
from nanovllm.models.model_config import ModelConfig, MoESpec

# The names of modules in llama.cpp and in transformers, the same for all architectures.
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{layer}.attn_norm": "model.layers.{layer}.input_layernorm",
    "blk.{layer}.attn_q": "model.layers.{layer}.self_attn.q_proj",
    "blk.{layer}.attn_k": "model.layers.{layer}.self_attn.k_proj",
    "blk.{layer}.attn_v": "model.layers.{layer}.self_attn.v_proj",
    "blk.{layer}.attn_output": "model.layers.{layer}.self_attn.o_proj",
    "blk.{layer}.attn_q_norm": "model.layers.{layer}.self_attn.q_norm",
    "blk.{layer}.attn_k_norm": "model.layers.{layer}.self_attn.k_norm",
    "blk.{layer}.ffn_norm": "model.layers.{layer}.post_attention_layernorm",
    "blk.{layer}.ffn_gate": "model.layers.{layer}.mlp.gate_proj",
    "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.up_proj",
    "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.down_proj",
}
MIXTURE = {
    "blk.{layer}.ffn_gate_inp": "model.layers.{layer}.mlp.gate",
    "blk.{layer}.ffn_gate_exps": "model.layers.{layer}.mlp.experts.{{expert}}.gate_proj",
    "blk.{layer}.ffn_up_exps": "model.layers.{layer}.mlp.experts.{{expert}}.up_proj",
    "blk.{layer}.ffn_down_exps": "model.layers.{layer}.mlp.experts.{{expert}}.down_proj",
}
# For architectures that have a tensor post_attention_norm, instead of ffn_norm, for transformers'
# post_attention_layernorm. In gpt-oss, that norm precedes the MLP. In the others it follows
# attention.
OUTPUT_NORMS = {
    "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "blk.{layer}.post_ffw_norm": "model.layers.{layer}.post_feedforward_layernorm",
    "blk.{layer}.ffn_norm": "model.layers.{layer}.pre_feedforward_layernorm",
}
SINKS = {"blk.{layer}.attn_sinks": "model.layers.{layer}.self_attn.sinks"}
FUSED = {
    "blk.{layer}.attn_qkv": "model.layers.{layer}.self_attn.qkv_proj",
    "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.gate_up_proj",
}
# The rows of WeightNames for experts and sinks, in place of the family's.
MOE_ROWS = (
    *EXPERT_NAMES[:3],
    (EXPERT + "gate_proj.bias", GATE_UP + "_bias", 0),
    (EXPERT + "up_proj.bias", GATE_UP + "_bias", 1),
    (EXPERT + "down_proj.bias", DOWN + "_bias"),
    (ATTENTION + "sinks.weight", ATTENTION + "attn.sinks"),
)
ROUTER_AND_EXPERTS = (".mlp.gate.", ".mlp.experts.")
ROPE_DIVISORS = "rope_freqs.weight"
# LongRoPE's tensors by the field of the config.
LONGROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}


class Architecture(NamedTuple):
    """One of llama.cpp's architectures.

    Attributes:
        tokenizer: the architecture under which transformers loads the tokenizer. It differs where
            some releases of transformers do not know the architecture itself.
        reorders: whether llama.cpp reorders the rows of q and k.
        family: the model type in transformers, if the name differs.
        names: names of modules that TENSOR_NAMES lacks, or that differ from it.
        adds_1: whether the norms' weights are stored with 1 added.
        floats, ints: fields of the config, and the metadata that they are read from. The metadata
            must be in the file.
        constants: fields of the config that llama.cpp's code fixes.
        rope: RoPE parameters that llama.cpp's files leave out.
    """

    tokenizer: str
    reorders: bool = False
    family: str | None = None
    names: Mapping[str, str] = {}
    adds_1: bool = False
    floats: Mapping[str, str] = {}
    ints: Mapping[str, str] = {}
    constants: Mapping[str, Any] = {}
    rope: Mapping[str, Any] = {}


GRANITE_FIELDS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
GEMMA2_FIELDS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
WINDOW = {"sliding_window": "attention.sliding_window"}
EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
# llama.cpp's names are also model types in transformers, unless ``family`` says otherwise. "llama"
# stands for Llama, Mistral and Mixtral.
ARCHITECTURES = {
    "llama": Architecture("llama", reorders=True, names=MIXTURE),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture(
        "qwen3",
        family="qwen3_moe",
        names=MIXTURE,
        ints={**EXPERTS, "moe_intermediate_size": "expert_feed_forward_length"},
        constants={"norm_topk_prob": True},
    ),
    "smollm3": Architecture("llama", reorders=True),
    "gemma2": Architecture(
        "gemma2", names=OUTPUT_NORMS, adds_1=True, floats=GEMMA2_FIELDS, ints=WINDOW
    ),
    "gemma3": Architecture(
        "gemma3", family="gemma3_text", names=OUTPUT_NORMS, adds_1=True, ints=WINDOW
    ),
    "granite": Architecture("llama", reorders=True, floats=GRANITE_FIELDS),
    "granitemoe": Architecture(
        "llama", reorders=True, names=MIXTURE, floats=GRANITE_FIELDS, ints=EXPERTS
    ),
    "olmo2": Architecture("qwen2", names=OUTPUT_NORMS),
    "olmoe": Architecture(
        "qwen2", names=MIXTURE, ints=EXPERTS, constants={"norm_topk_prob": False}
    ),
    "phi3": Architecture("llama", names=FUSED),
    "gpt-oss": Architecture(
        "llama",
        family="gpt_oss",
        names={**OUTPUT_NORMS, **MIXTURE, **SINKS},
        ints={**EXPERTS, **WINDOW},
        rope={"truncate": False},
    ),
}


def with_gguf_names(config: ModelConfig) -> ModelConfig:
    """Returns the config with the names under which ``GGUFCheckpoint`` yields experts and sinks."""
    if not any(isinstance(layer.mlp, MoESpec) for layer in config.layers):
        return config
    rows = tuple(
        row
        for row in config.weight_names.rows
        if not any(part in row[1] for part in ROUTER_AND_EXPERTS)
    )
    return replace(config, weight_names=replace(config.weight_names, rows=rows + MOE_ROWS))
