"""The seam behind which attention is computed, and the choice of what stands there."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from nanovllm.kernels.attention.flash_attn_4_backend import FlashAttention4
from nanovllm.kernels.attention.flash_attn_backend import FlashAttention
from nanovllm.kernels.attention.torch_backend import TorchAttention
from nanovllm.kernels.attention.triton_backend import TritonAttention
from nanovllm.kernels.rope import NewTokens, Rotation
from nanovllm.utils.compile_ahead import compiling_only
from nanovllm.utils.context import Context

logger = logging.getLogger("nanovllm")


class AttentionBackend(Protocol):
    """Softmax attention over the paged cache, without state from step to step.

    q is [N, heads, head_dim]; k and v [N, kv_heads, head_dim]; the caches [blocks, block_size,
    kv_heads, head_dim], already holding this step's keys and values, unless ``new`` has them. heads
    is a multiple of kv_heads, query head h reading KV head h * kv_heads // heads. Results have q's
    shape.
    """

    name: str
    # Whether decode runs without reading back from the device, as a CUDA graph needs.
    capturable: bool
    # Whether decode rotates and stores new keys, and takes them as the projection gives them.
    rotates: bool

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention of some tokens of each sequence, its last ones (any number, or none),
        over its context, which may be empty. k and v have all of this step's tokens:
        ``context.cu_seqlens_k`` where there are no block tables. Rows of q after the last
        sequence's may give anything."""

    def num_finite(self, context: Context) -> int:
        """Of each prompt's first values, how many ``prefill`` needs to be finite, lest they spoil
        other sequences (``rotate_and_store`` makes them so)."""

    def plan_decode(
        self, context_lens: np.ndarray, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> np.ndarray | None:
        """``context.decode_work`` for a decode of these lengths, int32 [num_seqs], on the host; its
        shape depends on num_seqs alone."""

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
        new: NewTokens | None = None,
    ) -> torch.Tensor:
        """Attention of one new token per sequence over ``context.context_lens`` tokens. All are
        cached; but where ``rotates``, ``new`` has the new ones, which are rotated, as are the
        queries, and stored."""


# Fastest first. On an H200 flash-attn 4 prefills long prompts about 1.3 times as fast as the Triton
# kernels; those decode faster than flash-attn 2 at every batch size measured (benchmarks/results/).
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "flash_attn_4": FlashAttention4,
    "triton": TritonAttention,
    "flash_attn": FlashAttention,
    "torch": TorchAttention,
}


def select_attention_backend(
    name: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend:
    """The backend of that name, or for "auto" the fastest that works for this shape.

    Whether one works is tried out, on a tiny prefill and decode, so that a missing package or
    an unserved shape shows at start and not in a forward pass.

    Raises:
        ValueError: the backend asked for does not work here; the message says why.
    """
    candidates = [name]
    if name == "auto":
        candidates = list(BACKENDS) if device.type == "cuda" else ["torch"]
    reasons = []
    for candidate in candidates:
        try:
            if candidate != "torch" and device.type != "cuda":
                raise ValueError("it needs a CUDA GPU")
            backend = BACKENDS[candidate]()
            _try_out(backend, num_heads, num_kv_heads, head_dim, block_size, dtype, device)
        except Exception as error:  # whatever a package or a compiler raises is the reason
            reasons.append(f"{candidate}: {type(error).__name__}: {error}")
            continue
        why = "the fastest that works here" if name == "auto" else "as asked for"
        lost = f"; passed over: {'; '.join(reasons)}" if reasons else ""
        logger.info("attention backend %s: %s%s", candidate, why, lost)
        return backend
    raise ValueError(
        f"attention backend {name!r} does not work for head_dim {head_dim}, block size "
        f"{block_size}, {dtype} on {device.type} ({'; '.join(reasons)}): "
        f"leave attention_backend at 'auto'"
    )


def _try_out(
    backend: AttentionBackend,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """A prefill, a prefill that reads the cache, and a decode; of two sequences of a token each, as
    some kernels run between sequences only."""

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, kv = ones(2, num_heads, head_dim), ones(2, num_kv_heads, head_dim)
    cache = ones(1, block_size, num_kv_heads, head_dim)  # both have the same
    bounds, table = ints(0, 1, 2), ints(0, 0).unsqueeze(1)
    prompt = Context(
        is_prefill=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=1, max_seqlen_k=1
    )
    cached = replace(prompt, block_tables=table)
    work = backend.plan_decode(np.ones(2, np.int32), num_kv_heads, head_dim, dtype)
    as_it_is = ones(1, head_dim).float()
    as_it_is[:, head_dim // 2 :] = 0  # sines
    new = NewTokens(Rotation(ints(0, 0), as_it_is), kv, kv) if backend.rotates else None
    decode = Context(
        slot_mapping=ints(0, 0),
        block_tables=table,
        context_lens=ints(1, 1),
        decode_work=None if work is None else torch.from_numpy(work).to(device),
        max_seqlen_k=1,
    )

    def outputs() -> Iterator[torch.Tensor]:
        for context in (prompt, cached):
            yield backend.prefill(q, kv, kv, cache, cache, context, 1.0)
        yield backend.decode(q, cache, cache, decode, 1.0, new)

    with compiling_only():  # all at once
        list(outputs())
    if not all(torch.equal(out, q) for out in outputs()):
        raise ValueError("its attention over one token is wrong")
