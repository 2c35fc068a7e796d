"""Qwen2 and Qwen2.5 (arXiv:2407.10671): the decoder with biases on q, k and v."""

from typing import ClassVar

from nanovllm.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
    }

    @staticmethod
    def config_flags(attention_bias: bool, mlp_bias: bool) -> dict[str, bool]:
        return {"qkv_bias": True}
