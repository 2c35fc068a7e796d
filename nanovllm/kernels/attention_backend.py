"""The seam behind which attention is computed, and the choice of what stands there."""

from typing import Protocol

import torch

from nanovllm.kernels.attention_torch import TorchAttention
from nanovllm.utils.context import Context


class AttentionBackend(Protocol):
    """Softmax attention over the paged cache, without state.

    q is [N, heads, head_dim]; k and v [N, kv_heads, head_dim]; the caches [blocks, block_size,
    kv_heads, head_dim], already holding this step's keys and values. heads is a multiple of
    kv_heads, query head h reading KV head h * kv_heads // heads. Results have q's shape.
    """

    name: str

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
        """Causal attention of each sequence's new tokens, its last ones, over its context."""

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        """Attention of one new token per sequence over ``context.context_lens`` cached ones."""


def select_attention_backend(name: str) -> AttentionBackend:
    """The backend of that name, or for "auto" the fastest that works here."""
    assert name in ("auto", "torch"), name
    return TorchAttention()
