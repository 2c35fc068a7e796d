"""Paged attention in Triton, prefill and decode in one kernel: for any GPU that Triton serves.

FlashAttention-2's online softmax (arXiv:2307.08691) over tiles of queries, with two additions.
The query heads that share a KV head are packed as rows of one tile, so their keys and values
are read once (decode: a tile is the group of one token). And the context can be split over
programs whose partial results a second kernel merges by their log-sum-exps (Flash-Decoding),
which fills the GPU when there are few sequences.
"""

import torch

from nanovllm.kernels.compat import tl, triton
from nanovllm.utils.context import Context

LOG2_E = 1.4426950408889634
MAX_SPLITS = 32


@triton.jit(do_not_specialize=["table_stride", "page_size", "num_tokens", "num_splits"])
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
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
    PRECISION: tl.constexpr,
):
    """Rows of a tile: row r is query token r // GROUP of the tile, head r % GROUP of the group.

    seqlens_k_ptr holds lengths for DECODE and cumulative lengths otherwise. k and v are the
    paged caches [blocks, page_size, KV_HEADS, HEAD_DIM] or, not PAGED, the step's own [N, KV_HEADS,
    HEAD_DIM]. With SPLIT, out is fp32 [num_splits, N, Q_HEADS, HEAD_DIM] and lse [num_splits, N,
    Q_HEADS], in base 2.
    """
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
    column = tl.arange(0, BLOCK_N)
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

    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(begin, end, BLOCK_N):
        key = n + column
        key_mask = key < end
        if PAGED and TILE_IN_PAGE:
            page = tl.load(block_tables_ptr + seq * table_stride + n // page_size)
            slot = page.to(tl.int64) * page_size + key % page_size
        elif PAGED:
            page = tl.load(
                block_tables_ptr + seq * table_stride + key // page_size, mask=key_mask, other=0
            )
            slot = page.to(tl.int64) * page_size + key % page_size
        else:
            slot = (k_start + key).to(tl.int64)
        kv_mask = key_mask[:, None] & (dim < HEAD_DIM)[None, :]
        kv_offset = kv_head * HEAD_DIM + dim[None, :]
        k = tl.load(k_ptr + slot[:, None] * k_stride + kv_offset, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2e
        if DECODE:
            visible = key_mask[None, :]
        else:
            visible = key_mask[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(visible, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps -inf; 0 in its place avoids inf - inf.
        shift = tl.where(new_best == -float("inf"), 0.0, new_best)
        p = tl.exp2(scores - shift[:, None])
        alpha = tl.exp2(best - shift)
        total = total * alpha + tl.sum(p, axis=1)
        v = tl.load(v_ptr + slot[:, None] * v_stride + kv_offset, mask=kv_mask, other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        best = new_best

    # A split without keys weighs nothing: zero output, log-sum-exp -inf.
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_row = (q_start + token).to(tl.int64) * Q_HEADS + head
    if SPLIT:
        out_row += split.to(tl.int64) * num_tokens * Q_HEADS
        lse = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))
        tl.store(lse_ptr + out_row, lse, mask=row_mask)
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=q_mask,
    )


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge_splits_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    num_rows,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Averages a row's partial results, weighted by their shares of the softmax."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    dim = tl.arange(0, BLOCK_D)
    in_splits = split < num_splits
    lse = tl.load(lse_ptr + split * num_rows + row, mask=in_splits, other=-float("inf"))
    best = tl.max(lse, axis=0)
    weight = tl.exp2(lse - tl.where(best == -float("inf"), 0.0, best))
    total = tl.sum(weight, axis=0)
    weight = weight / tl.where(total > 0, total, 1.0)
    partial = tl.load(
        partial_ptr + (split * num_rows + row)[:, None] * HEAD_DIM + dim[None, :],
        mask=in_splits[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    out = tl.sum(partial * weight[:, None], axis=0)
    tl.store(out_ptr + row * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


class TritonAttention:
    """This project's own kernels: fp16, bf16 and fp32, any block size, head dims up to 256."""

    name = "triton"
    capturable = True

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
        paged = context.block_tables is not None
        return _launch(
            q,
            k_cache if paged else k,
            v_cache if paged else v,
            context,
            scale,
            block_m=max(16 if exact else 64 if wide else 128, triton.next_power_of_2(group)),
            block_n=16 if exact else 32 if wide else 64,
            num_splits=1,
            num_warps=4 if wide or exact else 8,
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
        # About two programs for each of the 132 multiprocessors of a Hopper GPU; by the batch
        # size alone, so that a captured graph stays right as contexts grow.
        num_splits = max(1, min(MAX_SPLITS, 264 // (num_seqs * kv_heads)))
        return _launch(
            q,
            k_cache,
            v_cache,
            context,
            scale,
            block_m=max(16, triton.next_power_of_2(q.size(1) // kv_heads)),
            block_n=16 if exact else 32 if q.size(2) > 128 else 64,
            num_splits=num_splits,
            num_warps=4,
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
    partial, lse = out, None
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
        partial,
        lse,
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
        # fp32 stays fp32: the tensor cores' default, tf32, keeps 10 bits.
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        num_warps=num_warps,
        num_stages=2,
    )
    if lse is not None:
        _merge_splits_kernel[(num_tokens * q_heads,)](
            partial,
            lse,
            out,
            num_tokens * q_heads,
            num_splits,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_SPLITS=MAX_SPLITS,
            num_warps=2,
        )
    return out
