"""vLLM's engine object and its configs, for programs that go beyond ``generate`` and ``chat``."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.compat.arguments import translate
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt

if TYPE_CHECKING:
    from nanovllm.compat.llm import LLM


@dataclass(frozen=True)
class ModelConfig:
    """Facts about the model, under vLLM's names.

    Attributes:
        model: as it was given to ``LLM``.
        tokenizer: where the tokenizer is from, named like a model.
        dtype: of the weights and activations.
        max_model_len: longest prompt + completion, in tokens.
        seed: of the sampler.
        max_logprobs: most log-probabilities per token that a request may ask for.
    """

    model: str
    tokenizer: str
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    seed: int
    max_logprobs: int
    skip_tokenizer_init: bool
    tokenizer_mode: str = "auto"
    trust_remote_code: bool = False
    runner_type: str = "generate"

    def get_vocab_size(self) -> int:
        """Number of the model's logits."""
        return self.vocab_size

    @property
    def hf_config(self) -> Any:
        """The checkpoint's config, as transformers reads it."""
        from transformers import AutoConfig

        if os.path.isfile(self.model):
            folder, file = os.path.split(self.model)
            return AutoConfig.from_pretrained(folder, gguf_file=file)
        return AutoConfig.from_pretrained(self.model, trust_remote_code=False)


class LLMEngine:
    """The engine of an ``LLM``, with the methods of vLLM's class of this name.

    It holds nothing but the ``LLM``: any number of these objects are the same engine.
    """

    def __init__(self, llm: "LLM") -> None:
        self.llm = llm
        self.model_executor = llm.model_runner  # programs delete it before they delete the LLM

    @classmethod
    def from_engine_args(cls, engine_args: Any, usage_context: Any = None) -> "LLMEngine":
        """An engine with the arguments that an ``EngineArgs`` holds."""
        from nanovllm.compat.llm import LLM

        return cls(LLM.from_engine_args(engine_args))

    @property
    def model_config(self) -> ModelConfig:
        config = self.llm.config
        return ModelConfig(
            model=config.model,
            tokenizer=config.tokenizer or config.model,
            dtype=self.llm.model_runner.dtype,
            max_model_len=self.llm.scheduler.max_len,
            vocab_size=self.llm.prompt_encoder.vocab_size,
            seed=config.seed,
            max_logprobs=config.max_logprobs,
            skip_tokenizer_init=config.skip_tokenizer_init,
        )

    @property
    def vllm_config(self) -> SimpleNamespace:
        """The settings in vLLM's groups."""
        config, model_config = self.llm.config, self.model_config
        return SimpleNamespace(
            model_config=model_config,
            cache_config=SimpleNamespace(
                block_size=config.kvcache_block_size,
                num_gpu_blocks=self.llm.model_runner.num_kvcache_blocks,
                enable_prefix_caching=config.enable_prefix_caching,
                gpu_memory_utilization=config.gpu_memory_utilization,
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=config.tensor_parallel_size,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                world_size=config.tensor_parallel_size,
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=model_config.max_model_len,
            ),
            lora_config=None,
        )

    @property
    def tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    def get_tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
    ) -> str:
        """Queues one prompt.

        Args:
            request_id: the ``request_id`` of its results.
            prompt: as in ``LLM.generate``.
            params: how to complete it.
            arrival_time, trace_headers, priority: without effect.
            lora_request, tokenization_kwargs: refused, as by ``LLM.generate``.

        Raises:
            TypeError, ValueError: a bad argument; as ``LLM.add_request``.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r:.80}")
        options = {"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs}
        translate("generate", options)
        self.llm._add_named(request_id, prompt, params)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Takes one step, and returns what there is of each request that has grown: all of its
        text so far, unless its ``output_kind`` asks for finished results only."""
        return self.llm._step_named()

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Drops requests; ids of none that is unfinished are ignored."""
        names = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        self.llm._abort_named(names)

    def has_unfinished_requests(self) -> bool:
        return not self.llm.is_finished()

    def get_num_unfinished_requests(self) -> int:
        return self.llm.num_unfinished_requests

    def reset_prefix_cache(self) -> bool:
        return self.llm.reset_prefix_cache()
