"""Attention over the paged KV cache: stores new keys and values, unless the backend does, and calls
it."""

import torch
from torch import nn

from nanovllm.kernels.attention.backend import AttentionBackend
from nanovllm.kernels.attention.store_kvcache import store_kvcache
from nanovllm.kernels.rope import CacheSlots, NewTokens, Rotation, rotate_and_store
from nanovllm.utils.context import get_context

__all__ = ["Attention", "store_kvcache"]


class Attention(nn.Module):
    """Grouped-query attention of one layer.

    ``backend`` and the views ``k_cache`` and ``v_cache`` [blocks, block_size, kv_heads,
    head_dim] are bound by the model runner; without caches nothing is stored.
    """

    def __init__(self, num_heads: int, head_dim: int, scale: float, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.k_cache = self.v_cache = torch.empty(0)
        self.backend: AttentionBackend | None = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation | None = None,
        only_outputs: bool = False,
    ) -> torch.Tensor:
        """q [N, num_heads, head_dim], k and v [N, num_kv_heads, head_dim] -> q's shape; q and k
        still to be rotated, if it says how. With ``only_outputs`` the result has only the context's
        ``output_indices``."""
        context, slots = get_context(), None
        assert self.backend is not None, "no attention backend bound"
        if rotation is not None and self.backend.rotates and not context.is_prefill:
            new = NewTokens(rotation, k, v)
            return self.backend.decode(q, self.k_cache, self.v_cache, context, self.scale, new)
        if self.k_cache.numel():
            assert context.slot_mapping is not None
            slots = CacheSlots(self.k_cache, self.v_cache, context.slot_mapping)
        if rotation is not None:
            q, k = rotate_and_store(rotation, q, k, v, slots, self.backend.num_finite(context))
        elif slots is not None:
            store_kvcache(k, v, *slots)
        if only_outputs:
            q, context = q[context.output_indices], context.of_outputs()
        if context.is_prefill:
            return self.backend.prefill(q, k, v, self.k_cache, self.v_cache, context, self.scale)
        return self.backend.decode(q, self.k_cache, self.v_cache, context, self.scale)
