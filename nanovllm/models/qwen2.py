"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama's architecture, with biases for q, k and v."""

from typing import Any

from nanovllm.models.family import Family, equal_layers, with_windows
from nanovllm.models.model_config import LayerSpec

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def qwen_layers(hf: dict[str, Any], **flags: Any) -> list[LayerSpec]:
    """Returns identical layers, but those from index ``max_window_layers`` on may have a window."""
    first = hf["max_window_layers"]
    if type(first) is not int or first < 0:
        raise ValueError(f"max_window_layers must be an int of at least 0, got {first!r:.80}")
    layers = equal_layers(hf, mlp_bias=False, **flags)
    return with_windows(hf, layers, lambda layer: layer >= first)


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    layers=lambda hf: qwen_layers(hf, qkv_bias=True, o_bias=False),
    defaults=DEFAULTS,
)
