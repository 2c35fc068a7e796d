"""Prefill attention for Hopper GPUs: the launcher of hopper_prefill_kernel.py, and its schedule."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.dequantized_kv import dequantized_kv, max_num_keys
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.tiles import LOG2_E
from nanovllm.utils.context import Context
from nanovllm.utils.triton_compat import HAS_TRITON, is_hopper, num_multiprocessors, tl, triton

ROWS = 64  # rows of queries per consumer: those of one wgmma instruction
MANY = 1 << 30  # more rows than any tensor has
# With fewer tokens or shorter prompts, tiles would be too few or partly empty, and the launch takes
# the host longer. With smaller windows, tiles would be partly masked. A CUDA graph may have prompts
# of any length: the longest one counts as ``len(q)`` tokens.
MIN_TOKENS, MIN_QUERIES, MIN_WINDOW = 4097, 512, 512
MIN_BOX = 16  # keys per TMA load: a multiple of the 8 rows after which the swizzle repeats
SCAN = 128  # sequences that a program of the schedule looks at in one iteration
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


class Tile(NamedTuple):
    """Sizes of the kernel for one head size.

    Attributes:
        num_consumers: warpgroups that compute 64 rows of queries each; 2 or 3.
        num_keys: BLOCK_N, keys per tile.
        num_stages: tiles of keys, and of values, in shared memory; at most 4.
        num_q_stages: tiles of queries in shared memory: 1, or 2 to load the next one early.
        ping_pong: whether the warpgroups take turns with the tensor cores.
    """

    num_consumers: int
    num_keys: int
    num_stages: int
    num_q_stages: int = 1
    ping_pong: bool = True

    @property
    def num_rows(self) -> int:
        return self.num_consumers * ROWS


# By head_dim, tuned with benchmarks/hopper_prefill.py on an H200, which also tries three consumers
# and no ping-pong.
TILES = {64: Tile(2, 128, 4, 2), 128: Tile(2, 128, 2, 2), 256: Tile(2, 64, 2)}


def can_launch(q: Tensor, cache: KVCache, context: Context, params: AttentionParams) -> bool:
    """Returns whether the kernel supports these inputs, and is the fastest for them."""
    return (
        HAS_TRITON
        and is_hopper(q.device)
        and q.dtype in DTYPES
        and q.size(2) in TILES
        and (cache.scales is None or _can_copy(q, cache, context, params))
        and (params.window is None or params.window >= MIN_WINDOW)
        and (context.block_tables is None or cache.k.size(1) % MIN_BOX == 0)
        and len(q) >= MIN_TOKENS
        and context.max_seqlen_q >= MIN_QUERIES
    )


def _can_copy(q: Tensor, cache: KVCache, context: Context, params: AttentionParams) -> bool:
    """Returns whether keys and values of a quantised cache may be copied. Their number is not known
    in a CUDA graph."""
    return params.window is None and 0 < context.num_keys <= max_num_keys(q, cache)


def hopper_prefill(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, context: Context, params: AttentionParams
) -> Tensor:
    """See ``AttentionBackend.prefill``. ``can_launch`` says for which inputs. Reads dequantised
    copies of the keys and values in a quantised cache.

    In a layer with a window, values of tokens shortly before the window are multiplied by 0, so
    they must be finite.
    """
    # Deferred, because Gluon is experimental: the caller can do without it.
    from nanovllm.kernels.attention.hopper_prefill_kernel import Sizes, hopper_prefill_kernel

    if cache.scales is not None:
        k, v = dequantized_kv(q, cache, context)
        context = replace(context, block_tables=None)
    q_heads, head_dim = q.shape[1:]
    kv_heads, tables, page_size = k.size(1), context.block_tables, 0
    tile = TILES[head_dim]
    box = tile.num_keys
    if tables is not None:
        assert cache.k.is_contiguous() and cache.v.is_contiguous()
        page_size = cache.k.size(1)
        k, v = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
        box = min(box, page_size & -page_size)  # so that each is in one page
    assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
    schedule = make_schedule(
        context.cu_seqlens_q, context.cu_seqlens_k, len(q), tile.num_rows, tables is not None
    )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sizes = Sizes(
        DTYPES[q.dtype],
        tile.num_consumers,
        tile.num_stages,
        tile.num_keys,
        head_dim,
        q_heads,
        q_heads // kv_heads,
        page_size,
        box,
        params.window or 0,
        (params.softcap or 0.0) * LOG2_E,
        tile.num_q_stages,
        tile.ping_pong,
    )
    programs = min((len(schedule) - 1) * q_heads, num_multiprocessors(q.device))
    hopper_prefill_kernel[(programs,)](
        ragged_descriptor(q, ROWS),
        ragged_descriptor(k, box),
        ragged_descriptor(v, box),
        ragged_descriptor(out, ROWS),
        schedule,
        tables,
        0 if tables is None else tables.stride(0),
        params.sinks,
        params.scale * LOG2_E,
        sizes,
        num_warps=4,
    )
    return out


def ragged_descriptor(x: Tensor, num_rows: int) -> Any:
    """Describes the rows of x, [N, heads, head_dim], to the TMA, in boxes of ``num_rows`` rows of a
    head. A box at (MANY, start + size, MANY - size + row, column) begins at row ``start + row``.
    Its rows from ``start + size`` on are out of bounds: they are read as zeros and not written.
    Addresses wrap around at 2^64, where the strides let the constants cancel. Triton's
    tools/ragged_tma.py has this idea.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    stride, width = x.stride(0), x.size(1) * x.size(2)
    assert x.stride()[1:] == (x.size(2), 1)
    return TensorDescriptor(
        x,
        [0x7FFF0000, 0x7FFF0000, MANY, width],
        [(1 << 34) - stride, stride, stride, 1],
        [1, 1, num_rows, x.size(2)],
        NVMMASharedLayout(128, 16, 4),
    )


