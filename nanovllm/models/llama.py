"""Llama 2 and 3 (arXiv:2407.21783): the plain decoder; biases where the config says so."""

from nanovllm.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    @staticmethod
    def config_flags(attention_bias: bool, mlp_bias: bool) -> dict[str, bool]:
        return {"qkv_bias": attention_bias, "o_bias": attention_bias, "mlp_bias": mlp_bias}
