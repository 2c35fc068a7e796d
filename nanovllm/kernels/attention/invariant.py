"""Batch-invariant attention in Triton: the bits of a token's result are the same in a prefill, in a
chunk of any size and in a decode step, whatever else is in the batch.

- A context is cut into splits of SPLIT keys at fixed positions, and a split into tiles of BLOCK_N
  keys. The online softmax (see ``tiles.py``) runs over the tiles of a split in order, and starts
  anew with each split.
- The results of the splits are merged in order, always by ``_merge``. In a prefill, one program
  computes all splits of its queries and merges each one when it is complete. In a decode, several
  programs share a context, and the last one to finish merges their results.
- Both kernels, that of ``prefill.py`` and ``_invariant_decode_kernel``, call ``attend_in_splits``
  with the same tile sizes, so the same instructions compute a row. A decode has few rows per KV
  head, and pads its tile with zeros.
- A row ignores keys that it must not see: their weights are exactly 0, and so are products with
  them. So a tile or a split without visible keys changes nothing, and may be skipped.

The new keys and values of a decode are in the cache before attention, as those of a prefill are. If
the cache is quantised, prefills read it too, so a token attends to the same FP8 numbers everywhere.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.kernels.attention import fixed_schedule
from nanovllm.kernels.attention.base import AttentionBackend, AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.prefill import PrefillTile, launch_prefill
from nanovllm.kernels.attention.prefix_schedule import SharedPrefixes
from nanovllm.kernels.attention.split_kv import KV_SPLIT_WORDS
from nanovllm.kernels.attention.tiles import (
    CONSTEXPR_LOG2_E,
    LOG2_E,
    as_half,
    load_scales,
    load_tile,
    scale_down,
    tanh,
)
from nanovllm.kernels.rope import NewKV
from nanovllm.utils.context import Context
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import (
    HOPPER_MULTIPROCESSORS,
    pdl_options,
    prefetch_l2,
    shared_memory,
    tl,
    triton,
)

SPLIT_WORDS = tl.constexpr(KV_SPLIT_WORDS)
# Decode programs beyond one per sequence and KV head. Two fit a multiprocessor.
NUM_PROGRAMS = 2 * HOPPER_MULTIPROCESSORS
MERGED_AT_ONCE = tl.constexpr(8)  # partial results that are loaded together


class Tile(NamedTuple):
    """Tile and launch sizes of both kernels. All but the stages may change the result's bits.

    Attributes:
        num_rows: BLOCK_M, rows of queries: tokens times query heads that share a KV head.
        num_keys: BLOCK_N, keys per iteration. It divides SPLIT.
        num_warps: warps per program.
        num_stages: pipeline stages for keys that are not paged.
    """

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int

    def stages(self, is_paged: bool) -> int:
        """Returns the number of pipeline stages. Before paged keys, their page's number is loaded,
        which takes as many stages."""
        return 2 * self.num_stages - 1 if is_paged else self.num_stages


def choose_tile(group: int, head_dim: int, dtype: torch.dtype, shared_memory: int) -> Tile:
    """Chooses tile and launch sizes, the same for prefill and decode.

    Args:
        group: query heads per KV head.
        head_dim: size of a head.
        dtype: of queries, keys and values.
        shared_memory: the most that one program can use, in bytes.
    """
    if dtype is torch.float32:  # no tensor cores: small tiles keep the unrolled code short
        tile = Tile(16, 16, 4, 2)
    elif head_dim > 128:
        tile = Tile(64, 16, 8, 3)
    elif shared_memory < 200 << 10:
        tile = Tile(64, 32, 4, 2)
    else:
        tile = Tile(64, 64, 4, 3)
    return tile._replace(num_rows=max(tile.num_rows, next_power_of_2(group)))


@triton.jit
def _softmax_step(scores, scale, row_max, row_sum):
    """Adds a tile of scores to the online softmax, as ``tiles.online_softmax_step`` does.

    Additions of products are explicit FMAs here, in ``_merge`` and in ``tanh``, because the
    compiler could fuse them in one kernel or loop and not in another.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    # A row whose scores are all masked so far has maximum -inf. Shifting by 0 avoids inf - inf.
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    p = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
    alpha = tl.exp2(row_max - shift)
    return p, alpha, new_max, tl.fma(row_sum, alpha, tl.sum(p, axis=1))