def make_schedule(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_tokens: int, num_rows: int, is_paged: bool
) -> Tensor:
    """Cuts the queries of each sequence into tiles, those with the longest context first. So the
    programs, which take tiles in turn, end at about the same time.

    Args:
        cu_seqlens_q, cu_seqlens_k: as in the context of a prefill.
        num_tokens: at least the number of queries.
        num_rows: rows of queries per tile.
        is_paged: whether keys are found through a block table.

    Returns:
        int32 [1 + tiles or more, 4]. The first element is the number of tiles. Each further row is
        a tile: the first row of queries; the row of the sequence's first key, or the row of its
        block table; the first query's position; and the number of queries. Rows after the last tile
        are undefined.
    """
    num_seqs = len(cu_seqlens_q) - 1
    most_tiles = num_tokens // num_rows + num_seqs
    schedule = torch.empty(1 + most_tiles, 4, dtype=torch.int32, device=cu_seqlens_q.device)
    _schedule_kernel[(most_tiles,)](
        schedule, cu_seqlens_q, cu_seqlens_k, num_seqs, num_rows, is_paged, SCAN, num_warps=1
    )
    return schedule


@triton.jit(do_not_specialize=["num_seqs"])
def _schedule_kernel(
    schedule_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    num_seqs,
    ROWS: tl.constexpr,
    IS_PAGED: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Writes one tile, at the place that follows from the number of tiles with longer contexts."""
    # The tiles of sequence s have consecutive indices from cu_seqlens_q[s] // ROWS + s on. "+ s"
    # counts a partial tile for each earlier sequence, so some indices have no tile.
    index = tl.program_id(0)
    seq, num_tiles = -1, 0
    for first in tl.range(0, num_seqs, SCAN):
        s = first + tl.arange(0, SCAN)
        start = tl.load(cu_seqlens_q_ptr + s, mask=s < num_seqs, other=0)
        stop = tl.load(cu_seqlens_q_ptr + s + 1, mask=s < num_seqs, other=0)
        seq += tl.sum(((start // ROWS + s <= index) & (s < num_seqs)).to(tl.int32))
        num_tiles += tl.sum(tl.cdiv(stop - start, ROWS))
    if index == 0:
        tl.store(schedule_ptr, num_tiles)
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    len_q = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    offset = (index - (q_start // ROWS + seq)) * ROWS
    if offset >= len_q:
        return
    k_start = tl.load(cu_seqlens_k_ptr + seq)
    position = tl.load(cu_seqlens_k_ptr + seq + 1) - k_start - len_q + offset
    rows = tl.minimum(len_q - offset, ROWS)
    # The place of this tile. Tiles of the same length are in the order of their sequences.
    place = 0
    for first in tl.range(0, num_seqs, SCAN):
        s = first + tl.arange(0, SCAN)
        lens_q = tl.load(cu_seqlens_q_ptr + s + 1, mask=s < num_seqs, other=0)
        lens_q -= tl.load(cu_seqlens_q_ptr + s, mask=s < num_seqs, other=0)
        lens_k = tl.load(cu_seqlens_k_ptr + s + 1, mask=s < num_seqs, other=0)
        lens_k -= tl.load(cu_seqlens_k_ptr + s, mask=s < num_seqs, other=0)
        # Tiles of sequence s end at multiples of ROWS from its first new token on, and the last one
        # at its context length. Those that end after ``limit`` come first.
        limit = position + rows - (s < seq).to(tl.int32)
        earlier = tl.maximum(limit - (lens_k - lens_q), 0) // ROWS
        place += tl.sum(tl.where(limit < lens_k, tl.cdiv(lens_q, ROWS) - earlier, 0))
    tile_ptr = schedule_ptr + (1 + place) * 4
    tl.store(tile_ptr, q_start + offset)
    tl.store(tile_ptr + 1, seq if IS_PAGED else k_start)
    tl.store(tile_ptr + 2, position)
    tl.store(tile_ptr + 3, rows)
