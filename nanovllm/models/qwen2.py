"""Qwen2 and Qwen2.5 (arXiv:2407.10671): the plain decoder, with biases for q, k and v."""

from nanovllm.models.family import Family, equal_layers

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
}
QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    layers=lambda hf: equal_layers(hf, qkv_bias=True, o_bias=False, mlp_bias=False),
    defaults=DEFAULTS,
)
