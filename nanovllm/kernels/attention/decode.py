"""Attention of a decode step, in Triton: one query for each sequence over its paged keys.

The contexts are divided among programs (decode_work.py); of those of one sequence, the last to end
merges all partial results by their log-sum-exps (Flash-Decoding). The query heads that share a KV
head are the rows of one tile, so that their keys and values are read once.

Queries and keys come as the projection gives them. Each program normalises and rotates the queries
of its heads; the one with a sequence's last part does so with the new key too, and stores it. With
programmatic dependent launch, the first keys of few contexts are requested while the projection is
still running: they have been cached by steps before.
"""

from typing import NamedTuple

import torch

from nanovllm.kernels.attention.split_kv import ITEM_WORDS, num_partial_slots
from nanovllm.kernels.attention.tiles import LOG2_E, add_scores, attend, precision, tile_pointers
from nanovllm.kernels.rope import NewTokens
from nanovllm.utils.context import Context
from nanovllm.utils.triton_compat import chained, tl, triton

MERGED_ROWS = 32  # partial results that are read at once, of all heads of a group
MULTIPROCESSORS = 132  # of a Hopper GPU
# What contexts are cut for. More where there are few, as their programs are small.
PROGRAMS, PROGRAMS_OF_FEW = 2 * MULTIPROCESSORS, 4 * MULTIPROCESSORS
# From how many sequences times KV heads on programs are of a single warp, and take fewest keys.
MANY, MOST = 1024, 1536


class DecodeTile(NamedTuple):
    """How a decode is divided.

    Attributes:
        num_keys: that a program takes at a time.
        num_warps: of a program.
        num_programs: that contexts are cut for.
        prefetches: whether a program requests its first keys before it waits for its query.
    """

    num_keys: int
    num_warps: int
    num_programs: int
    prefetches: bool


@triton.jit
def _rotated(
    x, other, weight, other_weight, cos, sin, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """Heads x [N, D], a row each, normalised and rotated as in rope.py: each element with its
    other, half a head away, for which ``sin`` has the sign. All are of x's shape."""
    x32 = x.to(tl.float32)
    other32 = other.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x32 * x32, axis=1) / HEAD_DIM + eps)[:, None]
        # Rounded where the separate norm would round.
        x32 = ((x32 * scale).to(x.dtype) * weight).to(tl.float32)
        other32 = ((other32 * scale).to(x.dtype) * other_weight).to(tl.float32)
    return (x32 * cos + other32 * sin).to(x.dtype)


