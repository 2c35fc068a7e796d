"""Attention backend in plain PyTorch: for CPUs, and the reference for the other backends."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.attention.base import AttentionBackend
from nanovllm.kernels.rope import NewKV
from nanovllm.utils.context import Context


class TorchAttention(AttentionBackend):
    """Calls scaled_dot_product_attention for each sequence, on keys gathered from its blocks."""

    name = "torch"
    capturable = False

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
        assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
        q_bounds, k_bounds = context.cu_seqlens_q.tolist(), context.cu_seqlens_k.tolist()
        tables = None if context.block_tables is None else context.block_tables.tolist()
        out = torch.empty_like(q)
        for i in range(len(q_bounds) - 1):
            new, context_of_i = slice(*q_bounds[i : i + 2]), slice(*k_bounds[i : i + 2])
            if tables is None:
                keys, values = k[context_of_i], v[context_of_i]
            else:
                len_k = k_bounds[i + 1] - k_bounds[i]
                keys, values = (_gather(cache, tables[i], len_k) for cache in (k_cache, v_cache))
            out[new] = _attend(q[new], keys, values, scale)
        return out

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
        new: NewKV | None = None,
    ) -> torch.Tensor:
        assert new is None
        assert context.context_lens is not None and context.block_tables is not None
        out = torch.empty_like(q)
        # A single token attends to its whole context without a mask. So the query heads that share
        # a KV head can be passed as query tokens, which gives fewer and larger matmuls.
        shape = (q.size(0), 1, k_cache.size(2), -1, q.size(2))
        for q_i, out_i, table, len_k in zip(
            q.view(shape),
            out.view(shape),
            context.block_tables.tolist(),
            context.context_lens.tolist(),
            strict=True,
        ):
            keys, values = _gather(k_cache, table, len_k), _gather(v_cache, table, len_k)
            out_i.copy_(
                F.scaled_dot_product_attention(
                    q_i,
                    keys.transpose(0, 1).unsqueeze(0),
                    values.transpose(0, 1).unsqueeze(0),
                    scale=scale,
                )
            )
        return out


def _gather(cache: torch.Tensor, block_table: list[int], length: int) -> torch.Tensor:
    """Returns the first ``length`` tokens of a sequence, [length, kv_heads, head_dim]: a view of a
    single block, or a copy of several."""
    num_blocks = -(-length // cache.size(1))
    if num_blocks == 1:
        return cache[block_table[0]][:length]
    return cache[block_table[:num_blocks]].flatten(0, 1)[:length]


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Computes causal attention of q [len_q, heads, head_dim], the last tokens of the sequence."""
    len_q, len_k = q.size(0), keys.size(0)
    mask = None
    if 1 < len_q < len_k:
        mask = torch.ones(len_q, len_k, dtype=torch.bool, device=q.device).tril(len_k - len_q)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=1 < len_q == len_k,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)
