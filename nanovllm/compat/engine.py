"""vLLM's ``LLMEngine`` and config objects, for programs that use more than ``LLM``'s methods."""

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoints.checkpoint import Checkpoint, open_checkpoint
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt
from nanovllm.vllm_arguments import translate

if TYPE_CHECKING:
    import torch

    from nanovllm.compat.llm import LLM

RPC_METHODS = ("reload_weights",)
# Fields of a ModelConfig in which a checkpoint may differ from the engine's: how it stores the
# weights, and a limit that the engine has set at start-up.
STORAGE_FIELDS = ("dtype", "weight_names", "max_position_embeddings", "quantization")


class EngineConfig(SimpleNamespace):
    """All settings of an engine, in place of vLLM's separate config objects.

    It has all fields of ``nanovllm.config.Config``, and further attributes with vLLM's names.

    Attributes:
        model: the ``model`` argument of ``LLM``.
        tokenizer: the path or hub id of the tokenizer.
        dtype: the dtype of weights and activations.
        max_model_len: the maximum number of prompt and completion tokens of a sequence.
        seed: the sampler's seed.
        max_logprobs: the maximum number of log-probabilities per token that a request may ask for.
    """

    def get_vocab_size(self) -> int:
        """Returns the number of logits."""
        return self.vocab_size

    @property
    def hf_config(self) -> Any:
        """The checkpoint's config as a transformers object."""
        from transformers import AutoConfig

        if os.path.isfile(self.model):
            folder, file = os.path.split(self.model)
            return AutoConfig.from_pretrained(folder, gguf_file=file)
        return AutoConfig.from_pretrained(self.model, trust_remote_code=False)


