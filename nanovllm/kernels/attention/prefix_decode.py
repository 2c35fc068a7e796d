"""Shared-prefix decode attention in Triton: the queries of several sequences attend to the prefix
that their contexts share.

This kernel runs before the decode kernel, for the prefix splits of the schedule
(prefix_schedule.py). The rows of a tile are the query heads of several sequences that share a KV
head, so the prefix is read once for all of them. The results are partial. The decode kernel
combines them with those of the rest of each context.
"""

import torch
from torch import Tensor

from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.prefix_schedule import (
    MEMBER_WORDS,
    PREFIX_SPLIT_WORDS,
    PrefixTile,
    ScheduleLayout,
)
from nanovllm.kernels.attention.tiles import (
    CONSTEXPR_LOG2_E,
    LOG2_E,
    attend,
    load_pair,
    norm_and_rope,
)
from nanovllm.kernels.rope import RopeInputs
from nanovllm.utils.context import Context
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import HOPPER_MULTIPROCESSORS, pdl_options, pdl_wait, tl, triton

SPLIT_WORDS = tl.constexpr(PREFIX_SPLIT_WORDS)
SEQ_WORDS = tl.constexpr(MEMBER_WORDS)


@triton.jit(do_not_specialize=["table_stride"])
def _prefix_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scales_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    block_tables_ptr,
    splits_ptr,
    members_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    sinks_ptr,
    eps,
    scale_log2e,
    q_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes every num_programs-th prefix split for one KV head.

    Row r of a tile is member r // BLOCK_G and head r % BLOCK_G of the group of query heads.
    BLOCK_G is the size of that group, rounded up to a power of two. partial, lse and arrived are as
    in the decode kernel. A sink counts in a sequence's first split. SOFTCAP and scales are as
    in ``attend``.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP)
    HALF: tl.constexpr = HEAD_DIM // 2
    KV_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    kv_head = tl.program_id(0)
    row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + row % BLOCK_G
    dim = tl.arange(0, BLOCK_D)[None, :]
    other = tl.where(dim < HALF, dim + HALF, dim - HALF)
    in_head = dim < HEAD_DIM
    q_weights = None
    if q_weight_ptr is not None:
        q_weights = load_pair(q_weight_ptr, dim, other, in_head)
    num_prefix_splits = tl.load(splits_ptr + 5)
    pdl_wait(PDL)
    for index in tl.range(tl.program_id(1), num_prefix_splits, tl.num_programs(1)):
        split_ptr = splits_ptr + index * SPLIT_WORDS
        first_member = tl.load(split_ptr)
        num_members = tl.load(split_ptr + 1)
        begin = tl.load(split_ptr + 2)
        end = tl.load(split_ptr + 3)
        split = tl.load(split_ptr + 4)
        is_member = row // BLOCK_G < num_members
        row_mask = is_member & (row % BLOCK_G < GROUP)
        mask = row_mask[:, None] & in_head
        member_ptr = members_ptr + (first_member + row // BLOCK_G) * SEQ_WORDS
        seq = tl.load(member_ptr, mask=is_member, other=0)
        slot = tl.load(member_ptr + 1, mask=is_member, other=0) + split
        any_seq = tl.load(members_ptr + first_member * SEQ_WORDS)
        position = tl.load(positions_ptr + seq)
        angle = cos_sin_ptr + position[:, None] * HEAD_DIM + dim % HALF
        cos = tl.load(angle, mask=mask, other=0.0)
        sin = tl.load(angle + HALF, mask=mask, other=0.0)
        sin = tl.where(dim < HALF, -sin, sin)
        q_row = q_ptr + (seq.to(tl.int64) * q_stride + head * HEAD_DIM)[:, None]
        q_pair = load_pair(q_row, dim, other, mask)
        q = norm_and_rope(q_pair, q_weights, cos, sin, eps, HEAD_DIM)
        row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        if sinks_ptr is not None:
            has_sink = row_mask & (row < (split == 0).to(tl.int32) * BLOCK_M)
            sinks = tl.load(sinks_ptr + head, mask=has_sink, other=-float("inf"))
            row_max = sinks * CONSTEXPR_LOG2_E
            row_sum += tl.where(has_sink, 1.0, 0.0)
        row_max, row_sum, acc = attend(
            q,
            k_ptr,
            v_ptr,
            block_tables_ptr + any_seq * table_stride,
            0,
            kv_head,
            begin,
            begin + (end - begin) // BLOCK_N * BLOCK_N,
            end,
            None,
            row_max,
            row_sum,
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
            scale_log2e,
            KV_STRIDE,
            KV_STRIDE,
            0,
            0,
            PAGE_SIZE,
            HEAD_DIM,
            BLOCK_N,
            BLOCK_N,
            0,
            SOFTCAP,
            scales_ptr,
            KV_HEADS,
        )
        partial_row = slot * Q_HEADS + head
        tl.store(lse_ptr + partial_row, row_max + tl.log2(row_sum), mask=row_mask)
        partial_offset = partial_row[:, None] * HEAD_DIM + dim
        tl.store(partial_ptr + partial_offset, acc / row_sum[:, None], mask=mask)
        # The decode kernel starts to combine only after this kernel has ended, so the counters need
        # no memory ordering.
        arrived_row = arrived_ptr + (slot - split) * KV_HEADS + kv_head
        tl.atomic_add(arrived_row, 1, mask=is_member & (row % BLOCK_G == 0), sem="relaxed")


def prefix_attention(
    q: Tensor,
    cache: KVCache,
    context: Context,
    params: AttentionParams,
    rope: RopeInputs,
    layout: ScheduleLayout,
    partial: Tensor,
    lse: Tensor,
    arrived: Tensor,
) -> None:
    """Computes the prefix splits of the context's schedule.

    Args:
        q: [num_seqs, heads, head_dim], before norm and RoPE.
        rope: the norm and the rotary embedding of q.
        layout: where the schedule has prefix splits and members.
        partial: fp32 [slots, heads, head_dim], gets the results.
        lse: fp32 [slots, heads], gets their log-sum-exps in base 2.
        arrived: int32, counts the finished splits of each sequence and KV head.
    """
    q_heads, head_dim = q.shape[1:]
    page_size, kv_heads = cache.k.shape[1:3]
    tile = prefix_tile(q_heads, kv_heads, head_dim, q.dtype)
    assert context.split_kv_schedule is not None and context.block_tables is not None
    num_programs = cdiv(tile.num_programs, kv_heads)
    _prefix_kernel[(kv_heads, num_programs)](
        q,
        cache.k,
        cache.v,
        cache.scales,
        partial,
        lse,
        arrived,
        context.block_tables,
        context.split_kv_schedule[layout.prefix_splits :],
        context.split_kv_schedule[layout.members :],
        rope.positions,
        rope.cos_sin_cache,
        rope.q_weight,
        params.sinks,
        rope.eps,
        params.scale * LOG2_E,
        q.stride(0),
        context.block_tables.stride(0),
        PAGE_SIZE=page_size,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=tile.num_rows,
        BLOCK_N=tile.num_keys,
        SOFTCAP=None if params.softcap is None else params.softcap * LOG2_E,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_options(q),
    )


def prefix_tile(q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> PrefixTile:
    """Chooses tile and launch sizes. A program needs at most 99 KiB of shared memory, which every
    GPU with bf16 has, and two programs run on a multiprocessor."""
    num_rows, num_keys, num_programs = 64, 64, 2 * HOPPER_MULTIPROCESSORS
    if dtype is torch.float32:  # no tensor cores: small tiles keep the unrolled code short
        num_rows, num_keys = 16, 16
    elif head_dim > 128:
        num_keys = 32
    heads = next_power_of_2(q_heads // kv_heads)
    num_rows = max(num_rows, heads)
    return PrefixTile(num_rows, num_rows // heads, num_keys, 4, 2, num_programs)
