"""Attention backend in Triton, for all GPUs that Triton supports."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.kernels.attention.base import AttentionBackend, AttentionParams
from nanovllm.kernels.attention.decode import decode_attention, decode_tile, num_partial_slots
from nanovllm.kernels.attention.hopper_prefill import MIN_TOKENS, can_launch, hopper_prefill
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.prefill import prefill_attention
from nanovllm.kernels.attention.prefix_decode import prefix_tile
from nanovllm.kernels.attention.prefix_schedule import (
    NO_PREFIXES,
    SharedPrefixes,
    make_shared_schedule,
)
from nanovllm.kernels.attention.split_kv import make_split_kv_schedule
from nanovllm.kernels.fallback import run_or_replace
from nanovllm.kernels.rope import NewKV
from nanovllm.utils.context import Context
from nanovllm.utils.math import next_power_of_2

HOPPER_KERNEL = "prefill kernel"


class TritonAttention(AttentionBackend):
    """Uses the kernels of this package. They support fp16, bf16 and fp32, all block sizes, and head
    dimensions up to 256. On Hopper GPUs long prompts use a separate prefill kernel. If that fails,
    the general prefill kernel runs instead."""

    name = "triton"
    fuses_rope = True
    shares_prefixes = True
    reads_quantized = True

    def __init__(self) -> None:
        # Counters of the decode kernel, by their number. Launches of the same or of different sizes
        # can share them, because steps run in order.
        self._arrived: dict[int, Tensor] = {}

    def max_captured_prefill(self, is_quantized: bool) -> tuple[int, int]:
        # The kernel for Hopper reads copies of a quantised cache, but not in a graph.
        return (MIN_TOKENS - 1 if is_quantized else 16384), 128

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        context: Context,
        params: AttentionParams,
    ) -> Tensor:
        args = q, k, v, cache, context, params
        if not can_launch(q, cache, context, params):
            return prefill_attention(*args)
        return run_or_replace(
            HOPPER_KERNEL,
            q.device,
            lambda: hopper_prefill(*args),
            lambda: prefill_attention(*args),
        )

    def split_kv(
        self,
        context_lens: np.ndarray,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        is_quantized: bool,
        window: int | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> np.ndarray:
        tile = decode_tile(len(context_lens), q_heads, kv_heads, head_dim, dtype, is_quantized)
        arguments = context_lens, kv_heads, tile.num_keys, tile.num_programs
        if prefixes is None:
            return make_split_kv_schedule(*arguments, window)
        shared_tile = prefix_tile(q_heads, kv_heads, head_dim, dtype)
        if window is not None:  # the prefix may be outside of the window
            prefixes = NO_PREFIXES
        return make_shared_schedule(*arguments, window, prefixes, shared_tile)

    def decode(
        self,
        q: Tensor,
        cache: KVCache,
        context: Context,
        params: AttentionParams,
        new: NewKV | None = None,
    ) -> Tensor:
        assert new is not None
        kv_heads = cache.k.size(2)
        num_slots = num_partial_slots(q, cache, context, params.window)
        size = next_power_of_2(num_slots * kv_heads)  # so that there are few different sizes
        if size not in self._arrived:
            self._arrived[size] = torch.zeros(size, dtype=torch.int32, device=q.device)
        try:
            return decode_attention(q, cache, context, params, new, self._arrived[size])
        except BaseException:
            # The prefix kernel may have counted splits, and the decode kernel that resets the
            # counters may not have been launched. Captured graphs use the same counters.
            self._arrived[size].zero_()
            raise
