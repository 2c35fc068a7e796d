"""Qwen2 and Qwen2.5 (arXiv:2407.10671): the decoder with biases on q, k and v."""

from nanovllm.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    @staticmethod
    def config_flags(attention_bias: bool, mlp_bias: bool) -> dict[str, bool]:
        return {"qkv_bias": True}
