"""Attention backend in plain PyTorch: for CPUs, and the reference for the other backends."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.attention.base import AttentionBackend
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.rope import NewKV
from nanovllm.utils.context import Context


class TorchAttention(AttentionBackend):
    """Calls scaled_dot_product_attention for each sequence, on keys gathered from its blocks."""

    name = "torch"
    capturable = False

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, context: Context, scale: float
    ) -> Tensor:
        assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
        q_bounds, k_bounds = context.cu_seqlens_q.tolist(), context.cu_seqlens_k.tolist()
        tables = None if context.block_tables is None else context.block_tables.tolist()
        out = torch.empty_like(q)
        for i in range(len(q_bounds) - 1):
            q_rows, k_rows = slice(*q_bounds[i : i + 2]), slice(*k_bounds[i : i + 2])
            len_q, len_k = q_rows.stop - q_rows.start, k_rows.stop - k_rows.start
            if tables is None:
                keys, values = k[k_rows], v[k_rows]
            else:
                keys, values = _gather(cache, tables[i], len_k)
            mask = None
            if 1 < len_q < len_k:
                mask = torch.ones(len_q, len_k, dtype=torch.bool, device=q.device)
                mask = mask.tril(len_k - len_q)
            out[q_rows] = _attend(
                q[q_rows].transpose(0, 1),
                keys,
                values,
                scale,
                attn_mask=mask,
                is_causal=1 < len_q == len_k,
                enable_gqa=True,
            ).transpose(0, 1)
        return out

    def decode(
        self, q: Tensor, cache: KVCache, context: Context, scale: float, new: NewKV | None = None
    ) -> Tensor:
        assert new is None
        assert context.context_lens is not None and context.block_tables is not None
        out = torch.empty_like(q)
        # A single token attends to its whole context without a mask. So the query heads that share
        # a KV head can be passed as query tokens, which gives fewer and larger matmuls.
        shape = (q.size(0), cache.k.size(2), -1, q.size(2))
        for q_i, out_i, table, len_k in zip(
            q.view(shape),
            out.view(shape),
            context.block_tables.tolist(),
            context.context_lens.tolist(),
            strict=True,
        ):
            out_i.copy_(_attend(q_i, *_gather(cache, table, len_k), scale))
        return out


def _gather(cache: KVCache, block_table: list[int], length: int) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of the first ``length`` tokens of a sequence, [length, kv_heads,
    head_dim]: views of a single block, or copies of several."""
    num_blocks = -(-length // cache.k.size(1))
    if num_blocks == 1:
        return cache.k[block_table[0]][:length], cache.v[block_table[0]][:length]
    blocks = block_table[:num_blocks]
    return cache.k[blocks].flatten(0, 1)[:length], cache.v[blocks].flatten(0, 1)[:length]


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, **options: Any) -> Tensor:
    """Calls scaled_dot_product_attention for one sequence.

    Args:
        q: [heads, len_q, head_dim]. The result has the same shape.
        keys, values: [len_k, kv_heads, head_dim].
    """
    keys, values = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    return F.scaled_dot_product_attention(
        q.unsqueeze(0), keys, values, scale=scale, **options
    ).squeeze(0)
