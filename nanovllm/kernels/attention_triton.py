"""Paged attention in Triton, prefill and decode in one kernel: for any GPU that Triton serves.

FlashAttention-2's online softmax (arXiv:2307.08691) over tiles of queries, with two additions.
The query heads that share a KV head are packed as rows of one tile, so their keys and values
are read once (decode: a tile is the group of one token). And the context can be split over
programs, the last of which merges the partial results by their log-sum-exps (Flash-Decoding),
which fills the GPU when there are few sequences.
"""

import torch

from nanovllm.kernels.compat import chained, shared_memory, tl, triton
from nanovllm.utils.context import Context

LOG2_E = 1.4426950408889634
MAX_SPLITS = 32
NUM_PROGRAMS = 264  # to split for: two for each multiprocessor of a Hopper GPU


@triton.jit(do_not_specialize=["table_stride", "page_size", "num_tokens", "num_splits"])
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    block_tables_ptr,
    cu_seqlens_q_ptr,
    seqlens_k_ptr,
    scale_log2e,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    page_size,
    num_tokens,
    num_splits,
    PAGED: tl.constexpr,
    TILE_IN_PAGE: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of a tile: row r is query token r // GROUP of the tile, head r % GROUP of the group.

    seqlens_k_ptr holds lengths for DECODE and cumulative lengths otherwise. k and v are the
    paged caches [blocks, page_size, KV_HEADS, HEAD_DIM] or, not PAGED, the step's own [N, KV_HEADS,
    HEAD_DIM]. With SPLIT, partial is fp32 [num_splits, N, Q_HEADS, HEAD_DIM], lse [num_splits, N,
    Q_HEADS], in base 2, and arrived int32 [N, KV_HEADS], zero before and after.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    seq = tl.program_id(1)
    kv_head = tl.program_id(2) // num_splits
    split = tl.program_id(2) % num_splits
    if DECODE:
        q_start = seq
        len_q = 1
        k_start = 0
        len_k = tl.load(seqlens_k_ptr + seq)
    else:
        q_start = tl.load(cu_seqlens_q_ptr + seq)
        len_q = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
        k_start = tl.load(seqlens_k_ptr + seq)
        len_k = tl.load(seqlens_k_ptr + seq + 1) - k_start
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
    position = len_k - len_q + token
    q_offset = (q_start + token).to(tl.int64) * q_stride + head * HEAD_DIM
    q_mask = row_mask[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=q_mask, other=0.0)

    last = tl.minimum(len_k - len_q + (tile + 1) * TILE, len_k)
    per_split = tl.cdiv(tl.cdiv(last, num_splits), BLOCK_N) * BLOCK_N
    begin = split * per_split
    end = tl.minimum(begin + per_split, last)

    # Tiles whose keys all rows see come first and need no mask; then the rest.
    seen_by_all = end if DECODE else tl.minimum(end, len_k - len_q + tile * TILE + 1)
    middle = begin + tl.maximum(seen_by_all - begin, 0) // BLOCK_N * BLOCK_N
    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(2):
        first = middle if MASKED else begin
        for n in tl.range(first, end if MASKED else middle, TAIL_N if MASKED else BLOCK_N):
            column = tl.arange(0, TAIL_N if MASKED else BLOCK_N)
            key = n + column
            key_mask = key < end
            if PAGED and TILE_IN_PAGE:
                page = tl.load(block_tables_ptr + seq * table_stride + n // page_size)
                slot = page.to(tl.int64) * page_size + n % page_size + column
            elif PAGED:
                page = tl.load(
                    block_tables_ptr + seq * table_stride + key // page_size, mask=key_mask, other=0
                )
                slot = page.to(tl.int64) * page_size + key % page_size
            else:
                slot = (k_start + key).to(tl.int64)
            kv_mask = (dim < HEAD_DIM)[None, :]
            if MASKED:
                kv_mask = key_mask[:, None] & kv_mask
            kv_offset = kv_head * HEAD_DIM + dim[None, :]
            k = tl.load(k_ptr + slot[:, None] * k_stride + kv_offset, mask=kv_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2e
            if MASKED:
                visible = key_mask[None, :]
                if not DECODE:
                    visible = visible & (key[None, :] <= position[:, None])
                scores = tl.where(visible, scores, -float("inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            # A row that has seen nothing yet keeps -inf; 0 in its place avoids inf - inf.
            shift = tl.where(new_best == -float("inf"), 0.0, new_best)
            p = tl.exp2(scores - shift[:, None])
            alpha = tl.exp2(best - shift)
            total = total * alpha + tl.sum(p, axis=1)
            v = tl.load(v_ptr + slot[:, None] * v_stride + kv_offset, mask=kv_mask, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
            best = new_best

    # A split without keys weighs nothing: zero output, log-sum-exp -inf.
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_row = (q_start + token).to(tl.int64) * Q_HEADS + head
    if SPLIT:
        lse = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))
        num_rows = num_tokens * Q_HEADS
        partial_row = out_row + split * num_rows
        tl.store(lse_ptr + partial_row, lse, mask=row_mask)
        place = partial_row[:, None] * HEAD_DIM + dim[None, :]
        tl.store(partial_ptr + place, out, mask=q_mask)
        tl.debug_barrier()
        arrived_ptr = arrived_ptr + seq * KV_HEADS + kv_head
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") < num_splits - 1:
            return
        # The last to arrive merges all: an average weighted by their shares of the softmax.
        tl.store(arrived_ptr, 0)
        part = tl.arange(0, MAX_SPLITS)
        is_part = part < num_splits
        for i in tl.static_range(GROUP):
            one_row = seq.to(tl.int64) * Q_HEADS + kv_head * GROUP + i
            rows = part * num_rows + one_row
            lse = tl.load(lse_ptr + rows, mask=is_part, other=-float("inf"), cache_modifier=".cg")
            place = rows[:, None] * HEAD_DIM + dim[None, :]
            part_mask = is_part[:, None] & (dim < HEAD_DIM)[None, :]
            partial = tl.load(partial_ptr + place, mask=part_mask, other=0.0, cache_modifier=".cg")
            largest = tl.max(lse, axis=0)
            weight = tl.exp2(lse - tl.where(largest == -float("inf"), 0.0, largest))
            weights = tl.sum(weight, axis=0)
            mean = tl.sum(partial * weight[:, None], axis=0) / tl.where(weights > 0, weights, 1.0)
            tl.store(
                out_ptr + one_row * HEAD_DIM + dim,
                mean.to(out_ptr.dtype.element_ty),
                mask=dim < HEAD_DIM,
            )
        return
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=q_mask,
    )


class TritonAttention:
    """This project's own kernels: fp16, bf16 and fp32, any block size, head dims up to 256."""

    name = "triton"
    capturable = True

    def __init__(self) -> None:
        # Programs of each tile that have ended; one step's, so one backend's.
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
        group, wide = q.size(1) // k.size(1), q.size(2) > 128
        # fp32 has no tensor cores: its products unroll into long code, kept short by small tiles.
        exact = q.dtype is torch.float32
        roomy = not (wide or exact) and shared_memory(q.device) >= 200 << 10
        paged = context.block_tables is not None
        return _launch(
            q,
            k_cache if paged else k,
            v_cache if paged else v,
            context,
            scale,
            block_m=max(16 if exact else 64 if wide else 128, triton.next_power_of_2(group)),
            block_n=16 if exact else 32 if wide else 128 if roomy else 64,
            num_splits=1,
            num_warps=4 if wide or exact else 8,
            num_stages=3 if roomy else 2,
        )

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        num_seqs, kv_heads = q.size(0), k_cache.size(2)
        exact = q.dtype is torch.float32
        # By the batch size alone, so that a captured graph stays right as contexts grow.
        num_splits = max(1, min(MAX_SPLITS, NUM_PROGRAMS // (num_seqs * kv_heads)))
        if self._arrived is None:
            self._arrived = torch.zeros(NUM_PROGRAMS, dtype=torch.int32, device=q.device)
        return _launch(
            q,
            k_cache,
            v_cache,
            context,
            scale,
            block_m=max(16, triton.next_power_of_2(q.size(1) // kv_heads)),
            block_n=16 if exact else 32 if q.size(2) > 128 else 64 if num_splits > 1 else 128,
            num_splits=num_splits,
            num_warps=4,
            arrived=self._arrived,
        )


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: Context,
    scale: float,
    *,
    block_m: int,
    block_n: int,
    num_splits: int,
    num_warps: int,
    num_stages: int = 2,
    arrived: torch.Tensor | None = None,
) -> torch.Tensor:
    num_tokens, q_heads, head_dim = q.shape
    kv_heads = k.size(-2)
    paged = k.dim() == 4
    decode = not context.is_prefill
    assert q.stride()[1:] == (head_dim, 1) and k.stride()[-2:] == v.stride()[-2:] == (head_dim, 1)
    assert not paged or (k.is_contiguous() and v.is_contiguous())
    seqlens_k = context.context_lens if decode else context.cu_seqlens_k
    assert seqlens_k is not None
    num_seqs = seqlens_k.numel() - (not decode)
    max_len_q = 1 if decode else context.max_seqlen_q
    tables = context.block_tables
    out = torch.empty(num_tokens, q_heads, head_dim, dtype=q.dtype, device=q.device)
    partial = lse = None
    if num_splits > 1:
        partial = out.new_empty(num_splits, *out.shape, dtype=torch.float32)
        lse = out.new_empty(num_splits, num_tokens, q_heads, dtype=torch.float32)
    block_d = triton.next_power_of_2(head_dim)
    page_size = k.size(1) if paged else 1
    grid = (
        triton.cdiv(max_len_q, block_m // (q_heads // kv_heads)),
        num_seqs,
        kv_heads * num_splits,
    )
    _attention_kernel[grid](
        q,
        k,
        v,
        out,
        partial,
        lse,
        arrived,
        tables if paged else None,
        None if decode else context.cu_seqlens_q,
        seqlens_k,
        scale * LOG2_E,
        q.stride(0),
        k.stride(1) if paged else k.stride(0),
        v.stride(1) if paged else v.stride(0),
        tables.stride(0) if paged and tables is not None else 0,
        page_size,
        num_tokens,
        num_splits,
        PAGED=paged,
        TILE_IN_PAGE=page_size % block_n == 0,
        DECODE=decode,
        SPLIT=num_splits > 1,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        TAIL_N=min(block_n, 64),
        MAX_SPLITS=triton.next_power_of_2(num_splits),
        # fp32 stays fp32: the tensor cores' default, tf32, keeps 10 bits.
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        num_warps=num_warps,
        num_stages=num_stages,
        **chained(q),
    )
    return out
