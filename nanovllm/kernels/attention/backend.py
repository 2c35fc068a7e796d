"""The selection of an attention backend."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.kernels.attention.base import AttentionBackend, AttentionParams
from nanovllm.kernels.attention.flash_attn_backend import FlashAttention
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.prefix_schedule import NO_PREFIXES
from nanovllm.kernels.attention.torch_backend import TorchAttention
from nanovllm.kernels.attention.triton_backend import TritonAttention
from nanovllm.kernels.fp8 import FP8, MAX_FP8
from nanovllm.kernels.rope import NewKV, RopeInputs
from nanovllm.utils.compile_ahead import compiling_only
from nanovllm.utils.context import Context

logger = logging.getLogger("nanovllm")

# Fastest first. Triton decodes faster than flash-attn 2 at every batch size measured
# (benchmarks/results/).
BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend for backend in (TritonAttention, FlashAttention, TorchAttention)
}


class AttentionShape(NamedTuple):
    """What a backend has to support on one rank.

    Attributes:
        features: the optional fields of AttentionParams that some layers use.
        is_quantized: whether the KV cache is quantised to FP8.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    features: frozenset[str] = frozenset()
    is_quantized: bool = False


def batch_invariant_backends(device: torch.device) -> dict[str, type[AttentionBackend]]:
    """Returns the backends that give a token the same bits whatever else a step computes."""
    if device.type == "cuda":
        from nanovllm.kernels.attention.invariant import InvariantTritonAttention

        return {InvariantTritonAttention.name: InvariantTritonAttention}
    from nanovllm.kernels.attention.torch_invariant import BatchInvariantTorchAttention

    return {BatchInvariantTorchAttention.name: BatchInvariantTorchAttention}


def select_attention_backend(
    name: str, shape: AttentionShape, batch_invariant: bool = False
) -> AttentionBackend:
    """Returns the backend of the given name, or for "auto" the fastest that supports this shape.

    With ``batch_invariant``, chooses only among backends that are.

    Runs a tiny prefill and decode with each candidate, so that a missing package or an unsupported
    shape is reported at start-up and not in a forward pass.

    Raises:
        ValueError: the requested backend does not work here, or the GPU has no FP8. The message
            says why.
    """
    if shape.is_quantized and shape.device.type == "cuda":
        check_fp8(torch.cuda.get_device_capability(shape.device))
    backends = batch_invariant_backends(shape.device) if batch_invariant else BACKENDS
    candidates = [name]
    if name == "auto":
        candidates = [known for known, backend in backends.items() if backend.runs_on(shape.device)]
    reasons = []
    for candidate in candidates:
        try:
            if candidate not in backends:
                raise ValueError("it is not batch-invariant")
            if not backends[candidate].runs_on(shape.device):
                raise ValueError("it needs a CUDA GPU")
            if missing := shape.features - backends[candidate].features:
                raise ValueError(f"it has no attention with {' and '.join(sorted(missing))}")
            if shape.is_quantized and not backends[candidate].reads_quantized:
                raise ValueError("it cannot read an FP8 KV cache")
            backend = backends[candidate]()
            _try_out(backend, shape)
        except Exception as error:  # packages and compilers may raise any exception
            reasons.append(f"{candidate}: {type(error).__name__}: {error}")
            continue
        why = "the fastest that works here" if name == "auto" else "as requested"
        skipped = f"; skipped: {'; '.join(reasons)}" if reasons else ""
        is_slow = name == "auto" and candidate == "torch" and shape.device.type == "cuda"
        level = logging.WARNING if is_slow else logging.INFO
        logger.log(level, "attention backend %s: %s%s", candidate, why, skipped)
        return backend
    raise ValueError(
        f"attention backend {name!r} does not work for head_dim {shape.head_dim}, block size "
        f"{shape.block_size}, {shape.dtype} on {shape.device.type} ({'; '.join(reasons)}): "
        f"leave attention_backend at 'auto'"
    )


def check_fp8(capability: tuple[int, int]) -> None:
    """Raises ValueError if a GPU of this compute capability cannot convert to FP8 (e4m3)."""
    if capability < (8, 9):
        raise ValueError(
            "kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or higher (Ada, Hopper or "
            f"later), and this one has {capability[0]}.{capability[1]}: leave kv_cache_dtype at "
            "'auto'"
        )


def _try_out(backend: AttentionBackend, shape: AttentionShape) -> None:
    """Runs a prefill, a prefill that reads the cache, and a decode, also one for shared prefixes.

    The batch has two sequences of one token, because some backends launch further kernels when
    there is more than one sequence.

    Raises:
        ValueError: a result is wrong.
    """
    num_heads, num_kv_heads, head_dim, block_size, dtype, device, features, is_quantized = shape

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    def fp32(value: float, *shape: int) -> torch.Tensor:  # another thread may change the default
        return torch.full(shape, value, dtype=torch.float32, device=device)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, kv = ones(2, num_heads, head_dim), ones(2, num_kv_heads, head_dim)
    block = ones(1, block_size, num_kv_heads, head_dim)  # both sequences share it
    cache = KVCache(block, block)
    if is_quantized:
        block = (block * MAX_FP8).to(FP8)
        scales = fp32(1 / MAX_FP8, 1, 2, num_kv_heads, block_size)
        cache = KVCache(block, block, scales)
    bounds, table = ints(0, 1, 2), ints(0, 0).unsqueeze(1)
    prompt = Context(
        is_prefill=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=1, max_seqlen_k=1
    )
    cached = replace(prompt, block_tables=table)
    identity_rope = ones(1, head_dim).float()
    identity_rope[:, head_dim // 2 :] = 0  # cosines are 1, sines 0
    new = NewKV(RopeInputs(ints(0, 0), identity_rope), kv, kv) if backend.fuses_rope else None
    decode = Context(
        slot_mapping=ints(0, 0), block_tables=table, context_lens=ints(1, 1), max_seqlen_k=1
    )
    heads, lens = (num_heads, num_kv_heads, head_dim), np.ones(2, np.int32)
    decodes = []
    for prefixes in (None, NO_PREFIXES) if backend.shares_prefixes else (None,):
        schedule = backend.split_kv(lens, *heads, dtype, is_quantized, None, prefixes)
        on_device = None if schedule is None else torch.from_numpy(schedule).to(device)
        decodes.append(replace(decode, split_kv_schedule=on_device))

    # With these values, the features do not change the result of attention over one token.
    neutral = {"window": 1, "softcap": 1e3, "sinks": fp32(-1e9, num_heads)}
    used: dict[str, Any] = {name: neutral[name] for name in features}

    def outputs() -> Iterator[torch.Tensor]:
        for options in ({}, used) if used else ({},):
            params = AttentionParams(1.0, **options)
            for context in (cached,) if is_quantized else (prompt, cached):
                yield backend.prefill(q, kv, kv, cache, context, params)
            for context in decodes:
                yield backend.decode(q, cache, context, params, new)

    with compiling_only():  # compiles all kernels in parallel
        list(outputs())
    if not all(torch.equal(out, q) for out in outputs()):
        raise ValueError("its attention over one token is wrong")