class LoadedModel:
    """The model of an engine, with the method that trainers written for vLLM call on it."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm

    def load_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]]) -> None:
        """Replaces some or all weights, as ``LLM.load_weights`` does."""
        self._llm.load_weights(weights)


class LLMEngine:
    """The engine of an ``LLM``, with the methods of vLLM's ``LLMEngine``.

    It has no state of its own, so all ``LLMEngine`` objects of an ``LLM`` are equivalent.
    """

    def __init__(self, llm: "LLM") -> None:
        self.llm = llm
        self.engine_core = SimpleNamespace(shutdown=llm.close)
        # Trainers read model_executor.driver_worker.model_runner.model, other programs delete it.
        model_runner = SimpleNamespace(model=LoadedModel(llm))
        driver_worker = SimpleNamespace(model_runner=model_runner)
        self.model_executor = SimpleNamespace(driver_worker=driver_worker)

    @classmethod
    def from_engine_args(cls, engine_args: Any, usage_context: Any = None) -> "LLMEngine":
        """Creates an engine with the arguments in an ``EngineArgs``."""
        from nanovllm.compat.llm import LLM

        return cls(LLM.from_engine_args(engine_args))

    @property
    def model_config(self) -> EngineConfig:
        llm, config = self.llm, self.llm.config
        settings = {
            **asdict(config),
            "tokenizer": config.tokenizer or config.model,
            "dtype": llm.model_runner.dtype,
            "max_num_seqs": llm.scheduler.max_num_seqs,
            "max_model_len": llm.scheduler.max_len,
            "vocab_size": llm.preparer.encoder.vocab_size,
            "tokenizer_mode": "auto",
            "trust_remote_code": False,
            "runner_type": "generate",
            "block_size": config.block_size,
            "num_gpu_blocks": llm.model_runner.num_kvcache_blocks,
            "world_size": config.tensor_parallel_size,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
        }
        return EngineConfig(**settings)

    @property
    def vllm_config(self) -> SimpleNamespace:
        """The settings, as in vLLM's ``VllmConfig``."""
        kinds = ("model_config", "cache_config", "parallel_config", "scheduler_config")
        return SimpleNamespace(**dict.fromkeys(kinds, self.model_config), lora_config=None)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method on all ranks.

        Args:
            method: "reload_weights", which loads all weights again from the checkpoint's files. It
                takes ``weights_path``, the folder or file of a checkpoint of the same model to
                read instead.
            timeout: ignored.
            args, kwargs: the method's arguments.

        Returns:
            For each rank what the method returned.

        Raises:
            ValueError: any other method, a checkpoint whose config describes another model (no
                weight is changed), a checkpoint that lacks tensors (the others are loaded), or an
                error of ``LLM.load_weights``.
        """
        if method not in RPC_METHODS:
            raise ValueError(
                f"collective_rpc cannot call {method!r:.80}: the supported methods are "
                f"{', '.join(RPC_METHODS)}"
            )
        result = getattr(self, f"_{method}")(*args, **(kwargs or {}))
        return [result] * self.llm.get_world_size()

    def _reload_weights(self, weights_path: str | os.PathLike[str] | None = None) -> None:
        path = self.llm.model_path if weights_path is None else os.fspath(weights_path)
        self.llm.load_weights(self._all_weights(open_checkpoint(path), path))

    def _all_weights(
        self, checkpoint: Checkpoint, path: str
    ) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Yields the tensors of a checkpoint that replace all weights.

        Raises:
            ValueError: its config describes another model, before the first tensor is yielded; or
                it lacks tensors, after the last one.
        """
        from nanovllm.checkpoints.weights import LoadingPass, some_of
        from nanovllm.engine.startup import keeps_fp8
        from nanovllm.rl.weights import live_model

        runner = self.llm.model_runner
        ours, theirs = asdict(runner.model_config), asdict(checkpoint.config)
        names = theirs.keys() - set(STORAGE_FIELDS)
        different = sorted(name for name in names if not _same(ours[name], theirs[name]))
        if different:
            raise ValueError(
                f"{path} is a checkpoint of another model: its config differs from the engine's in "
                f"{', '.join(different)}"
            )
        given = LoadingPass(live_model(runner).table)
        skipped = checkpoint.config.weight_names.skipped
        for name, tensor in checkpoint.tensors(packs_fp8=keeps_fp8(runner, checkpoint)):
            slot = given.table.find(name)
            if slot is not None:
                given.take(slot)
            elif any(fnmatchcase(name, pattern) for pattern in skipped):
                continue  # the engine's own checkpoint may not skip it
            yield name, tensor
        if missing := given.missing():
            raise ValueError(f"{path} lacks {some_of(missing)}")

    def get_tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, also as its own attribute ``tokenizer``, where scripts for earlier
        versions of vLLM look for it."""
        found = self.get_tokenizer()
        if found is not None:
            vars(found).setdefault("tokenizer", found)
        return found

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
        """Adds a request with one prompt.

        Args:
            request_id: the ``request_id`` of the request's outputs. Several requests may have the
                same, as in vLLM.
            prompt: as in ``LLM.generate``.
            params: the sampling parameters.
            arrival_time, trace_headers, priority: ignored.
            lora_request, tokenization_kwargs: accepted only at values that have no effect.

        Raises:
            TypeError, ValueError: an invalid argument, as in ``LLM.add_request``.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r:.80}")
        options = {"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs}
        translate("generate", options)
        self.llm._add_with_id(request_id, prompt, params)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Runs one step. Returns the output so far of each request that has a new token, with the
        whole text. A request with ``output_kind=FINAL_ONLY`` is returned only when it finishes."""
        return self.llm._step_with_ids()

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Aborts requests. Ignores ids of finished or unknown requests."""
        caller_ids = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        self.llm._abort_with_ids(caller_ids)

    def sleep(self, level: int = 1) -> None:
        self.llm.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> bool:
        return self.llm.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self.llm.is_sleeping()

    def has_unfinished_requests(self) -> bool:
        return not self.llm.is_finished()

    def get_num_unfinished_requests(self) -> int:
        return self.llm.num_unfinished_requests

    def reset_prefix_cache(self, *args: bool, **kwargs: bool) -> bool:
        return self.llm.reset_prefix_cache(*args, **kwargs)


def _same(ours: Any, theirs: Any) -> bool:
    """Whether parts of two configs are equal. Floats are rounded to fp32 in GGUF files."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return bool(ours == theirs)
