"""Mistral (arXiv:2310.06825): the plain decoder, for contexts up to the sliding window's length."""

from nanovllm.models.family import Family, equal_layers

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    layers=lambda hf: equal_layers(hf, qkv_bias=False, o_bias=False, mlp_bias=False),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
)
