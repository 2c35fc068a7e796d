"""Mistral (arXiv:2310.06825): the plain decoder, within its sliding window."""

from typing import ClassVar

from nanovllm.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    }

    @staticmethod
    def config_flags(attention_bias: bool, mlp_bias: bool) -> dict[str, bool]:
        return {}