@triton.jit
def _merge(total_max, total_sum, total, row_max, row_sum, acc):
    """Adds a split's maxima, sums and weighted values to those of the splits before it. A split
    without visible keys has maximum -inf and sums of 0, and changes nothing."""
    new_max = tl.maximum(total_max, row_max)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    alpha, beta = tl.exp2(total_max - shift), tl.exp2(row_max - shift)
    total = tl.fma(acc, beta[:, None], total * alpha[:, None])
    return new_max, tl.fma(row_sum, beta, total_sum * alpha), total


@triton.jit
def attend_in_splits(
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
    total_max,
    total_sum,
    total,
    scale_log2e,
    k_stride,
    v_stride,
    window_begin,
    window_full,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    scales_ptr,
    KV_HEADS: tl.constexpr,
):
    """Lets the rows of q attend to keys [begin, end), and merges each split into the totals.

    ``begin`` is a multiple of BLOCK_N. The arguments are those of ``tiles.attend``.
    """
    if scales_ptr is not None:
        q = as_half(q)
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    dim = tl.arange(0, BLOCK_D)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full = begin
    if WINDOW:
        begin = tl.maximum(begin, window_begin // BLOCK_N * BLOCK_N)
        middle = tl.maximum(begin, middle)
        full = tl.minimum(tl.maximum(begin, tl.cdiv(window_full, BLOCK_N) * BLOCK_N), middle)
    for PART in tl.static_range(0 if WINDOW else 1, 3):  # the window's start, the middle, the end
        first = middle if PART == 2 else full if PART == 1 else begin
        last = end if PART == 2 else middle if PART == 1 else full
        for n in tl.range(first, last, BLOCK_N):
            if n % SPLIT == 0:
                if scales_ptr is not None:
                    acc = scale_down(acc)
                total_max, total_sum, total = _merge(
                    total_max, total_sum, total, row_max, row_sum, acc
                )
                row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
                row_sum = tl.zeros([BLOCK_M], tl.float32)
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            key = n + tl.arange(0, BLOCK_N)
            kv_mask = (dim < HEAD_DIM)[None, :]
            if PART != 1:
                exists = key < end
                if WINDOW:
                    exists = exists & (key >= window_begin)
                kv_mask = exists[:, None] & kv_mask
            offset = kv_head * HEAD_DIM + dim
            k = load_tile(
                k_ptr, k_stride, offset, kv_mask, n, end, pages_ptr, k_start, PAGE_SIZE, BLOCK_N
            )
            if scales_ptr is not None:
                scale_mask = key < end
                if PART != 1:
                    scale_mask = exists
                k_scale, v_scale = load_scales(
                    scales_ptr, kv_head, scale_mask, n, end, pages_ptr, KV_HEADS, PAGE_SIZE, BLOCK_N
                )
                k = k.to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if scales_ptr is not None:
                scores *= k_scale[None, :]
            if SOFTCAP is not None:  # the softmax multiplies by SOFTCAP
                scores = tanh(scores * scale_log2e * (1.0 / SOFTCAP))
            if PART != 1:
                visible = exists[None, :] & (key[None, :] <= position[:, None])
                if WINDOW:
                    visible = visible & (key[None, :] > position[:, None] - WINDOW)
                scores = tl.where(visible, scores, -float("inf"))
            p, alpha, row_max, row_sum = _softmax_step(
                scores, scale_log2e if SOFTCAP is None else SOFTCAP, row_max, row_sum
            )
            v = load_tile(
                v_ptr, v_stride, offset, kv_mask, n, end, pages_ptr, k_start, PAGE_SIZE, BLOCK_N
            )
            if scales_ptr is not None:
                p *= v_scale[None, :]
                v = v.to(q.dtype)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    if scales_ptr is not None:
        acc = scale_down(acc)
    return _merge(total_max, total_sum, total, row_max, row_sum, acc)


@triton.jit(do_not_specialize=["table_stride"])
def _invariant_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scales_ptr,
    out_ptr,
    partial_ptr,
    max_ptr,
    sum_ptr,
    arrived_ptr,
    block_tables_ptr,
    schedule_ptr,
    context_lens_ptr,
    sinks_ptr,
    scale_log2e,
    q_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes one KV head of every ``num_programs``-th row of the schedule.

    FEW is for few sequences, when a program's own latency matters more than the memory's bandwidth.
    Its first split is then prefetched into the L2 cache while it waits for its query. Whole tiles
    share a loop with the last one, because a second loop would wait for its first keys again.

    partial is fp32 [slots, Q_HEADS, HEAD_DIM], max and sum are fp32 [slots, Q_HEADS]. arrived is
    int32 [slots, KV_HEADS]. It counts the finished rows of a sequence at the sequence's first slot,
    and is zero before and after a launch.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP)
    KV_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    kv_head = tl.program_id(0)
    row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + row
    dim = tl.arange(0, BLOCK_D)
    row_mask = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    num_rows = tl.load(schedule_ptr + 6)
    for index in tl.range(tl.program_id(1), num_rows, tl.num_programs(1)):
        entry_ptr = schedule_ptr + index * SPLIT_WORDS
        seq = tl.load(entry_ptr)
        begin = tl.load(entry_ptr + 1)
        end = tl.load(entry_ptr + 2)
        num_partials = tl.load(entry_ptr + 3)
        part = tl.load(entry_ptr + 4)
        first_slot = tl.load(entry_ptr + 5)
        position = tl.load(context_lens_ptr + seq) - 1
        pages_ptr = block_tables_ptr + seq * table_stride
        middle = end // BLOCK_N * BLOCK_N
        if FEW:
            middle = begin
            ROW_BYTES: tl.constexpr = HEAD_DIM * k_ptr.dtype.element_ty.primitive_bitwidth // 8
            if PDL and ROW_BYTES % 16 == 0:
                key = begin + tl.arange(0, SPLIT)
                page = tl.load(pages_ptr + key // PAGE_SIZE, mask=key < end, other=0)
                slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
                offset = slot * KV_STRIDE + kv_head * HEAD_DIM
                prefetch_l2(k_ptr + offset, tl.where(key < end, ROW_BYTES, 0))
                prefetch_l2(v_ptr + offset, tl.where(key < end, ROW_BYTES, 0))
        # Kernels of this step write queries, keys and values, but nothing that was loaded so far.
        if PDL:
            tl.extra.cuda.gdc_wait()
        q_row = q_ptr + seq.to(tl.int64) * q_stride
        q = tl.load(q_row + head[:, None] * HEAD_DIM + dim[None, :], mask=row_mask, other=0.0)
        total_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total_sum = tl.zeros([BLOCK_M], tl.float32)
        if sinks_ptr is not None:
            is_first = row < (part == 0).to(tl.int32) * GROUP
            sinks = tl.load(sinks_ptr + head, mask=is_first, other=-float("inf"))
            total_max = sinks * CONSTEXPR_LOG2_E
            total_sum += is_first.to(tl.float32)
        window_begin = tl.maximum(position + 1 - WINDOW, 0) if WINDOW else 0
        total_max, total_sum, total = attend_in_splits(
            q,
            k_ptr,
            v_ptr,
            pages_ptr,
            0,
            kv_head,
            begin,
            middle,
            end,
            row * 0 + position,
            total_max,
            total_sum,
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
            scale_log2e,
            KV_STRIDE,
            KV_STRIDE,
            window_begin,
            window_begin,
            PAGE_SIZE,
            HEAD_DIM,
            BLOCK_N,
            SPLIT,
            WINDOW,
            SOFTCAP,
            scales_ptr,
            KV_HEADS,
        )
        out_row = seq.to(tl.int64) * Q_HEADS + kv_head * GROUP
        if num_partials == 1:
            out = total / tl.where(total_sum > 0, total_sum, 1.0)[:, None]
            out_ptrs = out_ptr + (out_row + row)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=row_mask)
        else:
            slot_row = (first_slot + part) * Q_HEADS + head
            tl.store(max_ptr + slot_row, total_max, mask=row < GROUP)
            tl.store(sum_ptr + slot_row, total_sum, mask=row < GROUP)
            partial_ptrs = partial_ptr + slot_row[:, None] * HEAD_DIM + dim[None, :]
            tl.store(partial_ptrs, total, mask=row_mask)
            tl.debug_barrier()
            counter_ptr = arrived_ptr + first_slot * KV_HEADS + kv_head
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_partials - 1:
                tl.store(counter_ptr, 0)
                member = tl.arange(0, BLOCK_G)
                _merge_partials(
                    partial_ptr,
                    max_ptr,
                    sum_ptr,
                    out_ptr + (out_row + member)[:, None] * HEAD_DIM + dim[None, :],
                    first_slot * Q_HEADS + kv_head * GROUP + member,
                    member < GROUP,
                    num_partials,
                    Q_HEADS,
                    HEAD_DIM,
                )


