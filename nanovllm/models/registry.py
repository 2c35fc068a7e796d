"""The supported model families."""

from nanovllm.models.family import Family
from nanovllm.models.gemma import GEMMA2, GEMMA3
from nanovllm.models.glm import GLM, GLM4
from nanovllm.models.gpt_oss import GPT_OSS
from nanovllm.models.granite import GRANITE, GRANITE_MOE
from nanovllm.models.llama import LLAMA
from nanovllm.models.mistral import MINISTRAL3, MISTRAL, MIXTRAL
from nanovllm.models.multimodal import TEXT_MODELS
from nanovllm.models.olmo import OLMO2, OLMO3, OLMOE
from nanovllm.models.phi3 import PHI3
from nanovllm.models.qwen2 import QWEN2
from nanovllm.models.qwen3 import QWEN3, QWEN3_MOE
from nanovllm.models.smollm3 import SMOLLM3

FAMILIES = (
    *(QWEN3, QWEN2, LLAMA, MISTRAL, MINISTRAL3, SMOLLM3, QWEN3_MOE, MIXTRAL, OLMOE),
    *(GEMMA2, GEMMA3, GRANITE, GRANITE_MOE, GLM, GLM4, OLMO2, OLMO3, PHI3, GPT_OSS),
)
BY_NAME = {name: each for each in FAMILIES for name in (each.architecture, each.model_type)}


def get_family(name: str) -> Family:
    """Returns the family with this architecture or model type.

    Raises:
        ValueError: it is not supported. The message lists the supported architectures.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    supported = ", ".join([*(family.architecture for family in FAMILIES), *TEXT_MODELS])
    raise ValueError(f"architecture {name!r} is not supported; supported are {supported}")
