"""Engine configuration. Creating it validates the values and touches neither disk nor device."""

import os
from dataclasses import dataclass, fields
from typing import Annotated, Any

from nanovllm.utils.validation import (
    boolean,
    check_names,
    choice,
    integer,
    matching,
    number,
    optional,
    path_or_hub_id,
    validators_of,
)

DTYPE_ALIASES = {"half": "float16", "float": "float32"}
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
ATTENTION_BACKENDS = ("auto", "triton", "flash_attn", "torch")
MAX_RANKS = 8
MAX_INT32 = 2**31 - 1  # the kernels use int32 for slots, tokens and positions
DEFAULT_NUM_SEQS = 512  # of max_num_seqs; start-up may choose more on a GPU
MAX_STEP_TOKENS, MAX_STEP_SEQS = 2**24, 2**15  # larger values cannot run on any device


def _dtype(name: str, value: Any) -> str:
    dtype = str(value).removeprefix("torch.")
    known = choice("auto", "float32", "bfloat16", "float16")
    return known(name, DTYPE_ALIASES.get(dtype, dtype))


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of an engine. Numpy numbers become Python's; paths and torch dtypes become
    strings.

    Attributes:
        model: a local checkpoint directory, a ``.gguf`` file, or a hub id.
        max_num_batched_tokens: maximum number of tokens in one step. A longer prompt is prefilled
            in chunks. A shorter prompt is prefilled in one step.
        max_num_seqs: maximum number of running sequences, which hold KV blocks. The default is 512
            on a CPU. On a GPU, start-up chooses 512 to 2,048, by the memory that is left for the KV
            cache and by the size of the vocabulary. It is at most max_num_batched_tokens.
        max_model_len: maximum number of prompt and completion tokens of a sequence. The default is
            the model's limit, or less if the KV cache cannot hold such a sequence.
        gpu_memory_utilization: fraction of the GPU's memory that the engine may use.
        tensor_parallel_size: number of GPUs (ranks) over which the model is split.
        enforce_eager: run all steps without CUDA graphs.
        kvcache_block_size: tokens per KV-cache block. The default is 128, or 256 with
            ``attention_backend="flash_attn"``, which takes multiples of 256 only.
        kv_cache_dtype: "auto" keeps keys and values in the model's dtype; "fp8" or "fp8_e4m3"
            quantises them to 8 bits, so that the KV cache holds almost twice as many tokens.
        num_kvcache_blocks: size of the KV cache in blocks; -1 uses the available memory. In a model
            with sliding windows, a block holds only a group of layers (docs/architecture.md).
        device: "cpu", "cuda", "cuda:<index>" for one GPU, or "auto" for a GPU if there is one, else
            the CPU. With several ranks, the index is that of rank 0, and the other ranks use the
            following GPUs.
        dtype: "float32" (or "float"), "bfloat16", "float16" (or "half"), a torch dtype, or "auto"
            for the checkpoint's dtype on a GPU and float32 on a CPU.
        attention_backend: "triton" (nanovllm's own kernels), "flash_attn" (the package), "torch",
            or "auto" for the fastest available backend.
        enable_prefix_caching: share the KV blocks of equal prompt prefixes.
        enable_sleep_mode: on a GPU, put weights and KV cache into memory that ``LLM.sleep`` can
            free. On a CPU, ``LLM.sleep`` works without it.
        enable_reordering: admit the prompts of ``generate`` and of batch files in an order that
            takes less time: equal prefixes together, and those with the most tokens to generate
            first. If False, the prompts are admitted in the order given. The results of
            ``generate`` are always in the order of the prompts.
        batch_invariant: give a request the same tokens and log-probabilities, bit for bit, whatever
            else the engine computes with it (docs/batch-invariance.md). Takes more time.
        quantization: "fp8" quantises the weights of projections of attention, MLPs and experts to 8
            bits as they are loaded, with a scale for each output feature. If a checkpoint has all
            of them in FP8, with scales per tensor, channel or block of 128 x 128, they keep their
            scales. None stores weights as the checkpoint does. A GPU of compute capability 8.9 or
            higher also quantises their inputs, with a scale for each token. Exceptions are steps of
            up to 4 tokens in experts, and steps of one token in other layers. (On Hopper in bf16,
            one token is quantised too if the weight has 16M elements or more, and no blocks.) On a
            CPU and with ``batch_invariant``, weights are only rounded to FP8 numbers.
        load_format: "auto" loads the checkpoint's weights; "dummy" uses random weights and needs
            only the checkpoint's config.
        seed: seed of the sampler and of dummy weights.
        tokenizer: path or hub id of the tokenizer; None for the model's own.
        skip_tokenizer_init: do not load a tokenizer; prompts must be token ids.
        max_logprobs: maximum number of log-probabilities per token that a request may ask for; -1
            for no limit, which ``logprobs=-1`` needs.
        logprobs_mode: "raw_logprobs" computes log-probabilities from the model's logits;
            "processed_logprobs" from the logits that tokens are sampled from, after masks,
            penalties, temperature and truncation. Prompt log-probabilities are always raw.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is invalid; the message says what to change.
    """

    model: Annotated[str, path_or_hub_id]
    max_num_batched_tokens: Annotated[int, integer(1, MAX_STEP_TOKENS)] = 16384
    max_num_seqs: Annotated[int | None, optional(integer(1, MAX_STEP_SEQS))] = None
    max_model_len: Annotated[int | None, optional(integer(2, MAX_INT32))] = None
    gpu_memory_utilization: Annotated[float, number(0, 1, above=True)] = 0.9
    tensor_parallel_size: Annotated[int, integer(1, MAX_RANKS)] = 1
    enforce_eager: Annotated[bool, boolean] = False
    kvcache_block_size: Annotated[int | None, optional(integer(1, MAX_INT32))] = None
    kv_cache_dtype: Annotated[str, choice(*KV_CACHE_DTYPES)] = "auto"
    num_kvcache_blocks: Annotated[int, integer(-1, MAX_INT32)] = -1
    device: Annotated[str, matching(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda, cuda:<index>")] = (
        "auto"
    )
    dtype: Annotated[str, _dtype] = "auto"
    attention_backend: Annotated[str, choice(*ATTENTION_BACKENDS)] = "auto"
    enable_prefix_caching: Annotated[bool, boolean] = True
    enable_reordering: Annotated[bool, boolean] = True
    enable_sleep_mode: Annotated[bool, boolean] = False
    batch_invariant: Annotated[bool, boolean] = False
    quantization: Annotated[str | None, optional(choice("fp8"))] = None
    load_format: Annotated[str, choice("auto", "dummy")] = "auto"
    seed: Annotated[int, integer(0, 2**63 - 1)] = 0
    tokenizer: Annotated[str | None, optional(path_or_hub_id)] = None
    skip_tokenizer_init: Annotated[bool, boolean] = False
    max_logprobs: Annotated[int, integer(-1, MAX_INT32)] = 20
    logprobs_mode: Annotated[str, choice("raw_logprobs", "processed_logprobs")] = "raw_logprobs"

    @classmethod
    def create(cls, model: str | os.PathLike[str], **kwargs: Any) -> "Config":
        """Creates a Config from user input. None means the default.

        Raises:
            TypeError: an argument is unknown; the message suggests the nearest known one.
        """
        check_names(kwargs, [field.name for field in fields(cls)])
        given = {name: value for name, value in kwargs.items() if value is not None}
        return cls(model, **given)  # type: ignore[arg-type]

    @property
    def max_step_seqs(self) -> int:
        """The default of ``ModelRunner.max_num_seqs``, which start-up may raise on a GPU. Each
        sequence in a step has at least one token."""
        return min(self.max_num_seqs or DEFAULT_NUM_SEQS, self.max_num_batched_tokens)

    @property
    def block_size(self) -> int:
        """Tokens per KV block: ``kvcache_block_size`` or its default."""
        return self.kvcache_block_size or (256 if self.attention_backend == "flash_attn" else 128)

    @property
    def quantizes_kv(self) -> bool:
        return self.kv_cache_dtype != "auto"

    def __post_init__(self) -> None:
        for name, validate in validators_of(Config).items():
            object.__setattr__(self, name, validate(name, getattr(self, name)))
        if self.num_kvcache_blocks == 0:
            raise ValueError(
                "num_kvcache_blocks must be at least 1, or -1 to use the available memory"
            )
        if self.num_kvcache_blocks * self.block_size > MAX_INT32:
            raise ValueError(
                f"num_kvcache_blocks={self.num_kvcache_blocks} of kvcache_block_size="
                f"{self.block_size} are more than {MAX_INT32} tokens: lower one of them"
            )
