"""Prefill attention in Triton: the new queries of several sequences, concatenated, attend to the
keys of their own sequence.

The query heads that share a KV head are rows of one tile, so their keys and values are read once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.tiles import CONSTEXPR_LOG2_E, LOG2_E, attend, sequence_of_tile
from nanovllm.utils.context import Context
from nanovllm.utils.math import next_power_of_2
from nanovllm.utils.triton_compat import pdl_options, pdl_wait, shared_memory, tl, triton

SCAN = 128  # sequences that a program looks at in one iteration, to find that of its tile


@triton.jit(do_not_specialize=["table_stride", "num_seqs"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scales_ptr,
    out_ptr,
    block_tables_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    sinks_ptr,
    scale_log2e,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    num_seqs,
    PAGE_SIZE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_OR_SPLIT: tl.constexpr,
    SCAN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ATTEND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes one tile of queries of one sequence and KV head.

    Row r of the tile is query token r // GROUP and head r % GROUP of the group. k and v are the
    paged caches [blocks x PAGE_SIZE, KV_HEADS, HEAD_DIM], or the keys and values of the step [N,
    KV_HEADS, HEAD_DIM] if PAGE_SIZE is 0. WINDOW, SOFTCAP and scales are as in ``attend``. A sink
    is a score without a key, so it is the initial maximum of its row, with a weight of 1.

    ATTEND is the Triton function that loops over the keys: ``attend``, or for batch-invariant
    attention ``invariant.attend_in_splits``. TAIL_OR_SPLIT is TAIL_N of the former and SPLIT of
    the latter.
    """
    pdl_wait(PDL)
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    TILE: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    # The last tiles start first, because they attend to the most keys.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    seq, tile = sequence_of_tile(index, cu_seqlens_q_ptr, num_seqs, TILE, SCAN)
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    len_q = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    if tile * TILE >= len_q:
        return
    k_start = tl.load(cu_seqlens_k_ptr + seq)
    len_k = tl.load(cu_seqlens_k_ptr + seq + 1) - k_start

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    token = tile * TILE + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_mask = (token < len_q) & (row < TILE * GROUP)
    q_offset = (q_start + token).to(tl.int64) * q_stride + head * HEAD_DIM
    q_mask = row_mask[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=q_mask, other=0.0)

    first_position = len_k - len_q + tile * TILE
    end = tl.minimum(first_position + TILE, len_k)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        row_max = tl.load(sinks_ptr + head) * CONSTEXPR_LOG2_E
        row_sum += 1.0
    _, row_sum, acc = ATTEND(
        q,
        k_ptr,
        v_ptr,
        block_tables_ptr + seq * table_stride if PAGE_SIZE else block_tables_ptr,
        k_start,
        kv_head,
        0,
        tl.minimum(end, first_position + 1) // BLOCK_N * BLOCK_N,
        end,
        len_k - len_q + token,
        row_max,
        row_sum,
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        scale_log2e,
        k_stride,
        v_stride,
        tl.maximum(first_position + 1 - WINDOW, 0) if WINDOW else 0,
        end - WINDOW if WINDOW else 0,
        PAGE_SIZE,
        HEAD_DIM,
        BLOCK_N,
        TAIL_OR_SPLIT,
        WINDOW,
        SOFTCAP,
        scales_ptr,
        KV_HEADS,
    )
    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    out_row = (q_start + token).to(tl.int64) * Q_HEADS + head
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=q_mask,
    )


class PrefillTile(NamedTuple):
    """Tile and launch sizes of the prefill kernel.

    Attributes:
        num_rows: BLOCK_M, rows of queries: tokens times query heads that share a KV head.
        num_keys: BLOCK_N, keys per iteration where none is masked.
        tail_or_split: TAIL_N, keys per iteration where some are masked. For batch-invariant
            attention, SPLIT, keys per split.
        num_warps: warps per program.
        num_stages: pipeline stages.
    """

    num_rows: int
    num_keys: int
    tail_or_split: int
    num_warps: int
    num_stages: int


def prefill_tile(
    head_dim: int, has_window: bool, dtype: torch.dtype, shared_memory: int
) -> PrefillTile:
    """Chooses tile and launch sizes. Those for at least 200 KiB of shared memory, which data-centre
    GPUs from Hopper on have, were tuned on an H200.

    Args:
        head_dim: size of a head.
        has_window: whether the layer has a window.
        dtype: of queries, keys and values.
        shared_memory: the most that one program can use, in bytes.
    """
    if dtype is torch.float32:  # no tensor cores: small tiles keep the unrolled code short
        return PrefillTile(16, 16, 16, 4, 2)
    if shared_memory < 200 << 10:
        return PrefillTile(64, 32, 32, 4, 2) if head_dim > 128 else PrefillTile(128, 64, 64, 8, 2)
    if head_dim > 128:
        return PrefillTile(128, 64, 64, 8, 2)
    if head_dim > 64:
        return PrefillTile(128, 128, 64, 8, 3)
    return PrefillTile(128, 64, 32, 8, 3) if has_window else PrefillTile(64, 64, 64, 4, 3)


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, context: Context, params: AttentionParams
) -> Tensor:
    """See ``AttentionBackend.prefill``."""
    has_window = params.window is not None
    tile = prefill_tile(q.size(2), has_window, q.dtype, shared_memory(q.device))
    return launch_prefill(q, k, v, cache, context, params, tile, attend)


def launch_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    context: Context,
    params: AttentionParams,
    tile: PrefillTile,
    attend_function: Any,
) -> Tensor:
    """Launches the prefill kernel. See ``AttentionBackend.prefill`` for the other arguments.

    Args:
        tile: tile and launch sizes.
        attend_function: ATTEND, the Triton function that loops over the keys.
    """
    q_heads, head_dim = q.shape[1:]
    kv_heads = k.size(1)
    tables = context.block_tables
    assert tables is not None or cache.scales is None
    if tables is not None:
        assert cache.k.is_contiguous() and cache.v.is_contiguous()
        assert cache.scales is None or cache.scales.is_contiguous()
        k, v = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
    assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert context.cu_seqlens_q is not None
    group = q_heads // kv_heads
    block_m = max(tile.num_rows, next_power_of_2(group))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_seqs = len(context.cu_seqlens_q) - 1
    _prefill_kernel[(len(q) // (block_m // group) + num_seqs, kv_heads)](
        q,
        k,
        v,
        cache.scales,
        out,
        tables,
        context.cu_seqlens_q,
        context.cu_seqlens_k,
        params.sinks,
        params.scale * LOG2_E,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        tables.stride(0) if tables is not None else 0,
        num_seqs,
        PAGE_SIZE=cache.k.size(1) if tables is not None else 0,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=tile.num_keys,
        TAIL_OR_SPLIT=tile.tail_or_split,
        SCAN=SCAN,
        WINDOW=params.window or 0,
        SOFTCAP=None if params.softcap is None else params.softcap * LOG2_E,
        ATTEND=attend_function,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_options(q),
    )
    return out