@triton.jit
def _repeated(x, ROWS: tl.constexpr):
    """The rows of x [N, D] over and over, [ROWS, D]."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[None, :, :], (ROWS // N, N, D)), (ROWS, D))


@triton.jit
def _merge(
    partial_ptr,
    lse_ptr,
    out_ptr,
    first_row,
    num_parts,
    out_row,
    Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The average of a sequence's parts, weighted by their shares of the softmax: for a group's
    heads, whose first row of the first part is ``first_row``, PARTS parts at a time."""
    head = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    best = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        exists = (head < GROUP)[:, None] & (part < num_parts)[None, :]
        row = first_row + part[None, :] * Q_HEADS + head[:, None]
        lse = tl.load(lse_ptr + row, mask=exists, other=-float("inf"), cache_modifier=".cg")
        partial = tl.load(
            partial_ptr + row[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=exists[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        weight, alpha, best, total = add_scores(lse, 1.0, best, total)
        acc = acc * alpha[:, None] + tl.sum(partial * weight[:, :, None], axis=1)
    mean = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = (out_row + head)[:, None] * HEAD_DIM + dim[None, :]
    mask = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out_ptr + place, mean.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    block_tables_ptr,
    work_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    new_k_ptr,
    new_v_ptr,
    slot_mapping_ptr,
    eps,
    scale_log2e,
    q_stride,
    new_k_stride,
    new_v_stride,
    table_stride,
    HAS_NORM: tl.constexpr,
    PREFETCHES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One KV head and one WORK_ITEM, of which ``work`` has one a row. The rows of the tile are the
    query heads of the group, over and over; those after the first time are not stored.

    partial is fp32 [slots, Q_HEADS, HEAD_DIM], lse [slots, Q_HEADS], in base 2, and arrived int32
    [slots, KV_HEADS], zero before and after.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    work_ptr += tl.program_id(1) * ITEM_WORDS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # A use of what is loaded waits for it, and loads that come later wait too: so what can be asked
    # for together is, here and below.
    seq = tl.load(work_ptr)
    begin = tl.load(work_ptr + 1)
    end = tl.load(work_ptr + 2)
    num_parts = tl.load(work_ptr + 3)
    part = tl.load(work_ptr + 4)
    first_slot = tl.load(work_ptr + 5)
    if num_parts == 0:
        return
    position = tl.load(positions_ptr + seq)
    new_slot = tl.load(slot_mapping_ptr + seq).to(tl.int64)
    has_new = (part == num_parts - 1) & (end > begin)
    cached_end = end - has_new.to(tl.int32)
    pages_ptr = block_tables_ptr + seq * table_stride
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    KV_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    if PREFETCHES:
        is_cached = begin + tl.arange(0, BLOCK_N) < cached_end
        mask = is_cached[:, None] & in_head[None, :]
        offset = kv_head * HEAD_DIM + dim
        k_tile = tile_pointers(
            k_ptr, KV_STRIDE, offset, begin, cached_end, pages_ptr, 0, PAGE_SIZE, BLOCK_N
        )
        k = tl.load(k_tile, mask=mask, other=0.0)
        v_tile = tile_pointers(
            v_ptr, KV_STRIDE, offset, begin, cached_end, pages_ptr, 0, PAGE_SIZE, BLOCK_N
        )
        v = tl.load(v_tile, mask=mask, other=0.0)
    row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + row
    out_mask = (row < GROUP)[:, None] & in_head[None, :]
    member = tl.arange(0, BLOCK_G)
    g_mask = (member < GROUP)[:, None] & in_head[None, :]
    q_row = q_ptr + seq.to(tl.int64) * q_stride + (kv_head * GROUP + member)[:, None] * HEAD_DIM
    k_row = new_k_ptr + seq.to(tl.int64) * new_k_stride + kv_head * HEAD_DIM
    v_row = new_v_ptr + seq.to(tl.int64) * new_v_stride + kv_head * HEAD_DIM
    # These tiles have one shape, and with it one layout: a key's rows are all the same.
    HALF: tl.constexpr = HEAD_DIM // 2
    this = (member * 0)[:, None] + dim[None, :]
    other = tl.where(this < HALF, this + HALF, this - HALF)
    angle = cos_sin_ptr + position * HEAD_DIM + this % HALF
    cos = tl.load(angle, mask=this < HEAD_DIM, other=0.0)
    sin = tl.load(angle + HALF, mask=this < HEAD_DIM, other=0.0)
    sin = tl.where(this < HALF, -sin, sin)
    q_weight = cos
    other_q_weight = cos
    k_weight = cos
    other_k_weight = cos
    if HAS_NORM:
        q_weight = tl.load(q_weight_ptr + this, mask=this < HEAD_DIM, other=0.0)
        other_q_weight = tl.load(q_weight_ptr + other, mask=this < HEAD_DIM, other=0.0)
        k_weight = tl.load(k_weight_ptr + this, mask=this < HEAD_DIM, other=0.0)
        other_k_weight = tl.load(k_weight_ptr + other, mask=this < HEAD_DIM, other=0.0)
    # All so far was there before the step.
    if PDL:
        tl.extra.cuda.gdc_wait()

    q = tl.load(q_row + this, mask=g_mask, other=0.0)
    other_q = tl.load(q_row + other, mask=g_mask, other=0.0)
    # None of it without a new key; the interpreter takes no flag for a mask.
    new_mask = g_mask & (this < has_new.to(tl.int32) * HEAD_DIM)
    new_k = tl.load(k_row + this, mask=new_mask, other=0.0)
    other_new_k = tl.load(k_row + other, mask=new_mask, other=0.0)
    new_v = tl.load(v_row + this, mask=new_mask, other=0.0)
    q = _rotated(q, other_q, q_weight, other_q_weight, cos, sin, eps, HEAD_DIM, HAS_NORM)
    best = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = _repeated(new_v, BLOCK_M).to(tl.float32)
    if has_new:
        new_k = _rotated(
            new_k, other_new_k, k_weight, other_k_weight, cos, sin, eps, HEAD_DIM, HAS_NORM
        )
        best = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1) * scale_log2e
        total += 1.0
        place = new_slot * KV_STRIDE + kv_head * HEAD_DIM + this
        if new_slot >= 0:
            tl.store(k_ptr + place, new_k, mask=(member == 0)[:, None] & in_head[None, :])
            tl.store(v_ptr + place, new_v, mask=(member == 0)[:, None] & in_head[None, :])
    q = _repeated(q, BLOCK_M)
    best = tl.reshape(_repeated(best[:, None], BLOCK_M), (BLOCK_M,))
    if PREFETCHES:
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(is_cached[None, :], scores, -float("inf"))
        p, alpha, best, total = add_scores(scores, scale_log2e, best, total)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        begin += BLOCK_N
    if begin < cached_end:
        best, total, acc = attend(
            q,
            k_ptr,
            v_ptr,
            pages_ptr,
            0,
            kv_head,
            begin,
            begin + (cached_end - begin) // BLOCK_N * BLOCK_N,
            cached_end,
            row,
            best,
            total,
            acc,
            scale_log2e,
            KV_STRIDE,
            KV_STRIDE,
            PAGE_SIZE,
            False,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            TAIL_N,
            PRECISION,
        )
    some = tl.where(total > 0, total, 1.0)
    out = acc / some[:, None]
    out_row = seq.to(tl.int64) * Q_HEADS
    if num_parts == 1:
        place = (out_row + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=out_mask)
        return
    partial_row = (first_slot + part) * Q_HEADS + head
    tl.store(lse_ptr + partial_row, best + tl.log2(some), mask=row < GROUP)
    tl.store(partial_ptr + partial_row[:, None] * HEAD_DIM + dim[None, :], out, mask=out_mask)
    tl.debug_barrier()
    arrived_ptr += first_slot * KV_HEADS + kv_head
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") < num_parts - 1:
        return
    # The last to arrive merges all.
    tl.store(arrived_ptr, 0)
    _merge(
        partial_ptr,
        lse_ptr,
        out_ptr,
        first_slot * Q_HEADS + kv_head * GROUP,
        num_parts,
        out_row + kv_head * GROUP,
        Q_HEADS,
        GROUP,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_G,
        MERGED_ROWS // BLOCK_G,
    )


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context: Context,
    scale: float,
    new: NewTokens,
    arrived: torch.Tensor,
) -> torch.Tensor:
    """See ``AttentionBackend.decode``; ``arrived`` is int32 [num_counters], zero between calls."""
    num_seqs, q_heads, head_dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    assert q.stride()[1:] == (head_dim, 1)
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert new.rotation.cos_sin_cache.is_contiguous()
    assert new.k.stride()[1:] == new.v.stride()[1:] == (head_dim, 1)
    assert context.decode_work is not None and context.block_tables is not None
    tile = decode_tile(num_seqs, kv_heads, head_dim, q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_slots = num_partial_slots(kv_heads, tile.num_programs)
    assert arrived.numel() >= num_slots * kv_heads
    partial = out.new_empty(num_slots, q_heads, head_dim, dtype=torch.float32)
    lse = out.new_empty(num_slots, q_heads, dtype=torch.float32)
    group = triton.next_power_of_2(q_heads // kv_heads)
    _decode_kernel[(kv_heads, len(context.decode_work))](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        lse,
        arrived,
        context.block_tables,
        context.decode_work,
        new.rotation.positions,
        new.rotation.cos_sin_cache,
        new.rotation.q_weight,
        new.rotation.k_weight,
        new.k,
        new.v,
        context.slot_mapping,
        new.rotation.eps,
        scale * LOG2_E,
        q.stride(0),
        new.k.stride(0),
        new.v.stride(0),
        context.block_tables.stride(0),
        HAS_NORM=new.rotation.q_weight is not None,
        PREFETCHES=tile.prefetches,
        PAGE_SIZE=page_size,
        ITEM_WORDS=ITEM_WORDS,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=max(16, group),
        BLOCK_N=tile.num_keys,
        TAIL_N=min(tile.num_keys, 64 if tile.num_warps == 4 else 32),  # the faster, measured
        BLOCK_G=group,
        MERGED_ROWS=max(MERGED_ROWS, group),
        PRECISION=precision(q),
        num_warps=tile.num_warps,
        num_stages=2,
        **chained(q),
    )
    return out


def num_counters(kv_heads: int) -> int:
    """Of programs that have ended, of each sequence and KV head."""
    return num_partial_slots(kv_heads, PROGRAMS_OF_FEW) * kv_heads


def decode_tile(num_seqs: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> DecodeTile:
    """How to divide a decode: by the batch size alone, so that a captured graph stays right as
    contexts grow.

    A program mostly waits for its keys, and a multiprocessor hides one's waiting behind the others:
    of many programs it holds the more the smaller they are. With up to 32 query heads a KV head,
    none takes more shared memory than any GPU with bf16 has (72 KiB of 99). Tuned on an H200.
    """
    uncut = num_seqs * kv_heads
    few = uncut < MULTIPROCESSORS
    if dtype is torch.float32:
        return DecodeTile(16, 4, PROGRAMS, few)
    if head_dim > 128:
        return DecodeTile(32, 4, PROGRAMS, few)
    if few:
        return DecodeTile(64, 2, PROGRAMS_OF_FEW, True)
    if uncut < MANY:
        return DecodeTile(128, 4, PROGRAMS, False)
    return DecodeTile(64 if uncut < MOST else 32, 1, PROGRAMS, False)
