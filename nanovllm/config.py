"""Engine configuration. Creating it validates the values and touches neither disk nor device."""

import difflib
import os
import re
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

import numpy as np

DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
ATTENTION_BACKENDS = ("auto", "flash_attn_4", "flash_attn", "triton", "torch")
LOAD_FORMATS = ("auto", "dummy")
MAX_RANKS = 8
MAX_INT32 = 2**31 - 1  # the kernels use int32 for slots, tokens and positions
MAX_STEP_TOKENS, MAX_STEP_SEQS = 2**24, 2**15  # no device can run more: more is a mistake


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of an engine.

    Attributes:
        model: a local checkpoint directory, a ``.gguf`` file, or a hub id.
        max_num_batched_tokens: maximum number of tokens in one step. A longer prompt is prefilled
            in chunks. A shorter prompt is prefilled in one step.
        max_num_seqs: maximum number of running sequences, which hold KV blocks.
        max_model_len: maximum number of prompt and completion tokens of a sequence. The default is
            the model's limit, or less if the KV cache cannot hold such a sequence.
        gpu_memory_utilization: fraction of the GPU's memory that the engine may use.
        tensor_parallel_size: number of GPUs (ranks) over which the model is split.
        enforce_eager: run decode without CUDA graphs.
        kvcache_block_size: tokens per KV-cache block.
        num_kvcache_blocks: size of the KV cache in blocks; -1 uses the available memory.
        device: "cpu", "cuda", "cuda:<index>" for one GPU, or "auto" for a GPU if there is one, else
            the CPU. With several ranks, the index is that of rank 0, and the other ranks use the
            following GPUs.
        dtype: "float32" (or "float"), "bfloat16", "float16" (or "half"), a torch dtype, or "auto"
            for the checkpoint's dtype on a GPU and float32 on a CPU.
        attention_backend: "flash_attn_4" or "flash_attn" (the packages), "triton" (nanovllm's own
            kernels), "torch", or "auto" for the fastest available backend.
        enable_prefix_caching: share the KV blocks of equal prompt prefixes.
        load_format: "auto" loads the checkpoint's weights; "dummy" uses random weights and needs
            only the checkpoint's config.
        seed: seed of the sampler and of dummy weights.
        tokenizer: path or hub id of the tokenizer; None for the model's own.
        skip_tokenizer_init: do not load a tokenizer; prompts must be token ids.
        max_logprobs: maximum number of log-probabilities per token that a request may ask for; -1
            for no limit, which ``logprobs=-1`` needs.
        logprobs_mode: "raw_logprobs" computes log-probabilities from the model's logits;
            "processed_logprobs" from the logits after masks, penalties, temperature and
            truncation, which tokens are sampled from. Prompt log-probabilities are always raw.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is invalid; the message says what to change.
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int = 256
    num_kvcache_blocks: int = -1
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    enable_prefix_caching: bool = True
    load_format: str = "auto"
    seed: int = 0
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"

    @classmethod
    def create(cls, model: str | os.PathLike[str], **kwargs: Any) -> "Config":
        """Creates a Config from user input. None means the default. Converts numpy numbers to
        Python's, and paths and torch dtypes to strings.

        Raises:
            TypeError: an argument is unknown; the message suggests the nearest known one.
        """
        known = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise TypeError(f"unknown argument {name!r}{hint}")
        if not isinstance(model, (str, os.PathLike)):
            raise TypeError(f"model must be a path or a hub id, got {type(model).__name__}")
        given = {name: _to_plain(value) for name, value in kwargs.items() if value is not None}
        if "dtype" in given:
            dtype = str(given["dtype"]).removeprefix("torch.")
            given["dtype"] = DTYPE_ALIASES.get(dtype, dtype)
        return cls(os.fspath(model), **given)

    @property
    def max_step_seqs(self) -> int:
        """Most sequences in one step, each of which has at least one token."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError("model must name a checkpoint directory, a .gguf file or a hub id")
        self._check_int("max_num_batched_tokens", 1, MAX_STEP_TOKENS)
        self._check_int("max_num_seqs", 1, MAX_STEP_SEQS)
        if self.max_model_len is not None:
            self._check_int("max_model_len", 2, MAX_INT32)
        self._check_int("kvcache_block_size", 1, MAX_INT32)
        self._check_int("tensor_parallel_size", 1, MAX_RANKS)
        self._check_int("num_kvcache_blocks", -1, MAX_INT32)
        self._check_int("seed", 0, 2**63 - 1)
        self._check_int("max_logprobs", -1, MAX_INT32)
        if self.num_kvcache_blocks == 0:
            raise ValueError(
                "num_kvcache_blocks must be at least 1, or -1 to use the available memory"
            )
        if self.num_kvcache_blocks * self.kvcache_block_size > MAX_INT32:
            raise ValueError(
                f"num_kvcache_blocks={self.num_kvcache_blocks} of kvcache_block_size="
                f"{self.kvcache_block_size} are more than {MAX_INT32} tokens: lower one of them"
            )
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise TypeError(f"gpu_memory_utilization must be a number, got {share!r}")
        if not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {share}")
        for name in ("enforce_eager", "enable_prefix_caching", "skip_tokenizer_init"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.device, str) or not re.fullmatch(
            r"auto|cpu|cuda(:\d+)?", self.device, re.ASCII
        ):
            raise ValueError(
                f"device must be one of auto, cpu, cuda, cuda:<index>, got {self.device!r}"
            )
        self._check_choice("dtype", DTYPES)
        self._check_choice("attention_backend", ATTENTION_BACKENDS)
        self._check_choice("load_format", LOAD_FORMATS)
        self._check_choice("logprobs_mode", LOGPROBS_MODES)
        if self.tokenizer is not None and (
            not isinstance(self.tokenizer, str) or not self.tokenizer
        ):
            raise TypeError(f"tokenizer must be a path or a hub id, got {self.tokenizer!r:.80}")

    def _check_int(self, name: str, minimum: int, maximum: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if not minimum <= value <= maximum:
            bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            raise ValueError(f"{name} must be {bound}, got {value}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _to_plain(value: Any) -> Any:
    """Converts numpy numbers to Python's and paths to strings. Returns other values unchanged."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, np.bool_):
        return bool(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value
