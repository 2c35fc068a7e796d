"""The batch-invariant attention backend in PyTorch, for CPUs."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.torch_backend import TorchAttention, gather_kv, window_start
from nanovllm.kernels.rope import NewKV
from nanovllm.utils.context import Context
from nanovllm.utils.math import cdiv

# A matmul takes QUERIES tokens and TILE keys. Fewer are padded, so that all matmuls of a layer have
# the same shape. Tiles start at multiples of TILE in the sequence.
QUERIES, TILE = 16, 128
# GEMMs use a different remainder kernel when a size is not a multiple of 16.
ALIGNMENT = 16


class BatchInvariantTorchAttention(TorchAttention):
    """Gives a query the same bits whether it is computed in a prefill, in a chunk of one or in a
    decode, and whatever the other sequences are.

    The keys of a sequence are divided into tiles at fixed positions. A query takes its tiles in
    ascending order, with an online softmax in fp32 (FlashAttention). A tile without any key that
    the query attends to changes nothing: its weights are 0.
    """

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
            if tables is None:
                read_kv = partial(_slice_kv, k[k_rows], v[k_rows])
            else:
                read_kv = partial(gather_kv, cache, tables[i])
            _attend(q[q_rows], k_rows.stop - k_rows.start, read_kv, params, out[q_rows])
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
        tables, lens = context.block_tables.tolist(), context.context_lens.tolist()
        for i, (table, len_k) in enumerate(zip(tables, lens, strict=True)):
            rows = slice(i, i + 1)
            _attend(q[rows], len_k, partial(gather_kv, cache, table), params, out[rows])
        return out


def _slice_kv(k: Tensor, v: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
    return k[first:end], v[first:end]


def _attend(
    q: Tensor,
    len_k: int,
    read_kv: Callable[[int, int], tuple[Tensor, Tensor]],
    params: AttentionParams,
    out: Tensor,
) -> None:
    """Computes causal attention of the last tokens of one sequence.

    Args:
        q: [len_q, heads, head_dim]. ``out`` has the same shape.
        len_k: number of tokens in the sequence.
        read_kv: (first, end) -> the keys and values of these tokens, [end - first, kv_heads,
            head_dim] each.
        params: the window, softcap, scale and sinks.
        out: the result is written to it.
    """
    len_q, head_dim = len(q), q.size(2)
    if not len_q:
        return
    start = len_k - len_q
    first = window_start(start, params)
    first_tile = first // TILE
    keys, values = (
        _as_tiles(tensor, first - first_tile * TILE, len_k - first_tile * TILE)
        for tensor in read_kv(first, len_k)
    )
    for row in range(0, len_q, QUERIES):
        rows = slice(row, row + QUERIES)
        begin = window_start(start + row, params) // TILE
        end = cdiv(min(start + row + QUERIES, len_k), TILE)
        tiles = slice(begin - first_tile, end - first_tile)
        result = _attend_block(
            q[rows], start + row, begin * TILE, keys[tiles], values[tiles], params
        )
        out[rows] = result[: len(q[rows]), :, :head_dim]


def _as_tiles(x: Tensor, offset: int, length: int) -> Tensor:
    """Converts keys or values [N, kv_heads, head_dim] to fp32 tiles [tiles, kv_heads, TILE, padded
    head_dim]. ``x`` starts at row ``offset`` of the first tile; the rest is zero-padded."""
    num_tiles, width = cdiv(length, TILE), cdiv(x.size(2), ALIGNMENT) * ALIGNMENT
    tiles = x.new_zeros(num_tiles * TILE, x.size(1), width, dtype=torch.float32)
    tiles[offset:length, :, : x.size(2)] = x
    return tiles.view(num_tiles, TILE, x.size(1), width).transpose(1, 2).contiguous()


def _attend_block(
    q: Tensor, start: int, first_key: int, keys: Tensor, values: Tensor, params: AttentionParams
) -> Tensor:
    """Computes attention of up to QUERIES consecutive tokens.

    Args:
        q: [len_q, heads, head_dim].
        start: the position of the first query's token.
        first_key: the position of the first key's token.
        keys, values: [tiles, kv_heads, TILE, padded head_dim].

    Returns:
        [QUERIES, heads, padded head_dim], of which the first len_q rows are valid.
    """
    kv_heads, width = keys.size(1), keys.size(3)
    queries = q.new_zeros(QUERIES, q.size(1), width, dtype=torch.float32)
    queries[: len(q), :, : q.size(2)] = q
    # Query heads that share a KV head are rows of one matrix.
    queries = queries.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2).contiguous()
    shape = kv_heads, -1, QUERIES, TILE
    position = torch.arange(start, start + QUERIES, device=q.device).unsqueeze(1)
    largest = queries.new_full((kv_heads, q.size(1) // kv_heads, QUERIES, 1), -torch.inf)
    total = torch.zeros_like(largest)
    if params.sinks is not None:
        largest, total = largest.copy_(params.sinks.view(kv_heads, -1, 1, 1)), total + 1
    acc = queries.new_zeros(*largest.shape[:3], width)
    for tile, (key, value) in enumerate(zip(keys, values, strict=True)):
        scores = (queries @ key.transpose(1, 2)).view(shape).mul_(params.scale)
        if params.softcap is not None:
            scores.div_(params.softcap).tanh_().mul_(params.softcap)
        key_position = first_key + tile * TILE + torch.arange(TILE, device=q.device)
        hidden = key_position > position
        if params.window is not None:
            hidden |= key_position <= position - params.window
        scores.masked_fill_(hidden, -torch.inf)
        last, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        shift = largest.clamp(min=torch.finfo(torch.float32).min)  # -inf before the first key
        rescale, weights = (last - shift).exp_(), (scores - shift).exp_()
        total = total * rescale + weights.sum(-1, keepdim=True)
        acc = acc * rescale + (weights.flatten(1, 2) @ value).view(acc.shape)
    return (acc / total).permute(2, 0, 1, 3).flatten(1, 2)
