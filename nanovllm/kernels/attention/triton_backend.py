"""Attention backend in Triton, for all GPUs that Triton supports."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.kernels.attention.base import AttentionBackend, AttentionParams
from nanovllm.kernels.attention.decode import decode_attention, decode_tile, num_arrival_counters
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.prefill import prefill_attention
from nanovllm.kernels.attention.split_kv import make_split_kv_schedule
from nanovllm.kernels.rope import NewKV
from nanovllm.utils.context import Context


class TritonAttention(AttentionBackend):
    """Uses the kernels of this package. They support fp16, bf16 and fp32, all block sizes, and head
    dimensions up to 256."""

    name = "triton"
    fuses_rope = True

    def __init__(self) -> None:
        # Counters of the decode kernel. Launches can share them, because steps run in order.
        self._arrived: Tensor | None = None

    prefill = staticmethod(prefill_attention)

    def split_kv(
        self,
        context_lens: np.ndarray,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> np.ndarray:
        tile = decode_tile(len(context_lens), kv_heads, head_dim, dtype)
        return make_split_kv_schedule(
            context_lens, kv_heads, tile.num_keys, tile.num_programs, window
        )

    def decode(
        self,
        q: Tensor,
        cache: KVCache,
        context: Context,
        params: AttentionParams,
        new: NewKV | None = None,
    ) -> Tensor:
        assert new is not None
        if self._arrived is None:
            size = num_arrival_counters(cache.k.size(2))
            self._arrived = torch.zeros(size, dtype=torch.int32, device=q.device)
        return decode_attention(q, cache, context, params, new, self._arrived)
