"""Names of vLLM's modules that programs import and that nanovllm does not define elsewhere."""

import gc
import logging
import os
import random
import uuid
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from nanovllm.checkpoints.checkpoint import load_tokenizer
from nanovllm.outputs import Logprob
from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.text.prompts import Message, Prompt
from nanovllm.vllm_arguments import load_table, translate

__version__ = load_table()["vllm"]
__version_tuple__ = tuple(int(part) for part in __version__.split("."))

PromptType: TypeAlias = Prompt
ChatCompletionMessageParam: TypeAlias = Message
LogprobsOnePosition: TypeAlias = dict[int, Logprob]
PromptLogprobs: TypeAlias = list[LogprobsOnePosition | None]
SampleLogprobs: TypeAlias = list[LogprobsOnePosition]


def __getattr__(name: str) -> Any:
    if name == "TokenizerLike":
        from transformers import PreTrainedTokenizerBase

        return PreTrainedTokenizerBase
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class CompilationConfig:
    """vLLM's settings of its compiler, which have no effect here."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)


@dataclass
class LoRARequest:
    """A LoRA adapter. Programs can create one, but ``generate`` and ``chat`` refuse it."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False


@dataclass
class GuidedDecodingParams(StructuredOutputsParams):
    """The former name of StructuredOutputsParams.

    Attributes:
        backend, disable_fallback: ignored.
    """

    backend: str | None = None
    disable_fallback: bool = False


class _Unsupported:
    """A class of vLLM that programs can import, but whose constructor raises ValueError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"vLLM's {type(self).__name__} is not supported here")


class BeamSearchParams(_Unsupported):
    """vLLM's settings of beam search."""


class PoolingParams(_Unsupported):
    """vLLM's settings of pooling models."""


class Platform:
    """The type of device that engines use by default."""

    @property
    def device_type(self) -> str:
        return "cuda" if self.is_cuda() else "cpu"

    device_name = device_type

    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        return not self.is_cuda()

    def is_rocm(self) -> bool:
        return False

    is_tpu = is_xpu = is_rocm


current_platform = Platform()


class UsageContext(StrEnum):
    """vLLM's names for the code that starts an engine. They have no effect here."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def get_tokenizer(
    tokenizer_name: str | os.PathLike[str], *, trust_remote_code: bool = False, **kwargs: Any
) -> Any:
    """Loads the tokenizer of a checkpoint.

    Args:
        tokenizer_name: a checkpoint directory, a ``.gguf`` file or a hub id.
        trust_remote_code: ignored; no remote code is run.
        kwargs: vLLM's other arguments, such as ``revision``, accepted at values that have no
            effect.

    Raises:
        ValueError: the checkpoint has no tokenizer, or an option is not supported.
    """
    if options := translate("LLM", kwargs):
        raise ValueError(f"get_tokenizer: {', '.join(options)} is not supported here")
    return load_tokenizer(os.fspath(tokenizer_name))


def resolve_chat_template(
    tokenizer: Any,
    chat_template: str | None,
    tools: list[dict[str, Any]] | None,
    *,
    model_config: Any,
) -> str | None:
    """Returns the given chat template, or else the tokenizer's. Returns None without either."""
    if chat_template is None and not tokenizer.chat_template:
        return None
    return tokenizer.get_chat_template(chat_template, tools=tools)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Frees memory that PyTorch still caches for deleted engines. Their processes have ended."""
    if shutdown_ray:
        import ray

        ray.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def destroy_model_parallel() -> None:
    """Does nothing, because closing or deleting an ``LLM`` destroys its process group."""


destroy_distributed_environment = destroy_model_parallel


def set_random_seed(seed: int | None) -> None:
    """Seeds the random numbers of Python, NumPy and PyTorch. An engine's are ``LLM(seed=...)``."""
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


class Worker:
    """A process of vLLM's first engine. Trainers replace its check of GPU memory, because another
    model is on the same GPU. There is no such check here."""

    def _assert_memory_footprint_increased_during_profiling(self) -> None:
        pass


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def _refuse_server(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises ValueError, because the engine runs in the program's own process."""
    raise ValueError(
        "sending weights to a vLLM server is not supported here: give them to the engine in the "
        "trainer's own process, with LLM.load_weights (in TRL: vllm_mode='colocate')"
    )


# What trainers import at start-up and call only to send weights to a server.
get_ip = get_open_port = trainer_init = packed_nccl_broadcast_producer = _refuse_server


def random_uuid() -> str:
    """Returns 16 random hexadecimal digits."""
    return uuid.uuid4().hex[:16]
