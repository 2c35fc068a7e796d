"""Qwen3 (arXiv:2505.09388): Llama's architecture, with an RMSNorm on each query and key head."""

from nanovllm.models.family import Family
from nanovllm.models.qwen2 import DEFAULTS, qwen_layers

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    layers=lambda hf: qwen_layers(hf, qk_norm="head"),
    defaults={"head_dim": 128, **DEFAULTS},
)
