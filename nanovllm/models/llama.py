"""Llama 2 and 3 (arXiv:2407.21783): the decoder without extras. Biases are optional."""

from nanovllm.models.family import Family, equal_layers

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    layers=equal_layers,
    defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
)
