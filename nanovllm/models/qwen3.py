"""Qwen3 (arXiv:2505.09388): the decoder with queries and keys normalised per head."""

from typing import ClassVar

from nanovllm.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderMLP,
    DecoderModel,
)

# Its names for the shared parts: what sets it apart is a flag.
Qwen3Attention = DecoderAttention
Qwen3MLP = DecoderMLP
Qwen3DecoderLayer = DecoderLayer
Qwen3Model = DecoderModel


class Qwen3ForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = {
        "head_dim": 128,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
    }

    @staticmethod
    def config_flags(attention_bias: bool, mlp_bias: bool) -> dict[str, bool]:
        return {"qk_norm": True, "qkv_bias": attention_bias, "o_bias": attention_bias}
