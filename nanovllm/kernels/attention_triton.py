"""Paged attention in Triton, for any GPU that Triton serves.

FlashAttention-2's online softmax (arXiv:2307.08691) over tiles of queries; the query heads that
share a KV head are packed as rows of one tile, so their keys and values are read once. The contexts
of a decode are divided among programs (decode_work.py); of those of one sequence, the last to end
merges all partial results by their log-sum-exps (Flash-Decoding).

A decode takes queries and keys as the projection gives them. Each program normalises and rotates
the queries of its heads; the one with a sequence's last part does so with the new key too, and
stores it. With programmatic dependent launch, the first keys of few contexts are requested while
the projection is still running: they have been cached by steps before.
"""

from typing import Any

import numpy as np
import torch

from nanovllm.kernels.compat import chained, shared_memory, tl, triton
from nanovllm.kernels.decode_work import ITEM_WORDS, NUM_PROGRAMS, divide_decode, num_partial_slots
from nanovllm.kernels.rope import NewTokens
from nanovllm.utils.context import Context

LOG2_E = 1.4426950408889634
MERGED_ROWS = 32  # partial results that are read at once, of all heads of a group


@triton.jit
def _attend(
    q,
    k_ptr,
    v_ptr,
    pages_ptr,
    k_start,
    kv_head,
    begin,
    middle,
    end,
    position,
    best,
    total,
    acc,
    scale_log2e,
    k_stride,
    v_stride,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds keys [begin, end) to the softmax of the rows of q: tiles up to ``middle``, which all
    rows see, need no mask; the rest does, by ``end`` and, if CAUSAL, by each row's ``position``.
    PAGE_SIZE is 0 for keys and values that are not paged."""
    dim = tl.arange(0, BLOCK_D)
    for MASKED in tl.static_range(2):
        first = middle if MASKED else begin
        for n in tl.range(first, end if MASKED else middle, TAIL_N if MASKED else BLOCK_N):
            key = n + tl.arange(0, TAIL_N if MASKED else BLOCK_N)
            kv_mask = (dim < HEAD_DIM)[None, :]
            if MASKED:
                kv_mask = (key < end)[:, None] & kv_mask
            offset = kv_head * HEAD_DIM + dim
            k_tile = _tile(
                k_ptr, k_stride, offset, n, end, pages_ptr, k_start, PAGE_SIZE,
                TAIL_N if MASKED else BLOCK_N,
            )  # fmt: skip
            k = tl.load(k_tile, mask=kv_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if MASKED:
                visible = (key < end)[None, :]
                if CAUSAL:
                    visible = visible & (key[None, :] <= position[:, None])
                scores = tl.where(visible, scores, -float("inf"))
            p, alpha, best, total = _add_scores(scores, scale_log2e, best, total)
            v_tile = _tile(
                v_ptr, v_stride, offset, n, end, pages_ptr, k_start, PAGE_SIZE,
                TAIL_N if MASKED else BLOCK_N,
            )  # fmt: skip
            v = tl.load(v_tile, mask=kv_mask, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return best, total, acc


@triton.jit
def _tile(
    ptr, stride, offset, n, end, pages_ptr, k_start, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Pointers to the tile of tokens [n, n + BLOCK_N), of which those from ``end`` on do not
    count."""
    column = tl.arange(0, BLOCK_N)
    if PAGE_SIZE == 0:
        first = (k_start + n).to(tl.int64)
        tile = ptr + first * stride + (column[:, None] * stride + offset[None, :])
    elif PAGE_SIZE % BLOCK_N == 0:  # in one page, as n is a multiple of the tile
        page = tl.load(pages_ptr + n // PAGE_SIZE)
        first = page.to(tl.int64) * PAGE_SIZE + n % PAGE_SIZE
        tile = ptr + first * stride + (column[:, None] * stride + offset[None, :])
    else:
        key = n + column
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=key < end, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        tile = ptr + slot[:, None] * stride + offset[None, :]
    return tile


@triton.jit
def _add_scores(scores, scale, best, total):
    """A step of the online softmax: weights, the factor of what was summed before, and the new
    largest score (scaled) and total."""
    new_best = tl.maximum(best, tl.max(scores, axis=1) * scale)
    # A row that has seen nothing yet keeps -inf; 0 in its place avoids inf - inf.
    shift = tl.where(new_best == -float("inf"), 0.0, new_best)
    p = tl.exp2(scores * scale - shift[:, None])
    alpha = tl.exp2(best - shift)
    return p, alpha, new_best, total * alpha + tl.sum(p, axis=1)


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    block_tables_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    scale_log2e,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of a tile: row r is query token r // GROUP of the tile, head r % GROUP of the group.

    k and v are the paged caches [blocks x PAGE_SIZE, KV_HEADS, HEAD_DIM] or, where that is 0, the
    step's own [N, KV_HEADS, HEAD_DIM].
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    seq = tl.program_id(1)
    kv_head = tl.program_id(2)
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    len_q = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    k_start = tl.load(cu_seqlens_k_ptr + seq)
    len_k = tl.load(cu_seqlens_k_ptr + seq + 1) - k_start
    # The last tiles, which attend to most, start first.
    TILE: tl.constexpr = BLOCK_M // GROUP
    tile = tl.cdiv(len_q, TILE) - 1 - tl.program_id(0)
    if tile < 0:
        return

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
    _, total, acc = _attend(
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
        tl.full([BLOCK_M], -float("inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        scale_log2e,
        k_stride,
        v_stride,
        PAGE_SIZE,
        True,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        TAIL_N,
        PRECISION,
    )
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_row = (q_start + token).to(tl.int64) * Q_HEADS + head
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=q_mask,
    )


@triton.jit
def _rotated(
    x_tile, other_tile, mask, weight, other_weight, cos, sin, eps, HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Heads, a row each, normalised and rotated as in rope.py: each element with its other, half a
    head away, for which ``sin`` has the sign."""
    x = tl.load(x_tile, mask=mask, other=0.0)
    other = tl.load(other_tile, mask=mask, other=0.0)
    x32 = x.to(tl.float32)
    other32 = other.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x32 * x32, axis=1) / HEAD_DIM + eps)[:, None]
        # Rounded where the separate norm would round.
        x32 = ((x32 * scale).to(x.dtype) * weight).to(tl.float32)
        other32 = ((other32 * scale).to(x.dtype) * other_weight).to(tl.float32)
    return (x32 * cos + other32 * sin).to(x.dtype)


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
        weight, alpha, best, total = _add_scores(lse, 1.0, best, total)
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
    ROTATES: tl.constexpr,
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
    query heads of the group.

    partial is fp32 [slots, Q_HEADS, HEAD_DIM], lse [slots, Q_HEADS], in base 2, and arrived int32
    [slots, KV_HEADS], zero before and after.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    work_ptr += tl.program_id(1) * ITEM_WORDS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_parts = tl.load(work_ptr + 3)
    if num_parts == 0:
        return
    seq = tl.load(work_ptr)
    begin = tl.load(work_ptr + 1)
    end = tl.load(work_ptr + 2)
    part = tl.load(work_ptr + 4)
    first_slot = tl.load(work_ptr + 5)
    has_new = (part == num_parts - 1) & (end > begin)
    cached_end = end - has_new.to(tl.int32) if ROTATES else end
    pages_ptr = block_tables_ptr + seq * table_stride
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    KV_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    if PREFETCHES:
        is_cached = begin + tl.arange(0, BLOCK_N) < cached_end
        mask = is_cached[:, None] & in_head[None, :]
        offset = kv_head * HEAD_DIM + dim
        k_tile = _tile(
            k_ptr, KV_STRIDE, offset, begin, cached_end, pages_ptr, 0, PAGE_SIZE, BLOCK_N
        )
        k = tl.load(k_tile, mask=mask, other=0.0)
        v_tile = _tile(
            v_ptr, KV_STRIDE, offset, begin, cached_end, pages_ptr, 0, PAGE_SIZE, BLOCK_N
        )
        v = tl.load(v_tile, mask=mask, other=0.0)
    row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + row
    q_mask = (row < GROUP)[:, None] & in_head[None, :]
    q_tile = q_ptr + seq.to(tl.int64) * q_stride + head[:, None] * HEAD_DIM
    if ROTATES:
        # All tiles have one shape, and with it one layout: a key's rows are all the same.
        HALF: tl.constexpr = HEAD_DIM // 2
        this = (row * 0)[:, None] + dim[None, :]
        other = tl.where(this < HALF, this + HALF, this - HALF)
        angle = cos_sin_ptr + tl.load(positions_ptr + seq) * HEAD_DIM + this % HALF
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

    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if ROTATES:
        q = _rotated(
            q_tile + this, q_tile + other, q_mask, q_weight, other_q_weight, cos, sin, eps,
            HEAD_DIM, HAS_NORM,
        )  # fmt: skip
        if has_new:
            k_row = new_k_ptr + seq.to(tl.int64) * new_k_stride + kv_head * HEAD_DIM
            v_row = new_v_ptr + seq.to(tl.int64) * new_v_stride + kv_head * HEAD_DIM
            new_v = tl.load(v_row + this, mask=q_mask, other=0.0)
            new_k = _rotated(
                k_row + this, k_row + other, q_mask, k_weight, other_k_weight, cos, sin, eps,
                HEAD_DIM, HAS_NORM,
            )  # fmt: skip
            best = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1) * scale_log2e
            total += 1.0
            acc += new_v.to(tl.float32)
            new_slot = tl.load(slot_mapping_ptr + seq).to(tl.int64)
            place = new_slot * KV_STRIDE + kv_head * HEAD_DIM + this
            if new_slot >= 0:
                tl.store(k_ptr + place, new_k, mask=(row == 0)[:, None] & in_head[None, :])
                tl.store(v_ptr + place, new_v, mask=(row == 0)[:, None] & in_head[None, :])
    else:
        q = tl.load(q_tile + dim[None, :], mask=q_mask, other=0.0)
    if PREFETCHES:
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(is_cached[None, :], scores, -float("inf"))
        p, alpha, best, total = _add_scores(scores, scale_log2e, best, total)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        begin += BLOCK_N
    best, total, acc = _attend(
        q,
        k_ptr,
        v_ptr,
        pages_ptr,
        0,
        kv_head,
        begin,
        begin + tl.maximum(cached_end - begin, 0) // BLOCK_N * BLOCK_N,
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
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=q_mask)
        return
    partial_row = (first_slot + part) * Q_HEADS + head
    tl.store(lse_ptr + partial_row, best + tl.log2(some), mask=row < GROUP)
    tl.store(partial_ptr + partial_row[:, None] * HEAD_DIM + dim[None, :], out, mask=q_mask)
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


class TritonAttention:
    """This project's own kernels: fp16, bf16 and fp32, any block size, head dims up to 256."""

    name = "triton"
    capturable = True
    rotates = True

    def __init__(self) -> None:
        # Programs of each sequence that have ended; one step's, so one backend's.
        self._arrived: torch.Tensor | None = None

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
        q_heads, head_dim = q.shape[1:]
        kv_heads = k.size(1)
        tables = context.block_tables
        if tables is not None:
            assert k_cache.is_contiguous() and v_cache.is_contiguous()
            k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
        assert context.cu_seqlens_q is not None
        group, wide = q_heads // kv_heads, head_dim > 128
        # fp32 has no tensor cores: its products unroll into long code, kept short by small tiles.
        exact = q.dtype is torch.float32
        roomy = not (wide or exact) and shared_memory(q.device) >= 200 << 10
        block_m = max(16 if exact else 64 if wide else 128, triton.next_power_of_2(group))
        block_n = 16 if exact else 32 if wide else 128 if roomy else 64
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_tiles = triton.cdiv(context.max_seqlen_q, block_m // group)
        _prefill_kernel[(num_tiles, len(context.cu_seqlens_q) - 1, kv_heads)](
            q,
            k,
            v,
            out,
            tables,
            context.cu_seqlens_q,
            context.cu_seqlens_k,
            scale * LOG2_E,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            tables.stride(0) if tables is not None else 0,
            PAGE_SIZE=k_cache.size(1) if tables is not None else 0,
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            TAIL_N=min(block_n, 64),
            PRECISION=_precision(q),
            num_warps=4 if wide or exact else 8,
            num_stages=3 if roomy else 2,
            **chained(q),
        )
        return out

    def plan_decode(
        self, context_lens: np.ndarray, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> np.ndarray:
        tile, _ = _decode_tile(len(context_lens), kv_heads, head_dim, dtype)
        return divide_decode(context_lens, kv_heads, tile)

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
        new: NewTokens | None = None,
    ) -> torch.Tensor:
        num_seqs, q_heads, head_dim = q.shape
        page_size, kv_heads = k_cache.shape[1:3]
        assert q.stride()[1:] == (head_dim, 1)
        assert k_cache.is_contiguous() and v_cache.is_contiguous()
        assert context.decode_work is not None and context.block_tables is not None
        if self._arrived is None:
            num_counters = num_partial_slots(kv_heads) * kv_heads
            self._arrived = torch.zeros(num_counters, dtype=torch.int32, device=q.device)
        tile, prefetches = _decode_tile(num_seqs, kv_heads, head_dim, q.dtype)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_slots = num_partial_slots(kv_heads)
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
            self._arrived,
            context.block_tables,
            context.decode_work,
            *_rotation_arguments(new, context),
            scale * LOG2_E,
            q.stride(0),
            0 if new is None else new.k.stride(0),
            0 if new is None else new.v.stride(0),
            context.block_tables.stride(0),
            ROTATES=new is not None,
            HAS_NORM=new is not None and new.rotation.q_weight is not None,
            PREFETCHES=prefetches,
            PAGE_SIZE=page_size,
            ITEM_WORDS=ITEM_WORDS,
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_M=max(16, group),
            BLOCK_N=tile,
            TAIL_N=min(tile, 64),
            BLOCK_G=group,
            MERGED_ROWS=max(MERGED_ROWS, group),
            PRECISION=_precision(q),
            num_warps=4,
            num_stages=2,
            **chained(q),
        )
        return out


def _decode_tile(
    num_seqs: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[int, bool]:
    """Keys in a tile of a decode, and whether to have the first one early. By the batch size
    alone, so that a captured graph stays right as contexts grow."""
    few = num_seqs * kv_heads < NUM_PROGRAMS // 2
    if dtype is torch.float32:
        return 16, few
    return 32 if head_dim > 128 else 64 if few else 128, few


def _rotation_arguments(new: NewTokens | None, context: Context) -> tuple[Any, ...]:
    if new is None:
        return (*[None] * 7, 0.0)
    rotation = new.rotation
    return (
        rotation.positions,
        rotation.cos_sin_cache,
        rotation.q_weight,
        rotation.k_weight,
        new.k,
        new.v,
        context.slot_mapping,
        rotation.eps,
    )


def _precision(q: torch.Tensor) -> str:
    """fp32 stays fp32: the tensor cores' default, tf32, keeps 10 bits."""
    return "ieee" if q.dtype is torch.float32 else "tf32"
