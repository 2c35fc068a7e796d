"""What the attention kernels of prefill and decode share: the loop over tiles of keys.

FlashAttention-2's online softmax (arXiv:2307.08691): scores are in base 2, and a row's largest and
total are kept up to date tile by tile.
"""

import torch

from nanovllm.utils.triton_compat import tl, triton

LOG2_E = 1.4426950408889634


@triton.jit
def attend(
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
            k_tile = tile_pointers(
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
            p, alpha, best, total = add_scores(scores, scale_log2e, best, total)
            v_tile = tile_pointers(
                v_ptr, v_stride, offset, n, end, pages_ptr, k_start, PAGE_SIZE,
                TAIL_N if MASKED else BLOCK_N,
            )  # fmt: skip
            v = tl.load(v_tile, mask=kv_mask, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return best, total, acc


@triton.jit
def tile_pointers(
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
def add_scores(scores, scale, best, total):
    """A step of the online softmax: weights, the factor of what was summed before, and the new
    largest score (scaled) and total."""
    new_best = tl.maximum(best, tl.max(scores, axis=1) * scale)
    # A row that has seen nothing yet keeps -inf; 0 in its place avoids inf - inf.
    shift = tl.where(new_best == -float("inf"), 0.0, new_best)
    p = tl.exp2(scores * scale - shift[:, None])
    alpha = tl.exp2(best - shift)
    return p, alpha, new_best, total * alpha + tl.sum(p, axis=1)


def precision(q: torch.Tensor) -> str:
    """fp32 stays fp32: the tensor cores' default, tf32, keeps 10 bits."""
    return "ieee" if q.dtype is torch.float32 else "tf32"
