"""Engine settings: checked values that touch neither the disk nor a device."""

import difflib
import os
from dataclasses import dataclass, fields
from typing import Any

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "flash_attn_4", "flash_attn", "triton", "torch")
LOAD_FORMATS = ("auto", "dummy")
MAX_RANKS = 8
MAX_INT32 = 2**31 - 1  # slots, tokens and positions are counted in int32
MAX_STEP_TOKENS, MAX_STEP_SEQS = 2**24, 2**15  # beyond any device, within any mistake's reach


@dataclass(frozen=True, slots=True)
class Config:
    """How to run one model.

    Attributes:
        model: a local checkpoint directory, a ``.gguf`` file, or a hub id.
        max_num_batched_tokens: most tokens that one step computes; longer prompts are prefilled
            in chunks, others whole, in the step in which there is room.
        max_num_seqs: most sequences resident (holding KV blocks) at once.
        max_model_len: longest prompt + completion, in tokens; capped by the model's own limit.
        gpu_memory_utilization: share of the GPU's memory that the engine may fill.
        tensor_parallel_size: number of ranks that one model is split over.
        enforce_eager: run decode without CUDA graphs.
        kvcache_block_size: tokens per KV-cache block.
        num_kvcache_blocks: size of the KV cache in blocks; -1 fills the memory that is left.
        device: "cuda", "cpu", or "auto" for CUDA where there is a GPU.
        dtype: "auto" is the checkpoint's on a GPU and float32 on a CPU.
        attention_backend: "flash_attn_4" or "flash_attn" (the packages), "triton" (own kernels),
            "torch", or "auto" for the fastest that works here.
        enable_prefix_caching: share the KV blocks of equal prompt prefixes.
        load_format: "auto" reads the checkpoint's weights; "dummy" draws random ones and needs
            no more than its config.
        seed: seed of the sampler and of dummy weights.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value that cannot work; the message says what to change.
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = 4096
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

    @classmethod
    def create(cls, model: str | os.PathLike[str], **kwargs: Any) -> "Config":
        """Builds a Config, naming the nearest valid keyword for each unknown one."""
        known = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise TypeError(f"unknown argument {name!r}{hint}")
        if not isinstance(model, (str, os.PathLike)):
            raise TypeError(f"model must be a path or a hub id, got {type(model).__name__}")
        return cls(os.fspath(model), **kwargs)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError("model must name a checkpoint directory, a .gguf file or a hub id")
        self._check_int("max_num_batched_tokens", 1, MAX_STEP_TOKENS)
        self._check_int("max_num_seqs", 1, MAX_STEP_SEQS)
        self._check_int("max_model_len", 2, MAX_INT32)
        self._check_int("kvcache_block_size", 1, MAX_INT32)
        self._check_int("tensor_parallel_size", 1, MAX_RANKS)
        self._check_int("num_kvcache_blocks", -1, MAX_INT32)
        self._check_int("seed", 0, 2**63 - 1)
        if self.num_kvcache_blocks == 0:
            raise ValueError("num_kvcache_blocks must be at least 1, or -1 to measure it")
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
        for name in ("enforce_eager", "enable_prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_choice("device", DEVICES)
        self._check_choice("dtype", DTYPES)
        self._check_choice("attention_backend", ATTENTION_BACKENDS)
        self._check_choice("load_format", LOAD_FORMATS)

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
