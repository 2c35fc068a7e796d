"""Which class serves which architecture."""

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.mistral import MistralForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[DecoderForCausalLM]] = {
    model.__name__: model
    for model in (Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM, MistralForCausalLM)
}


def get_model_class(architecture: str) -> type[DecoderForCausalLM]:
    """Raises ValueError, with the list of what is served, for any other architecture."""
    if architecture not in MODELS:
        raise ValueError(
            f"architecture {architecture!r} is not served; those served are {', '.join(MODELS)}"
        )
    return MODELS[architecture]
