"""Decode attention in Triton: one query per sequence attends to the paged keys of its context.

Contexts are split among programs (Flash-Decoding, split_kv.py). The last program of a sequence to
finish combines the partial results, weighted by their log-sum-exps. The query heads that share a KV
head are the columns of one tile, so their keys and values are read once.

The kernel takes queries and keys before RoPE. Each program applies the norm and RoPE to the queries
of its heads. The program with a sequence's last split also applies them to the new key, and stores
the new key and value. In small batches, programmatic dependent launch (PDL) lets programs load
their first keys from the cache while the QKV projection is still running.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache, scale_offset
from nanovllm.kernels.attention.prefix_decode import prefix_attention, prefix_tile
from nanovllm.kernels.attention.prefix_schedule import max_shared_slots, schedule_layout
from nanovllm.kernels.attention.split_kv import (
    KV_SPLIT_WORDS,
    max_num_splits,
    max_partial_slots,
    max_window_splits,
)
from nanovllm.kernels.attention.tiles import (
    CONSTEXPR_LOG2_E,
    LOG2_E,
    add_weighted_pairs,
    as_half,
    as_pairs,
    attend,
    join_pairs,
    load_pair,
    load_scales,
    load_tile,
    norm_and_rope,
    online_softmax_step,
    scale_down,
    scale_up,
    softcap,
    split_pairs,
)
from nanovllm.kernels.fp8 import quantize_tile
from nanovllm.kernels.rope import NewKV
from nanovllm.utils.context import Context
from nanovllm.utils.math import next_power_of_2
from nanovllm.utils.triton_compat import (
    HOPPER_MULTIPROCESSORS,
    MIN_WGMMA_COLUMNS,
    pdl_options,
    register_limit,
    tl,
    triton,
)

NUM_MULTIPROCESSORS = HOPPER_MULTIPROCESSORS  # that the programs of split contexts fill
NUM_REGISTERS = 65536  # of a multiprocessor
MAX_REGISTERS = 255  # of a thread
LARGE_BATCH = 1536  # sequences times KV heads
# Per warp, of the first tile of keys: 64 registers per thread. Values take as many.
MAX_HELD_BYTES = 64 * 4 * 32
SPLIT_WORDS = tl.constexpr(KV_SPLIT_WORDS)


class DecodeTile(NamedTuple):
    """Tile and launch sizes of the decode kernel.

    Attributes:
        num_keys: keys per tile.
        num_warps: warps per program.
        occupancy: programs that a multiprocessor of an H200 runs at once, at least. On other GPUs
            shared memory may allow fewer.
        prefetches: whether a program loads its first tile of keys and values before it waits for
            its query.
    """

    num_keys: int
    num_warps: int
    occupancy: int
    prefetches: bool

    @property
    def num_programs(self) -> int:
        """The number of programs for which contexts are split."""
        return self.occupancy * NUM_MULTIPROCESSORS

    @property
    def num_registers(self) -> int:
        """The most registers per thread that allow the occupancy."""
        return min(NUM_REGISTERS // (32 * self.num_warps * self.occupancy) // 8 * 8, MAX_REGISTERS)

    @property
    def combines_many(self) -> bool:
        """Whether more partial results are combined at once where there are many. Larger tiles and
        programs of one warp were slower with it, also where there are few."""
        return self.occupancy > 3 and self.num_warps > 1


@triton.jit
def _repeat_rows(x, ROWS: tl.constexpr):
    """Repeats the rows of x [N, D] up to [ROWS, D]."""
    N: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[None, :, :], (ROWS // N, N, D)), (ROWS, D))


@triton.jit
def _pin(x):
    """Returns x, and keeps its loads in flight until here. The inline assembly has side effects, so
    the compiler does not move it across ``gdc_wait``, and x stays in registers until then."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False,
        pack=32 // x.dtype.primitive_bitwidth,
    )  # fmt: skip


