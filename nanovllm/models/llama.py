"""Llama 2 and 3 (arXiv:2407.21783): the plain decoder, with the biases that the config enables."""

from nanovllm.models.family import Family, equal_layers

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    layers=equal_layers,
    defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
)
