"""Attention backend in plain PyTorch: for CPUs, and the reference for the other backends."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.attention.base import AttentionBackend, AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.rope import NewKV
from nanovllm.utils.context import Context
from nanovllm.utils.math import cdiv

# A prefill with a mask, softcap or sinks computes a tile of queries at a time, so that it needs
# bounded memory: at most MAX_ROWS queries, and at most MAX_SCORES scores of all heads (64 MiB in
# fp32), or entries of the mask that the heads share. Small tiles are also faster, because a tile
# skips the keys after its last query and before its window.
MAX_SCORES, MAX_ROWS = 1 << 24, 256


class TorchAttention(AttentionBackend):
    """Calls scaled_dot_product_attention for each sequence, on keys gathered from its blocks.

    That function supports neither softcap nor sinks. With these, scores and softmax are computed in
    fp32 by separate operations.
    """

    name = "torch"
    capturable = False
    reads_quantized = True
    needs_gpu = False

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        context: Context,
        params: AttentionParams,
    ) -> Tensor:
        assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
        q_bounds, k_bounds = context.cu_seqlens_q.tolist(), context.cu_seqlens_k.tolist()
        tables = None if context.block_tables is None else context.block_tables.tolist()
        out = torch.empty_like(q)
        for i in range(len(q_bounds) - 1):
            q_rows, k_rows = slice(*q_bounds[i : i + 2]), slice(*k_bounds[i : i + 2])
            len_q, len_k = q_rows.stop - q_rows.start, k_rows.stop - k_rows.start
            first = window_start(len_k - len_q, params)
            if tables is None:
                keys, values = k[k_rows][first:], v[k_rows][first:]
            else:
                keys, values = gather_kv(cache, tables[i], first, len_k, q.dtype)
            _prefill_one(q[q_rows], keys, values, len_k - len_q - first, params, out[q_rows])
        return out

    def decode(
        self,
        q: Tensor,
        cache: KVCache,
        context: Context,
        params: AttentionParams,
        new: NewKV | None = None,
    ) -> Tensor:
        assert new is None
        assert context.context_lens is not None and context.block_tables is not None
        out = torch.empty_like(q)
        # A single token attends to its whole window without a mask. So the query heads that share
        # a KV head can be passed as query tokens, which gives fewer and larger matmuls.
        kv_heads = cache.k.size(2)
        shape = (q.size(0), kv_heads, -1, q.size(2))
        if params.sinks is not None:
            params = params._replace(sinks=params.sinks.view(kv_heads, -1))
        for q_i, out_i, table, len_k in zip(
            q.view(shape),
            out.view(shape),
            context.block_tables.tolist(),
            context.context_lens.tolist(),
            strict=True,
        ):
            first = window_start(len_k - 1, params)
            keys, values = gather_kv(cache, table, first, len_k, q.dtype)
            out_i.copy_(_attend(q_i, keys, values, params))
        return out


def window_start(position: int, params: AttentionParams) -> int:
    """Returns the first token to which the token at ``position`` attends."""
    return 0 if params.window is None else max(0, position + 1 - params.window)


def gather_kv(
    cache: KVCache,
    block_table: list[int],
    first: int,
    end: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of a sequence's tokens [first, end): [end - first, kv_heads,
    head_dim] each. They are views if all are in one block, otherwise copies. Quantised ones are
    dequantised to ``dtype``."""
    block_size = cache.k.size(1)
    skipped = first // block_size
    blocks = block_table[skipped : cdiv(end, block_size)]
    tokens = slice(first - skipped * block_size, end - skipped * block_size)
    if cache.scales is not None:
        scales = cache.scales[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, tokens].unsqueeze(-1)
        keys, values = (x[blocks].flatten(0, 1)[tokens].float() for x in (cache.k, cache.v))
        return (keys * scales[0]).to(dtype), (values * scales[1]).to(dtype)
    if len(blocks) == 1:
        return cache.k[blocks[0]][tokens], cache.v[blocks[0]][tokens]
    index = torch.tensor(blocks, dtype=torch.int32, device=cache.k.device)
    # On CPUs, index_select takes half of the time of cache.k[index].
    keys, values = (x.index_select(0, index).flatten(0, 1)[tokens] for x in (cache.k, cache.v))
    return keys, values


def _prefill_one(
    q: Tensor, keys: Tensor, values: Tensor, start: int, params: AttentionParams, out: Tensor
) -> None:
    """Computes causal attention of one sequence.

    Args:
        q: [len_q, heads, head_dim], of the last tokens. ``out`` has the same shape.
        keys, values: [len_k, kv_heads, head_dim].
        start: the index, among the keys, of the first query's token.
        params: the window, softcap, scale and sinks.
        out: the result is written to it.
    """
    len_q, len_k = len(q), len(keys)
    window = params.window if params.window is not None and params.window < len_k else None
    is_causal = start == 0 and window is None and _uses_sdpa(params)  # needs no mask
    num_rows = max(1, len_q)
    if not is_causal:
        num_keys = len_k if window is None else min(len_k, window + MAX_ROWS)
        num_heads = 1 if _uses_sdpa(params) else q.size(1)  # the heads share the mask
        num_rows = max(1, min(MAX_ROWS, MAX_SCORES // (num_heads * max(1, num_keys))))
    for row in range(0, len_q, num_rows):
        rows = slice(row, min(row + num_rows, len_q))
        first, end = window_start(start + row, params), start + rows.stop
        mask = None
        if rows.stop - row > 1 and not is_causal:
            mask = torch.ones(rows.stop - row, end - first, dtype=torch.bool, device=q.device)
            mask = mask.tril_(start + row - first)
            if window is not None:
                mask = mask.triu_(start + row - first + 1 - window)
        out[rows] = _attend(
            q[rows].transpose(0, 1), keys[first:end], values[first:end], params, mask, is_causal
        ).transpose(0, 1)


def _uses_sdpa(params: AttentionParams) -> bool:
    return params.softcap is None and params.sinks is None


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    params: AttentionParams,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Computes softmax attention of one sequence.

    Args:
        q: [heads, len_q, head_dim]. The result has the same shape.
        keys, values: [len_k, kv_heads, head_dim].
        params: its sinks are [heads], or [heads, len_q].
        mask: bool [len_q, len_k], which keys each query attends to; None for all.
        is_causal: whether query i attends to keys 0 to i. Then len_q equals len_k, and the mask is
            None.
    """
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    if _uses_sdpa(params):
        return F.scaled_dot_product_attention(
            q.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=mask,
            is_causal=is_causal,
            scale=params.scale,
            enable_gqa=q.size(0) != keys.size(0),
        ).squeeze(0)
    kv_heads, len_k, head_dim = keys.shape
    # Query heads that share a KV head are rows of one matrix.
    rows = q.reshape(kv_heads, -1, head_dim).float()
    scores = (rows @ keys.float().transpose(1, 2)).view(*q.shape[:2], len_k).mul_(params.scale)
    if params.softcap is not None:
        scores.div_(params.softcap).tanh_().mul_(params.softcap)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    if params.sinks is not None:
        sinks = params.sinks.float().view(q.size(0), -1, 1).expand(*q.shape[:2], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., :len_k].reshape(*rows.shape[:2], len_k)
    return (weights @ values.float()).view(q.shape).to(q.dtype)
