"""Multimodal checkpoints, of which only the text model is loaded."""

from collections.abc import Mapping
from typing import Any

# Architectures or model types, and the model type of their text model if the config does not state
# it.
TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
}
# Prefixes of the text model's tensor names, as releases of transformers before 4.52 and from it on
# write them, and their replacements.
PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
VISION = (
    "vision_tower.*",
    "multi_modal_projector.*",
    "model.vision_tower.*",
    "model.multi_modal_projector.*",
)
# Fields outside of ``text_config`` that apply to the text model, unless it has its own value.
SHARED_FIELDS = ("dtype", "torch_dtype", "tie_word_embeddings")


def text_config(architecture: str, raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the model type and the config of a multimodal checkpoint's text model.

    Raises:
        ValueError: ``text_config`` is missing.
    """
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"the config of a {architecture} needs a text_config, got {text!r:.80}")
    shared = {name: raw[name] for name in SHARED_FIELDS if raw.get(name) is not None}
    fields = {**shared, **{name: value for name, value in text.items() if value is not None}}
    # These override the text model's.
    for name in ("eos_token_id", "quantization_config", "compression_config"):
        if raw.get(name) is not None:
            fields[name] = raw[name]
    # Releases of transformers write it to either config, and the default to the other one.
    if raw.get("tie_word_embeddings"):
        fields["tie_word_embeddings"] = raw["tie_word_embeddings"]
    return str(text.get("model_type") or TEXT_MODELS[architecture]), fields
