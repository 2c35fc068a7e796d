"""The attention layer: applies RoPE, stores keys and values in the KV cache, calls the backend."""

import torch
from torch import Tensor, nn

from nanovllm.kernels.attention.backend import AttentionBackend
from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.rope import CacheSlots, NewKV, RopeInputs, apply_rope_and_store
from nanovllm.utils.context import get_context
from nanovllm.utils.loader import head_parameter


class Attention(nn.Module):
    """Grouped-query attention of one layer over the paged KV cache.

    Start-up sets ``backend``, ``kv_cache`` (this layer's part of the KV cache) and
    ``kv_group`` (the layer's group, see utils/context.py). Until then the cache is empty and
    nothing is stored.

    Args:
        num_heads, num_kv_heads: heads of this rank.
        params: scale, window and softcap.
        has_sinks: whether the layer has attention sinks, the parameter ``sinks``.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        params: AttentionParams,
        num_kv_heads: int,
        has_sinks: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.sinks = head_parameter(num_heads) if has_sinks else None
        self.params = params._replace(sinks=self.sinks)
        self.num_kv_heads = num_kv_heads
        self.kv_cache = KVCache(torch.empty(0), torch.empty(0))
        self.kv_group = 0
        self.backend: AttentionBackend | None = None

    def cache_slots(self) -> CacheSlots | None:
        """Returns where the step's new keys and values are stored; None without a KV cache."""
        if not self.kv_cache.k.numel():
            return None
        slot_mapping = get_context(self.kv_group).slot_mapping
        assert slot_mapping is not None
        return CacheSlots(self.kv_cache, slot_mapping)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: RopeInputs,
        only_outputs: bool = False,
    ) -> Tensor:
        """Computes attention of the current step, whose metadata is in the context.

        Args:
            q: [N, num_heads, head_dim].
            k, v: [N, num_kv_heads, head_dim].
            rope: rotary embedding to apply to q and k. A layer without RoPE has angles of 0.
            only_outputs: compute only the rows in the context's ``output_indices``.

        Returns:
            [N, num_heads, head_dim], or only the rows in ``output_indices``.
        """
        context = get_context(self.kv_group)
        assert self.backend is not None, "start-up has set no attention backend"
        if self.backend.fuses_rope and not context.is_prefill:
            return self.backend.decode(q, self.kv_cache, context, self.params, NewKV(rope, k, v))
        q, k = apply_rope_and_store(rope, q, k, v, self.cache_slots())
        return self.attend(q, k, v, only_outputs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, only_outputs: bool = False) -> Tensor:
        """Computes attention as ``forward`` does, for queries and keys after RoPE. If there is a KV
        cache, it must already hold the new keys and values."""
        context = get_context(self.kv_group)
        assert self.backend is not None
        if only_outputs:
            q, context = q[context.output_indices], context.for_output_rows()
        if context.is_prefill:
            return self.backend.prefill(q, k, v, self.kv_cache, context, self.params)
        return self.backend.decode(q, self.kv_cache, context, self.params)
