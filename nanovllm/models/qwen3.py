"""Qwen3 (arXiv:2505.09388): the decoder with queries and keys normalised per head."""

from nanovllm.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderMLP,
    DecoderModel,
)


class Qwen3Attention(DecoderAttention):
    """Attention with an RMSNorm over each query and key head before the rotation."""


class Qwen3MLP(DecoderMLP):
    """The decoder's gated MLP."""


class Qwen3DecoderLayer(DecoderLayer):
    attention_class = Qwen3Attention
    mlp_class = Qwen3MLP


class Qwen3Model(DecoderModel):
    layer_class = Qwen3DecoderLayer


class Qwen3ForCausalLM(DecoderForCausalLM):
    model_class = Qwen3Model

    @staticmethod
    def config_flags(attention_bias: bool, mlp_bias: bool) -> dict[str, bool]:
        return {"qk_norm": True, "qkv_bias": attention_bias, "o_bias": attention_bias}
