"""Qwen3 (arXiv:2505.09388): the decoder with queries and keys normalised per head."""

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
    @staticmethod
    def config_flags(attention_bias: bool, mlp_bias: bool) -> dict[str, bool]:
        return {"qk_norm": True, "qkv_bias": attention_bias, "o_bias": attention_bias}
