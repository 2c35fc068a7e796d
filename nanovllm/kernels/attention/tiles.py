"""Triton functions that the attention kernels share: the loop over tiles of keys, and the norm and
RoPE of heads.

The loop computes the online softmax of FlashAttention-2 (arXiv:2307.08691) in base 2. Each row of
queries has a running maximum of the scaled scores and a running sum of exp2(score - maximum).
Matmuls of fp32 inputs are exact ("ieee"), because the default, tf32, has a mantissa of 10 bits
only.

Here the blocks of the KV cache are called pages, because BLOCK_M and BLOCK_N are sizes of tiles.
"""

from nanovllm.kernels.attention.kv_cache import scale_offset
from nanovllm.utils.triton_compat import tl, triton

LOG2_E = 1.4426950408889634
CONSTEXPR_LOG2_E = tl.constexpr(LOG2_E)  # for kernels


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
    row_max,
    row_sum,
    acc,
    scale_log2e,
    k_stride,
    v_stride,
    window_begin,
    window_full,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    scales_ptr=None,
    KV_HEADS: tl.constexpr = 0,
    KEYS_FIRST: tl.constexpr = False,
):
    """Lets the rows of q attend to keys [begin, end).

    With KEYS_FIRST, q, ``acc`` and the scores are transposed: queries are columns, and
    ``position`` is None. An instruction of a tensor core needs at least 16 rows but only 8 columns,
    so for few queries this is less work.

    Without a window, keys before ``middle`` are visible to all rows and need no mask. They are read
    in tiles of BLOCK_N. Keys from ``middle`` on, in tiles of TAIL_N, are masked by ``end`` and by
    the ``position`` of each row, unless it is None. PAGE_SIZE is 0 for keys and values that are
    not paged.

    WINDOW is the number of keys that a row attends to, or 0 for all. With a window, keys before
    ``window_begin`` are not read, keys from ``window_full`` up to ``middle`` need no mask, and
    ``begin`` and ``middle`` are multiples of BLOCK_N. SOFTCAP is the softcap of logits in base 2,
    or None. A quantised cache has scales, of KV_HEADS heads, and is paged. Scores are multiplied by
    the scales of keys, and weights by those of values.

    Returns the updated ``row_max``, ``row_sum`` and ``acc``, the sum of weighted values.
    """
    BLOCK_D: tl.constexpr = q.shape[0 if KEYS_FIRST else 1]
    NUM_ROWS: tl.constexpr = q.shape[1 if KEYS_FIRST else 0]
    dim = tl.arange(0, BLOCK_D)
    full = begin
    tail = middle
    if WINDOW:
        full = tl.maximum(begin, tl.minimum(tl.cdiv(window_full, BLOCK_N) * BLOCK_N, middle))
        begin = tl.maximum(begin, window_begin // TAIL_N * TAIL_N)
        tail = tl.maximum(begin, middle)
    PAIRS: tl.constexpr = scales_ptr is not None and NUM_ROWS < 64  # see ``as_pairs``
    if scales_ptr is not None:
        q = as_half(q)
        acc = scale_up(acc)
    if PAIRS:
        even, odd = split_pairs(acc, KEYS_FIRST)
        pair = tl.arange(0, BLOCK_D // 2)
    for PART in tl.static_range(0 if WINDOW else 1, 3):  # the window's start, the middle, the end
        first = tail if PART == 2 else full if PART == 1 else begin
        last = end if PART == 2 else middle if PART == 1 else full
        for n in tl.range(first, last, BLOCK_N if PART == 1 else TAIL_N):
            key = n + tl.arange(0, BLOCK_N if PART == 1 else TAIL_N)
            kv_mask = (dim < HEAD_DIM)[None, :]
            if PART != 1:
                exists = key < end
                if WINDOW:
                    exists = exists & (key >= window_begin)
                kv_mask = exists[:, None] & kv_mask
            offset = kv_head * HEAD_DIM + dim
            k = load_tile(
                k_ptr, k_stride, offset, kv_mask, n, end, pages_ptr, k_start, PAGE_SIZE,
                BLOCK_N if PART == 1 else TAIL_N,
            )  # fmt: skip
            if scales_ptr is not None:
                scale_mask = key < end
                if PART != 1:
                    scale_mask = exists
                k_scale, v_scale = load_scales(
                    scales_ptr, kv_head, scale_mask, n, end, pages_ptr, KV_HEADS, PAGE_SIZE,
                    BLOCK_N if PART == 1 else TAIL_N,
                )  # fmt: skip
                k = k.to(q.dtype)
            scores = score_keys(q, k, KEYS_FIRST)
            if scales_ptr is not None:
                scores *= per_key(k_scale, KEYS_FIRST)
            if SOFTCAP is not None:
                scores = softcap(scores * scale_log2e, SOFTCAP)
            if PART != 1:
                visible = per_key(exists, KEYS_FIRST)
                if position is not None:
                    visible = visible & (key[None, :] <= position[:, None])
                    if WINDOW:
                        visible = visible & (key[None, :] > position[:, None] - WINDOW)
                scores = tl.where(visible, scores, -float("inf"))
            p, alpha, row_max, row_sum = online_softmax_step(
                scores, 1.0 if SOFTCAP is not None else scale_log2e, row_max, row_sum, KEYS_FIRST
            )
            decay = per_row(alpha, KEYS_FIRST)
            if scales_ptr is not None:
                p *= per_key(v_scale, KEYS_FIRST)
            if PAIRS:
                v_mask = per_key(pair < HEAD_DIM // 2, KEYS_FIRST)
                if PART != 1:
                    v_mask = per_row(exists, KEYS_FIRST) & v_mask
                v = load_tile(
                    as_pairs(v_ptr), v_stride // 2, kv_head * (HEAD_DIM // 2) + pair, v_mask,
                    n, end, pages_ptr, k_start, PAGE_SIZE, BLOCK_N if PART == 1 else TAIL_N,
                    KEYS_FIRST,
                )  # fmt: skip
                even, odd = add_weighted_pairs(
                    p.to(q.dtype), v, even * decay, odd * decay, KEYS_FIRST
                )
            else:
                v_mask = per_key(dim < HEAD_DIM, KEYS_FIRST)
                if PART != 1:
                    v_mask = per_row(exists, KEYS_FIRST) & v_mask
                v = load_tile(
                    v_ptr, v_stride, offset, v_mask, n, end, pages_ptr, k_start, PAGE_SIZE,
                    BLOCK_N if PART == 1 else TAIL_N, KEYS_FIRST,
                )  # fmt: skip
                if scales_ptr is not None:
                    v = v.to(q.dtype)
                acc = add_weighted(p.to(v.dtype), v, acc * decay, KEYS_FIRST)
    if PAIRS:
        acc = join_pairs(even, odd, KEYS_FIRST)
    if scales_ptr is not None:
        acc = scale_down(acc)
    return row_max, row_sum, acc


@triton.jit
def per_key(x, KEYS_FIRST: tl.constexpr):
    """Broadcasts a number per key to the shape of scores."""
    return x[:, None] if KEYS_FIRST else x[None, :]


@triton.jit
def per_row(x, KEYS_FIRST: tl.constexpr):
    """Broadcasts a number per query to the shape of scores."""
    return x[None, :] if KEYS_FIRST else x[:, None]


@triton.jit
def score_keys(q, k, KEYS_FIRST: tl.constexpr):
    """Multiplies queries by keys [N, D]."""
    if KEYS_FIRST:
        scores = tl.dot(k, q, input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    return scores


@triton.jit
def add_weighted(p, v, acc, KEYS_FIRST: tl.constexpr):
    """Adds values, weighted by p, to a sum. The values are [N, D], with KEYS_FIRST [D, N]."""
    if KEYS_FIRST:
        acc = tl.dot(v, p, acc, input_precision="ieee")
    else:
        acc = tl.dot(p, v, acc, input_precision="ieee")
    return acc


@triton.jit
def sequence_of_tile(index, cu_seqlens_ptr, num_seqs, TILE: tl.constexpr, SCAN: tl.constexpr):
    """Returns the sequence of a tile of TILE tokens, and the tile's index in it.

    Tiles of sequence s have consecutive indices from cu_seqlens[s] // TILE + s on. "+ s" counts a
    partial tile for each earlier sequence, so some indices have no tile: the one that is returned
    for them begins after the sequence's end. SCAN sequences are looked at in one iteration.
    """
    seq = -1
    for first in tl.range(0, num_seqs, SCAN):
        s = first + tl.arange(0, SCAN)
        begin = tl.load(cu_seqlens_ptr + s, mask=s < num_seqs, other=0) // TILE + s
        seq += tl.sum(((begin <= index) & (s < num_seqs)).to(tl.int32))
    return seq, index - (tl.load(cu_seqlens_ptr + seq) // TILE + seq)


@triton.jit
def load_tile(
    ptr, stride, offset, mask, n, end, pages_ptr, k_start,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Loads the keys or values of tokens [n, n + BLOCK_N), as rows or, TRANSPOSED, as columns. The
    mask must exclude tokens that are not below ``end``."""
    column = tl.arange(0, BLOCK_N)
    if PAGE_SIZE == 0:
        ptr += (k_start + n).to(tl.int64) * stride
        row = column * stride
    elif PAGE_SIZE % BLOCK_N == 0:  # all in one page, because n is a multiple of BLOCK_N
        page = tl.load(pages_ptr + n // PAGE_SIZE)
        ptr += (page.to(tl.int64) * PAGE_SIZE + n % PAGE_SIZE) * stride
        row = column * stride
    else:
        key = n + column
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=key < end, other=0)
        row = (page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE) * stride
    return tl.load(
        ptr + (per_row(row, TRANSPOSED) + per_key(offset, TRANSPOSED)), mask=mask, other=0.0
    )


@triton.jit
def load_scales(
    scales_ptr, kv_head, mask, n, end, pages_ptr,
    KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Loads the scales of the keys of tokens [n, n + BLOCK_N), and those of the values, scaled up.
    The mask [BLOCK_N] must exclude tokens that are not below ``end``."""
    column = tl.arange(0, BLOCK_N)
    if PAGE_SIZE % BLOCK_N == 0:  # all in one page
        page = tl.load(pages_ptr + n // PAGE_SIZE)
        slot = n % PAGE_SIZE + column
    else:
        key = n + column
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=key < end, other=0)
        slot = key % PAGE_SIZE
    k_scales = scales_ptr + scale_offset(page.to(tl.int64), slot, kv_head, KV_HEADS, PAGE_SIZE)
    k_scale = tl.load(k_scales, mask=mask, other=0.0)
    v_scale = tl.load(k_scales + KV_HEADS * PAGE_SIZE, mask=mask, other=0.0)
    return k_scale, scale_up(v_scale)


@triton.jit
def as_half(q):
    """Converts bf16 queries to fp16, the dtype in which they are multiplied by FP8 keys. A GPU
    converts two FP8 numbers to fp16, exactly, in one instruction. To bf16 it needs four."""
    if q.dtype == tl.bfloat16:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return q


@triton.jit
def as_pairs(ptr):
    """Converts a pointer to FP8 values to one to pairs of them.

    A tensor core needs two keys of a column side by side, and FP8 values that lie side by side have
    the same key. Only elements of 16 bits are transposed as they are read from shared memory. So
    values are read in pairs, and those of even columns are multiplied apart from those of odd ones.
    For wgmma, which multiplies 64 rows or more in programs of four warps, values are read plainly:
    sums of pairs were wrong with it (Triton 3.6, H200). Decode programs of four warps have fewer
    columns than Triton's wgmma needs (``MIN_WGMMA_COLUMNS``).
    """
    return ptr.to(tl.pointer_type(tl.int16))


@triton.jit
def split_pairs(x, KEYS_FIRST: tl.constexpr):
    """Returns the even and the odd columns of x [N, D], or rows of x [D, N]."""
    if KEYS_FIRST:
        pairs = tl.permute(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), (0, 2, 1))
    else:
        pairs = tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2))
    return tl.split(pairs)


@triton.jit
def join_pairs(even, odd, KEYS_FIRST: tl.constexpr):
    """Undoes ``split_pairs``."""
    x = tl.join(even, odd)
    if KEYS_FIRST:
        x = tl.reshape(tl.permute(x, (0, 2, 1)), (2 * even.shape[0], even.shape[1]))
    else:
        x = tl.reshape(x, (even.shape[0], 2 * even.shape[1]))
    return x


@triton.jit
def _one_of_pairs(pairs, BYTE: tl.constexpr, dtype: tl.constexpr):
    """Converts the lower (BYTE 0) or the upper (1) value of each pair."""
    if dtype == tl.float16:
        # Triton would take each byte apart. Here two instructions convert two values.
        values = tl.inline_asm_elementwise(
            "{ .reg .b32 bytes; .reg .b16 two, none;"
            f" prmt.b32 bytes, $1, 0, 0x00{2 + BYTE}{BYTE}; mov.b32 {{two, none}}, bytes;"
            " cvt.rn.f16x2.e4m3x2 $0, two; }",
            "=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        values = (pairs >> 8 * BYTE).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return values


@triton.jit
def add_weighted_pairs(p, v, even, odd, KEYS_FIRST: tl.constexpr):
    """Adds the values v weighted by p to the two parts of a sum that ``split_pairs`` returns.

    Args:
        v: the pairs, int16 [N, D / 2] or, with KEYS_FIRST, [D / 2, N].
    """
    v_even, v_odd = _one_of_pairs(v, 0, p.dtype), _one_of_pairs(v, 1, p.dtype)
    even = add_weighted(p, v_even, even, KEYS_FIRST)
    return even, add_weighted(p, v_odd, odd, KEYS_FIRST)


@triton.jit
def scale_up(x):
    """Multiplies by a power of two. Softmax probabilities are multiplied by the scales of values. A
    scale is 1/448 of a value's largest magnitude, so in fp16 the products could be subnormal."""
    return x * 256.0


@triton.jit
def scale_down(x):
    """Undoes ``scale_up``."""
    return x * (1 / 256.0)


@triton.jit
def softcap(logits, SOFTCAP: tl.constexpr):
    """Returns SOFTCAP * tanh(logits / SOFTCAP)."""
    return SOFTCAP * tanh(logits * (1.0 / SOFTCAP))


@triton.jit
def tanh(x):
    """Returns the hyperbolic tangent of fp32 numbers. FMAs are explicit, so that all kernels round
    alike."""
    square = x * x
    # Near 0, where the difference below cancels, a polynomial with a relative error of 1e-7.
    odd = tl.fma(square, -0.00626912, 0.02111096)
    odd = tl.fma(square, odd, -0.05387395)
    odd = tl.fma(square, odd, 0.13332915)
    odd = tl.fma(square, odd, -0.3333333)
    reciprocal = 1.0 / (tl.exp2(tl.abs(x) * (2 * CONSTEXPR_LOG2_E)) + 1.0)
    large = tl.fma(reciprocal, -2.0, 1.0)
    large = tl.where(x < 0, -large, large)
    return tl.where(tl.abs(x) < 0.6, tl.fma(x * square, odd, x), large)


@triton.jit
def online_softmax_step(scores, scale, row_max, row_sum, KEYS_FIRST: tl.constexpr = False):
    """Adds a tile of scores to the online softmax.

    Returns the weights of the tile, the factor that rescales earlier sums, and the new ``row_max``
    and ``row_sum``.
    """
    KEYS: tl.constexpr = 0 if KEYS_FIRST else 1
    new_max = tl.maximum(row_max, tl.max(scores, axis=KEYS) * scale)
    # A row whose scores are all masked so far has maximum -inf. Shifting by 0 avoids inf - inf.
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    p = tl.exp2(scores * scale - per_row(shift, KEYS_FIRST))
    alpha = tl.exp2(row_max - shift)
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, axis=KEYS)


@triton.jit
def load_pair(ptr, index, other, mask):
    """Loads the elements of heads, and the other element of the RoPE pair of each one, half a head
    away. Their indices are ``index`` and ``other``, [N, D]."""
    return tl.load(ptr + index, mask=mask, other=0.0), tl.load(ptr + other, mask=mask, other=0.0)


@triton.jit
def norm_and_rope(pair, weights, cos, sin, eps, HEAD_DIM: tl.constexpr):
    """Applies RMSNorm and RoPE, as rope.py does, to heads [N, D].

    ``pair`` and ``weights`` are from ``load_pair``. Without a norm, ``weights`` is None. ``sin``
    is negative for the first half of a head.
    """
    x, other = pair
    x32 = x.to(tl.float32)
    other32 = other.to(tl.float32)
    if weights is not None:
        weight, other_weight = weights
        scale = tl.rsqrt(tl.sum(x32 * x32, axis=1) / HEAD_DIM + eps)[:, None]
        # Rounds where rms_norm_reference rounds.
        x32 = ((x32 * scale).to(weight.dtype) * weight).to(x.dtype).to(tl.float32)
        other32 = (other32 * scale).to(weight.dtype) * other_weight
        other32 = other32.to(x.dtype).to(tl.float32)
    return (x32 * cos + other32 * sin).to(x.dtype)
