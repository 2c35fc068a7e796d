"""Copies the keys and values of a quantised cache, for kernels that read no FP8."""

import torch
from torch import Tensor

from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.prefill import SCAN
from nanovllm.kernels.attention.tiles import (
    load_scales,
    load_tile,
    scale_down,
    sequence_of_tile,
)
from nanovllm.kernels.attention.torch_backend import gather_kv
from nanovllm.utils.context import Context
from nanovllm.utils.triton_compat import by_device, tl, triton

# The copies have at most this many times the queries' elements. The MLP usually takes more memory.
MAX_COPY = 4
TILE = 64  # keys per program


def max_num_keys(q: Tensor, cache: KVCache) -> int:
    """Returns the largest number of keys that may be copied for queries [N, heads, head_dim]. The
    copies then have up to MAX_COPY times as many elements as the queries."""
    return MAX_COPY * len(q) * q.size(1) // (2 * cache.k.size(2))


def dequantized_kv_reference(q: Tensor, cache: KVCache, context: Context) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of all sequences of a prefill, one after the other as in
    ``cu_seqlens_k``: [num_keys, kv_heads, head_dim] each.

    Args:
        q: the queries, whose dtype the result has.
        cache: a quantised cache.
        context: of a prefill, with block tables of a layer without a window, and with ``num_keys``,
            at most ``max_num_keys``.
    """
    assert context.cu_seqlens_k is not None and context.block_tables is not None
    lens = context.cu_seqlens_k.diff().tolist()
    tables = context.block_tables.tolist()
    parts = [gather_kv(cache, t, 0, n, q.dtype) for t, n in zip(tables, lens, strict=True)]
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys), torch.cat(values)


@triton.jit(do_not_specialize=["table_stride", "num_seqs"])
def _dequantized_kv_kernel(
    k_ptr,
    v_ptr,
    scales_ptr,
    out_k_ptr,
    out_v_ptr,
    block_tables_ptr,
    cu_seqlens_k_ptr,
    table_stride,
    num_seqs,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Copies TILE keys and values of one sequence and KV head."""
    kv_head = tl.program_id(1)
    seq, tile = sequence_of_tile(tl.program_id(0), cu_seqlens_k_ptr, num_seqs, TILE, SCAN)
    start = tl.load(cu_seqlens_k_ptr + seq)
    end = tl.load(cu_seqlens_k_ptr + seq + 1) - start
    first = tile * TILE
    if first >= end:
        return
    STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    pages_ptr = block_tables_ptr + seq * table_stride
    key = first + tl.arange(0, TILE)
    dim = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    offset = kv_head * HEAD_DIM + dim
    mask = (key < end)[:, None] & (dim < HEAD_DIM)[None, :]
    k = load_tile(k_ptr, STRIDE, offset, mask, first, end, pages_ptr, 0, PAGE_SIZE, TILE)
    v = load_tile(v_ptr, STRIDE, offset, mask, first, end, pages_ptr, 0, PAGE_SIZE, TILE)
    k_scale, v_scale = load_scales(
        scales_ptr, kv_head, key < end, first, end, pages_ptr, KV_HEADS, PAGE_SIZE, TILE
    )
    k = k.to(tl.float32) * k_scale[:, None]
    v = v.to(tl.float32) * scale_down(v_scale)[:, None]
    out = (start + key).to(tl.int64)[:, None] * STRIDE + offset[None, :]
    tl.store(out_k_ptr + out, k.to(out_k_ptr.dtype.element_ty), mask=mask)
    tl.store(out_v_ptr + out, v.to(out_v_ptr.dtype.element_ty), mask=mask)


def dequantized_kv_triton(q: Tensor, cache: KVCache, context: Context) -> tuple[Tensor, Tensor]:
    """See ``dequantized_kv_reference``."""
    tables, bounds = context.block_tables, context.cu_seqlens_k
    assert tables is not None and bounds is not None and cache.scales is not None
    assert all(x is not None and x.is_contiguous() for x in cache)
    page_size, kv_heads, head_dim = cache.k.shape[1:]
    assert 0 < context.num_keys <= max_num_keys(q, cache)
    # The buffer has room for the most keys. So no step with as many queries needs more memory than
    # the warm-up, which measures it.
    copies = q.new_empty(2, max_num_keys(q, cache), kv_heads, head_dim)
    k, v = copies[:, : context.num_keys]
    num_seqs = len(bounds) - 1
    _dequantized_kv_kernel[(context.num_keys // TILE + num_seqs, kv_heads)](
        cache.k,
        cache.v,
        cache.scales,
        k,
        v,
        tables,
        bounds,
        tables.stride(0),
        num_seqs,
        PAGE_SIZE=page_size,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        TILE=TILE,
        SCAN=SCAN,
    )
    return k, v


dequantized_kv = by_device(dequantized_kv_reference, dequantized_kv_triton)
