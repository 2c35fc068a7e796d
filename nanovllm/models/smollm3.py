"""SmolLM3 (HuggingFaceTB/SmolLM3-3B): Llama's architecture, without RoPE in every fourth layer."""

from typing import Any

from nanovllm.models.family import Family, equal_layers, with_attention, with_windows
from nanovllm.models.model_config import LayerSpec

DEFAULTS: dict[str, Any] = {"num_key_value_heads": 4, "max_position_embeddings": 32768}
DEFAULTS |= {"rope_theta": 2e6, "tie_word_embeddings": True, "eos_token_id": 128001}
DEFAULTS |= {"no_rope_layers": None, "no_rope_layer_interval": 4}
DEFAULTS |= {"use_sliding_window": False, "layer_types": None}


def smollm3_layers(hf: dict[str, Any]) -> list[LayerSpec]:
    layer, num_layers = equal_layers(hf)[0], hf["num_hidden_layers"]
    # Despite the field's name, 1 marks a layer with RoPE.
    every = hf["no_rope_layer_interval"]
    has_rope = hf.get("no_rope_layers", [int(i % every > 0) for i in range(1, num_layers + 1)])
    if not isinstance(has_rope, list) or any(rope not in (0, 1) for rope in has_rope):
        raise ValueError(f"no_rope_layers must be a list of 0 and 1, got {has_rope!r:.80}")
    if len(has_rope) < num_layers:
        raise ValueError(f"no_rope_layers has {len(has_rope)} entries for {num_layers} layers")
    no_rope = with_attention(layer, rope=None)
    layers = [layer if rope else no_rope for rope in has_rope[:num_layers]]
    return with_windows(hf, layers, lambda layer: not has_rope[layer])


SMOLLM3 = Family("SmolLM3ForCausalLM", "smollm3", smollm3_layers, DEFAULTS)
