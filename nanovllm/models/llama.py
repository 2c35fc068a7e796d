"""Llama 2 and 3 (arXiv:2407.21783): the plain decoder; biases where the config says so."""

from typing import ClassVar

from nanovllm.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = {"max_position_embeddings": 2048, "eos_token_id": 2}

    @staticmethod
    def config_flags(attention_bias: bool, mlp_bias: bool) -> dict[str, bool]:
        return {"qkv_bias": attention_bias, "o_bias": attention_bias, "mlp_bias": mlp_bias}
