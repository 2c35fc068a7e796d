"""Qwen3 (arXiv:2505.09388): the plain decoder, with an RMSNorm on each query and key head."""

from nanovllm.models.family import Family, equal_layers
from nanovllm.models.qwen2 import DEFAULTS

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    layers=lambda hf: equal_layers(hf, qk_norm=True, mlp_bias=False),
    defaults={"head_dim": 128, **DEFAULTS},
)