@triton.jit
def _combine(
    partial_ptr, lse_ptr, num_splits,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Returns the mean of the partial results of one KV head's queries, [group, head_dim], weighted
    by their log-sum-exps. SPLITS of them are loaded at once. The pointers are to those of the first
    split and query."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP)
    member = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    row_max = tl.full([BLOCK_G], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, num_splits, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        exists = (member < GROUP)[:, None] & (splits < num_splits)[None, :]
        row = splits[None, :] * Q_HEADS + member[:, None]
        lse = tl.load(lse_ptr + row, mask=exists, other=-float("inf"), cache_modifier=".cg")
        partial = tl.load(
            partial_ptr + row[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=exists[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        weight, rescale, row_max, row_sum = online_softmax_step(lse, 1.0, row_max, row_sum)
        acc = acc * rescale[:, None] + tl.sum(partial * weight[:, :, None], axis=1)
    return acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scales_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    block_tables_ptr,
    schedule_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    new_k_ptr,
    new_v_ptr,
    slot_mapping_ptr,
    sinks_ptr,
    eps,
    scale_log2e,
    q_stride,
    new_k_stride,
    new_v_stride,
    table_stride,
    PREFETCHES: tl.constexpr,
    HOLDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    COMBINES_MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes one KV head and one KV_SPLIT, a row of the schedule.

    The query heads of the group are columns, as with KEYS_FIRST in ``attend``. They are repeated up
    to BLOCK_M columns, at least the 8 that a tensor core multiplies. Repetitions are not stored.
    BLOCK_G is the size of the group, rounded up to a power of two, and ``member`` is the index of a
    query head in the group. With PREFETCHES, the first tile of keys and values is loaded before the
    wait for the query. With HOLDS, it stays in registers until after the wait.

    partial is fp32 [slots, Q_HEADS, HEAD_DIM]. lse is fp32 [slots, Q_HEADS], in base 2. arrived is
    int32 [slots, KV_HEADS]. It counts the finished programs of a sequence at the sequence's first
    slot, and is zero before and after a launch.
    WINDOW, SOFTCAP and scales are as in ``attend``. In a layer with a window, a sequence's first
    split begins at the start of the tile that has the window's first key. Sinks count in the first
    split.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP)
    BLOCK_M: tl.constexpr = BLOCK_G if BLOCK_G > 8 else 8
    PAIRS: tl.constexpr = scales_ptr is not None and BLOCK_M < 64  # see ``as_pairs``
    kv_head = tl.program_id(0)
    schedule_ptr += tl.program_id(1) * SPLIT_WORDS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # The first use of a loaded value stalls the program and delays all later loads. So independent
    # loads are issued together, here and below.
    seq = tl.load(schedule_ptr)
    begin = tl.load(schedule_ptr + 1)
    end = tl.load(schedule_ptr + 2)
    num_splits = tl.load(schedule_ptr + 3)
    split = tl.load(schedule_ptr + 4)
    first_slot = tl.load(schedule_ptr + 5)
    if num_splits == 0:
        return
    position = tl.load(positions_ptr + seq)
    new_slot = tl.load(slot_mapping_ptr + seq).to(tl.int64)
    has_new = (split == num_splits - 1) & (end > begin)
    cached_end = end - has_new.to(tl.int32)
    window_begin = tl.maximum(position + 1 - WINDOW, 0) if WINDOW else 0
    pages_ptr = block_tables_ptr + seq * table_stride
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    KV_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    if PREFETCHES:
        is_cached = begin + tl.arange(0, BLOCK_N) < cached_end
        if WINDOW:
            is_cached = is_cached & (begin + tl.arange(0, BLOCK_N) >= window_begin)
        mask = is_cached[:, None] & in_head[None, :]
        offset = kv_head * HEAD_DIM + dim
        k = load_tile(
            k_ptr, KV_STRIDE, offset, mask, begin, cached_end, pages_ptr, 0, PAGE_SIZE, BLOCK_N
        )
        if PAIRS:
            pair = tl.arange(0, BLOCK_D // 2)
            mask = is_cached[None, :] & (pair < HEAD_DIM // 2)[:, None]
            v = load_tile(
                as_pairs(v_ptr), KV_STRIDE // 2, kv_head * (HEAD_DIM // 2) + pair, mask,
                begin, cached_end, pages_ptr, 0, PAGE_SIZE, BLOCK_N,
                TRANSPOSED=True,
            )  # fmt: skip
        else:
            mask = is_cached[None, :] & in_head[:, None]
            v = load_tile(
                v_ptr, KV_STRIDE, offset, mask, begin, cached_end, pages_ptr, 0, PAGE_SIZE,
                BLOCK_N, TRANSPOSED=True,
            )  # fmt: skip
        if scales_ptr is not None:
            k_scale, v_scale = load_scales(
                scales_ptr, kv_head, is_cached, begin, cached_end, pages_ptr,
                KV_HEADS, PAGE_SIZE, BLOCK_N,
            )  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + row
    out_mask = (row < GROUP)[:, None] & in_head[None, :]
    member = tl.arange(0, BLOCK_G)
    g_mask = (member < GROUP)[:, None] & in_head[None, :]
    q_row = q_ptr + seq.to(tl.int64) * q_stride + (kv_head * GROUP + member)[:, None] * HEAD_DIM
    k_row = new_k_ptr + seq.to(tl.int64) * new_k_stride + kv_head * HEAD_DIM
    v_row = new_v_ptr + seq.to(tl.int64) * new_v_stride + kv_head * HEAD_DIM
    # q, new_k and new_v are loaded in the same shape, so that they get the same layout. All rows of
    # new_k hold the same key, and all rows of new_v the same value.
    HALF: tl.constexpr = HEAD_DIM // 2
    index = (member * 0)[:, None] + dim[None, :]
    other = tl.where(index < HALF, index + HALF, index - HALF)
    angle = cos_sin_ptr + position * HEAD_DIM + index % HALF
    cos = tl.load(angle, mask=index < HEAD_DIM, other=0.0)
    sin = tl.load(angle + HALF, mask=index < HEAD_DIM, other=0.0)
    sin = tl.where(index < HALF, -sin, sin)
    q_weights = None
    k_weights = None
    if q_weight_ptr is not None:
        q_weights = load_pair(q_weight_ptr, index, other, index < HEAD_DIM)
        k_weights = load_pair(k_weight_ptr, index, other, index < HEAD_DIM)
    if sinks_ptr is not None:
        sink_mask = row < (split == 0).to(tl.int32) * GROUP
        sinks = tl.load(sinks_ptr + head, mask=sink_mask, other=-float("inf")) * CONSTEXPR_LOG2_E
    # Everything loaded so far was written before the first layer began, some of it in this step
    # (block tables, inputs). Kernels of this layer write q, new_k and new_v.
    if PDL:
        tl.extra.cuda.gdc_wait()

    q_pair = load_pair(q_row, index, other, g_mask)
    # A program without a new key loads none: this mask is then false everywhere. A scalar mask
    # would be simpler, but Triton's interpreter does not support it.
    new_mask = g_mask & (index < has_new.to(tl.int32) * HEAD_DIM)
    new_k_pair = load_pair(k_row, index, other, new_mask)
    new_v = tl.load(v_row + index, mask=new_mask, other=0.0)
    if PDL and HOLDS:
        # Otherwise the compiler would copy k and v to shared memory before ``gdc_wait``, and wait
        # for them there.
        k = _pin(k)
        v = _pin(v)
        if scales_ptr is not None:
            k_scale = _pin(k_scale)
            v_scale = _pin(v_scale)
    q = norm_and_rope(q_pair, q_weights, cos, sin, eps, HEAD_DIM)
    row_max = tl.full([BLOCK_G], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    stored_v = new_v
    if scales_ptr is not None:
        stored_v, new_v_scale = quantize_tile(new_v)
        new_v = stored_v.to(tl.float32) * new_v_scale
    acc = _repeat_rows(new_v.to(tl.float32), BLOCK_M)
    if has_new:
        new_k = norm_and_rope(new_k_pair, k_weights, cos, sin, eps, HEAD_DIM)
        stored_k = new_k
        if scales_ptr is not None:
            stored_k, new_k_scale = quantize_tile(new_k)
            new_k = stored_k.to(tl.float32) * new_k_scale
        row_max = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1) * scale_log2e
        if SOFTCAP is not None:
            row_max = softcap(row_max, SOFTCAP)
        row_sum += 1.0
        cache_offset = new_slot * KV_STRIDE + kv_head * HEAD_DIM + index
        if new_slot >= 0:
            tl.store(k_ptr + cache_offset, stored_k, mask=(member == 0)[:, None] & in_head[None, :])
            tl.store(v_ptr + cache_offset, stored_v, mask=(member == 0)[:, None] & in_head[None, :])
            if scales_ptr is not None:
                block, slot = new_slot // PAGE_SIZE, new_slot % PAGE_SIZE
                k_scales = scales_ptr + scale_offset(block, slot, kv_head, KV_HEADS, PAGE_SIZE)
                k_scales += (member * 0)[:, None]
                is_first = (member == 0)[:, None]
                tl.store(k_scales, new_k_scale, mask=is_first)
                tl.store(k_scales + KV_HEADS * PAGE_SIZE, new_v_scale, mask=is_first)
    q = _repeat_rows(q, BLOCK_M)
    q, acc = tl.trans(q), tl.trans(acc)
    if scales_ptr is not None:
        q = as_half(q)
    row_max = tl.reshape(_repeat_rows(row_max[:, None], BLOCK_M), (BLOCK_M,))
    if sinks_ptr is not None:
        _, alpha, row_max, row_sum = online_softmax_step(sinks[:, None], 1.0, row_max, row_sum)
        acc *= alpha[None, :]
    if PREFETCHES:
        if scales_ptr is not None:
            k = k.to(q.dtype)
        scores = tl.dot(k, q, input_precision="ieee")
        if scales_ptr is not None:
            scores *= k_scale[:, None]
        if SOFTCAP is not None:
            scores = softcap(scores * scale_log2e, SOFTCAP)
        scores = tl.where(is_cached[:, None], scores, -float("inf"))
        p, alpha, row_max, row_sum = online_softmax_step(
            scores, 1.0 if SOFTCAP is not None else scale_log2e, row_max, row_sum, KEYS_FIRST=True
        )
        acc *= alpha[None, :]
        if scales_ptr is not None:
            p *= v_scale[:, None]
            acc = scale_up(acc)
        if PAIRS:
            even, odd = split_pairs(acc, KEYS_FIRST=True)
            even, odd = add_weighted_pairs(p.to(q.dtype), v, even, odd, KEYS_FIRST=True)
            acc = join_pairs(even, odd, KEYS_FIRST=True)
        else:
            if scales_ptr is not None:
                v = v.to(q.dtype)
            acc = tl.dot(v, p.to(v.dtype), acc, input_precision="ieee")
        if scales_ptr is not None:
            acc = scale_down(acc)
        begin += BLOCK_N
    if begin < cached_end:
        row_max, row_sum, acc = attend(
            q,
            k_ptr,
            v_ptr,
            pages_ptr,
            0,
            kv_head,
            begin,
            begin + (cached_end - begin) // BLOCK_N * BLOCK_N,
            cached_end,
            None,
            row_max,
            row_sum,
            acc,
            scale_log2e,
            KV_STRIDE,
            KV_STRIDE,
            window_begin,
            window_begin,
            PAGE_SIZE,
            HEAD_DIM,
            BLOCK_N,
            TAIL_N,
            WINDOW,
            SOFTCAP,
            scales_ptr,
            KV_HEADS,
            KEYS_FIRST=True,
        )
    safe_sum = tl.where(row_sum > 0, row_sum, 1.0)
    out = tl.trans(acc / safe_sum[None, :])
    out_row = seq.to(tl.int64) * Q_HEADS
    if num_splits == 1:
        out_offset = (out_row + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=out_mask)
        return
    partial_row = (first_slot + split) * Q_HEADS + head
    tl.store(lse_ptr + partial_row, row_max + tl.log2(safe_sum), mask=row < GROUP)
    tl.store(partial_ptr + partial_row[:, None] * HEAD_DIM + dim[None, :], out, mask=out_mask)
    tl.debug_barrier()
    arrived_ptr += first_slot * KV_HEADS + kv_head
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") < num_splits - 1:
        return
    # The last program to arrive combines the splits.
    tl.store(arrived_ptr, 0)
    first_row = first_slot * Q_HEADS + kv_head * GROUP
    partial_ptr += first_row * HEAD_DIM
    lse_ptr += first_row
    out_row = out_row + kv_head * GROUP
    # The number of splits that are combined at once.
    FEW: tl.constexpr = 32 // BLOCK_G if BLOCK_G < 32 else 1
    MANY: tl.constexpr = triton.cdiv(64 * 128, BLOCK_G * BLOCK_D)
    if COMBINES_MANY and MANY > FEW:
        if num_splits > FEW:
            mean = _combine(partial_ptr, lse_ptr, num_splits, MANY, GROUP, Q_HEADS, HEAD_DIM)
        else:
            mean = _combine(partial_ptr, lse_ptr, num_splits, FEW, GROUP, Q_HEADS, HEAD_DIM)
    else:
        mean = _combine(partial_ptr, lse_ptr, num_splits, FEW, GROUP, Q_HEADS, HEAD_DIM)
    out_offset = (out_row + member)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + out_offset, mean.to(out_ptr.dtype.element_ty), mask=g_mask)


def decode_attention(
    q: Tensor,
    cache: KVCache,
    context: Context,
    params: AttentionParams,
    new: NewKV,
    arrived: Tensor,
) -> Tensor:
    """See ``AttentionBackend.decode``.

    Args:
        arrived: int32, a counter for each slot of ``num_partial_slots`` and KV head, zero before
            and after.
    """
    num_seqs, q_heads, head_dim = q.shape
    page_size, kv_heads = cache.k.shape[1:3]
    assert q.stride()[1:] == (head_dim, 1)
    assert cache.k.is_contiguous() and cache.v.is_contiguous()
    assert cache.scales is None or cache.scales.is_contiguous()
    assert new.rope.cos_sin_cache.is_contiguous()
    assert new.k.stride()[1:] == new.v.stride()[1:] == (head_dim, 1)
    assert context.split_kv_schedule is not None and context.block_tables is not None
    tile = decode_tile(num_seqs, q_heads, kv_heads, head_dim, q.dtype, cache.scales is not None)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_slots = num_partial_slots(q, cache, context, params.window)
    assert arrived.numel() >= num_slots * kv_heads
    partial = out.new_empty(num_slots, q_heads, head_dim, dtype=torch.float32)
    lse = out.new_empty(num_slots, q_heads, dtype=torch.float32)
    num_splits = max_num_splits(num_seqs, kv_heads, tile.num_programs)
    num_rows = len(context.split_kv_schedule)
    assert num_rows >= num_splits, "the schedule is for another tile"
    if shares_prefixes(context, params.window, num_splits):
        shared_tile = prefix_tile(q_heads, kv_heads, head_dim, q.dtype)
        layout = schedule_layout(num_seqs, kv_heads, num_splits, shared_tile)
        assert num_rows == layout.num_rows, "the schedule is for another tile"
        prefix_attention(q, cache, context, params, new.rope, layout, partial, lse, arrived)
    if params.window is not None:  # the schedule's unused rows, which come last, need no programs
        num_splits = min(num_splits, num_seqs * max_window_splits(params.window, tile.num_keys))
    tile_bytes = tile.num_keys * head_dim * cache.k.itemsize
    _decode_kernel[(kv_heads, num_splits)](
        q,
        cache.k,
        cache.v,
        cache.scales,
        out,
        partial,
        lse,
        arrived,
        context.block_tables,
        context.split_kv_schedule,
        new.rope.positions,
        new.rope.cos_sin_cache,
        new.rope.q_weight,
        new.rope.k_weight,
        new.k,
        new.v,
        context.slot_mapping,
        params.sinks,
        new.rope.eps,
        params.scale * LOG2_E,
        q.stride(0),
        new.k.stride(0),
        new.v.stride(0),
        context.block_tables.stride(0),
        PREFETCHES=tile.prefetches,
        HOLDS=tile.prefetches and tile_bytes <= MAX_HELD_BYTES * tile.num_warps,
        PAGE_SIZE=page_size,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_N=tile.num_keys,
        TAIL_N=min(tile.num_keys, 64 if tile.num_warps == 4 else 32),  # tuned on an H200
        WINDOW=params.window or 0,
        SOFTCAP=None if params.softcap is None else params.softcap * LOG2_E,
        COMBINES_MANY=tile.combines_many,
        num_warps=tile.num_warps,
        num_stages=2,
        **register_limit(tile.num_registers),
        **pdl_options(q),
    )
    return out


def num_partial_slots(q: Tensor, cache: KVCache, context: Context, window: int | None) -> int:
    """Returns the number of slots for the partial results of a layer's decode attention.

    Args:
        q: [num_seqs, heads, head_dim].
        window: the layer's window.
    """
    num_seqs, q_heads, head_dim = q.shape
    kv_heads, is_quantized = cache.k.size(2), cache.scales is not None
    tile = decode_tile(num_seqs, q_heads, kv_heads, head_dim, q.dtype, is_quantized)
    num_programs = tile.num_programs
    if shares_prefixes(context, window, max_num_splits(num_seqs, kv_heads, num_programs)):
        shared_tile = prefix_tile(q_heads, kv_heads, head_dim, q.dtype)
        return max_shared_slots(num_seqs, kv_heads, num_programs, shared_tile)
    return max_partial_slots(kv_heads, num_programs)


def shares_prefixes(context: Context, window: int | None, num_splits: int) -> bool:
    """Whether the schedule may have shared prefixes, after its ``num_splits`` rows of KV splits.
    Layers with a window share none."""
    assert context.split_kv_schedule is not None
    return window is None and len(context.split_kv_schedule) > num_splits


def decode_tile(
    num_seqs: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    is_quantized: bool,
) -> DecodeTile:
    """Chooses tile and launch sizes.

    They depend on the batch size but not on context lengths, so that a CUDA graph stays valid as
    contexts grow. A program mostly waits for its keys, and other programs on its multiprocessor
    hide this latency. Large batches with heads of up to 128 use programs of one warp, because a
    multiprocessor holds more of them. Small batches have few programs, so what counts is how long
    each one takes. The smallest ones have small tiles. Programs of small batches with large tiles
    have four warps, unless Triton would then use wgmma and twice the shared memory. With a
    quantised cache those with small tiles have four too. In medium batches, programs with tiles of
    128 keys have four if heads have up to 64 dimensions, or 128 and a quantised cache. With heads
    of up to 64 dimensions, more batches count as small, because a program has less to do. The
    occupancy is the largest one for which a program has enough registers, with two exceptions that
    were faster: 3 for small tiles of FP8 keys for 8 or more query heads, and for programs of four
    warps with heads of up to 64 dimensions in medium batches.

    With up to 32 query heads per KV head, a program needs at most 84 KiB of shared memory (72 KiB
    with Triton 3.6), and every GPU with bf16 has 99 KiB. The sizes were tuned on an H200, in whole
    decode steps.
    """
    num_unsplit = num_seqs * kv_heads  # number of programs if no context is split
    has_small_heads = head_dim <= 64
    is_small = num_unsplit < HOPPER_MULTIPROCESSORS * (2 if has_small_heads else 1)
    num_keys, num_warps = 128, 2
    if dtype is torch.float32:
        num_keys = 16
    elif head_dim > 128 or (num_unsplit <= 32 and not has_small_heads):
        num_keys = 64
    elif num_unsplit >= LARGE_BATCH:
        num_keys, num_warps = 64, 1
    group = q_heads // kv_heads
    has_work_for_four = is_small and (is_quantized or num_keys > 64 or head_dim > 128)
    has_work_for_four |= num_keys == 128 and (has_small_heads or (is_quantized and head_dim == 128))
    if has_work_for_four and dtype is not torch.float32:
        num_warps = 4 if max(8, next_power_of_2(group)) < MIN_WGMMA_COLUMNS else 2
    if num_keys * head_dim > 64 * 128:
        occupancy = 2 if head_dim > 128 and num_warps == 4 else 3
    elif has_small_heads:
        occupancy = 3 if num_warps == 4 and not is_small else 4
    else:
        occupancy = 3 if is_quantized and group >= 8 and head_dim == 128 else 4
    return DecodeTile(num_keys, num_warps, occupancy, is_small)