@triton.jit
def _merge_partials(
    partial_ptr,
    max_ptr,
    sum_ptr,
    out_ptrs,
    slot_row,
    in_group,
    num_partials,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Merges the partial results of a sequence and KV head in order, and stores their quotient.

    Args:
        out_ptrs: [BLOCK_G, BLOCK_D], addresses of the results.
        slot_row: [BLOCK_G], rows of the first partial result.
        in_group: [BLOCK_G], which rows exist.
    """
    BLOCK_G: tl.constexpr = out_ptrs.shape[0]
    BLOCK_D: tl.constexpr = out_ptrs.shape[1]
    dim = tl.arange(0, BLOCK_D)
    mask = in_group[:, None] & (dim < HEAD_DIM)[None, :]
    total_max = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total_sum = tl.zeros([BLOCK_G], tl.float32)
    total = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in tl.range(0, num_partials, MERGED_AT_ONCE):
        for i in tl.static_range(MERGED_AT_ONCE):  # unrolled, so that all loads are issued early
            exists = in_group & (slot_row * 0 + start + i < num_partials)
            source = slot_row + (start + i) * Q_HEADS
            row_max = tl.load(
                max_ptr + source, mask=exists, other=-float("inf"), cache_modifier=".cg"
            )
            row_sum = tl.load(sum_ptr + source, mask=exists, other=0.0, cache_modifier=".cg")
            acc = tl.load(
                partial_ptr + source[:, None] * HEAD_DIM + dim[None, :],
                mask=mask & exists[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            total_max, total_sum, total = _merge(total_max, total_sum, total, row_max, row_sum, acc)
    out = total / tl.where(total_sum > 0, total_sum, 1.0)[:, None]
    tl.store(out_ptrs, out.to(out_ptrs.dtype.element_ty), mask=mask)


class InvariantTritonAttention(AttentionBackend):
    """Batch-invariant attention for fp16, bf16 and fp32, all block sizes, and head dimensions up to
    256. For each dtype and GPU, the bits of a row depend on its query, its context and the numbers
    of heads only."""

    name = "triton"
    reads_quantized = True

    def __init__(self) -> None:
        # Counters of the decode kernel, by their number. Launches of the same or of different sizes
        # can share them, because steps run in order.
        self._arrived: dict[int, Tensor] = {}

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        context: Context,
        params: AttentionParams,
    ) -> Tensor:
        group, head_dim = q.size(1) // k.size(1), q.size(2)
        tile = choose_tile(group, head_dim, q.dtype, shared_memory(q.device))
        stages = tile.stages(context.block_tables is not None)
        sizes = PrefillTile(
            tile.num_rows, tile.num_keys, fixed_schedule.SPLIT, tile.num_warps, stages
        )
        return launch_prefill(q, k, v, cache, context, params, sizes, attend_in_splits)

    def split_kv(
        self,
        context_lens: np.ndarray,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        is_quantized: bool,
        window: int | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> np.ndarray:
        return fixed_schedule.make_fixed_schedule(context_lens, kv_heads, window)

    def decode(
        self,
        q: Tensor,
        cache: KVCache,
        context: Context,
        params: AttentionParams,
        new: NewKV | None = None,
    ) -> Tensor:
        assert new is None and context.block_tables is not None
        assert context.split_kv_schedule is not None
        num_seqs, q_heads, head_dim = q.shape
        page_size, kv_heads = cache.k.shape[1:3]
        assert q.stride()[1:] == (head_dim, 1)
        assert cache.k.is_contiguous() and cache.v.is_contiguous()
        tile = choose_tile(q_heads // kv_heads, head_dim, q.dtype, shared_memory(q.device))
        num_slots = num_seqs + fixed_schedule.EXTRA_ROWS
        size = next_power_of_2(num_slots * kv_heads)  # so that there are few different sizes
        if size not in self._arrived:
            self._arrived[size] = torch.zeros(size, dtype=torch.int32, device=q.device)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        partial = out.new_empty(num_slots, q_heads, head_dim, dtype=torch.float32)
        row_max, row_sum = out.new_empty(2, num_slots, q_heads, dtype=torch.float32)
        _invariant_decode_kernel[(kv_heads, num_seqs + cdiv(NUM_PROGRAMS, kv_heads))](
            q,
            cache.k,
            cache.v,
            cache.scales,
            out,
            partial,
            row_max,
            row_sum,
            self._arrived[size],
            context.block_tables,
            context.split_kv_schedule,
            context.context_lens,
            params.sinks,
            params.scale * LOG2_E,
            q.stride(0),
            context.block_tables.stride(0),
            PAGE_SIZE=page_size,
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_M=tile.num_rows,
            BLOCK_N=tile.num_keys,
            SPLIT=fixed_schedule.SPLIT,
            WINDOW=params.window or 0,
            SOFTCAP=None if params.softcap is None else params.softcap * LOG2_E,
            FEW=num_seqs * kv_heads < HOPPER_MULTIPROCESSORS,
            num_warps=tile.num_warps,
            num_stages=tile.stages(True),
            **pdl_options(q),
        )
        return out
