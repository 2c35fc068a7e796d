"""Prefill attention for Hopper in Gluon: a prototype, its check and its benchmark.

The kernel has the structure of FlashAttention-3 (arXiv:2407.08608). Its programs are persistent and
warp-specialised. One warp, the producer, loads queries, keys and values by TMA into shared memory.
Two or three warpgroups, the consumers, compute 64 rows of queries each. A consumer issues the
matmul for the scores of the next tile of keys before it computes the softmax of the current one
(the paper's section 3.2), and named barriers let one consumer compute its softmax while another
one uses the tensor cores (section 3.1, ping-pong scheduling).

    python -m benchmarks.gluon_prefill --output FILE     checks and times every tile, on a GPU
    python -m benchmarks.gluon_prefill --compile-only    compiles every tile, without a GPU
"""

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

LOG2_E = 1.4426950408889634
ROWS = 64  # rows of queries per consumer: those of one wgmma instruction
MANY = 1 << 30  # more rows than any tensor has
GL_ROWS, GL_MANY, GL_LOG2_E = gl.constexpr(ROWS), gl.constexpr(MANY), gl.constexpr(LOG2_E)


class Sizes(NamedTuple):
    """What a kernel is compiled for. WINDOW and SOFTCAP are 0 for none, and PAGE_SIZE is 0 for keys
    that are not paged. BOX is the number of keys per TMA load. See Tile for the rest."""

    CONSUMERS: int
    STAGES: int
    BLOCK_N: int
    HEAD_DIM: int
    Q_HEADS: int
    GROUP: int
    PAGE_SIZE: int
    BOX: int
    WINDOW: int
    SOFTCAP: float
    OWN_OUTPUT: bool
    PING_PONG: bool


@aggregate
class KernelSizes:
    """Sizes, for the compiler."""

    __annotations__ = dict.fromkeys(Sizes._fields, gl.constexpr)

    @gluon.constexpr_function
    def __init__(self, sizes):
        for name, size in sizes._asdict().items():
            setattr(self, name, gl.constexpr(size))


@aggregate
class Buffers:
    """Tiles in shared memory. ``full`` completes a phase when the producer's loads into a tile have
    arrived, and ``empty`` when every consumer has read it."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles = tiles
        self.full = full
        self.empty = empty


@aggregate
class Work:
    """The items of work: tiles of queries times query heads. A program computes one per round, and
    every other round goes through the programs backwards, so that all get about as many keys."""

    tiles: gl.tensor  # [num_tiles, 4], see schedule
    num_items: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tiles, num_items):
        self.tiles = tiles
        self.num_items = num_items

    @gluon.jit
    def index(self, round):
        pid, num_programs = gl.program_id(0), gl.num_programs(0)
        place = gl.where(round % 2 == 0, pid, num_programs - 1 - pid)
        return round * num_programs + place

    @gluon.jit
    def num_rounds(self):
        full = self.num_items // gl.num_programs(0)
        return full + (self.index(full) < self.num_items).to(gl.int32)

    @gluon.jit
    def read(self, round, FIELD: gl.constexpr, Q_HEADS: gl.constexpr):
        """Reads two of the four fields of an item's tile. Past the last round, reads any item's."""
        item = gl.minimum(self.index(round), self.num_items - 1)
        pointer = self.tiles + item // Q_HEADS * 4 + FIELD
        return gl.load(pointer), gl.load(pointer + 1), item % Q_HEADS


@gluon.jit
def _key_tiles(first_position, num_rows, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):
    """Returns the first and last tile of keys that a tile of queries attends to, and in between the
    first one that needs no mask for the window and the first one that needs the causal mask, which
    the last tile always gets."""
    first, first_full = 0, 0
    if WINDOW:
        first = gl.maximum(first_position + 1 - WINDOW, 0) // BLOCK_N
        first_full = gl.maximum(first_position + num_rows - WINDOW + BLOCK_N - 1, 0) // BLOCK_N
    last = (first_position + num_rows - 1) // BLOCK_N
    diagonal = gl.minimum((first_position + 1) // BLOCK_N, last)
    return first, gl.minimum(first_full, diagonal), diagonal, last


@gluon.jit
def _next_stage(stage, phase, STAGES: gl.constexpr):
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _load_keys(
    desc, buffers, stage, phase, tile, tables_ptr, k_start, begin, end, column, table_stride, S
):
    """Loads a tile of keys or values. Those from ``end`` on become zeros, see ragged_descriptor, and
    so do those in pages before ``begin``, for which the block table need not have an entry."""
    mbarrier.wait(buffers.empty.index(stage), phase ^ 1)
    full = buffers.full.index(stage)
    mbarrier.expect(full, S.BLOCK_N * S.HEAD_DIM * 2)
    smem = buffers.tiles.index(stage)
    for i in gl.static_range(S.BLOCK_N // S.BOX):
        start, size, row = k_start, end, tile * S.BLOCK_N + i * S.BOX
        if S.PAGE_SIZE:
            page = row // S.PAGE_SIZE
            table = tables_ptr + k_start.to(gl.int64) * table_stride
            is_read = (row < end) & (row + S.BOX > begin)
            start = gl.load(table + page, mask=is_read, other=0) * S.PAGE_SIZE
            size = gl.where(is_read, gl.minimum(end - page * S.PAGE_SIZE, S.PAGE_SIZE), 0)
            row = row % S.PAGE_SIZE
        coordinates = [GL_MANY, start + size, GL_MANY - size + row, column]
        box = smem.slice(i * S.BOX, S.BOX, 2)
        tma.async_copy_global_to_shared(desc, coordinates, full, box)


@gluon.jit
def _produce(tables_ptr, q_desc, k_desc, v_desc, q, k, v, work, table_stride, S):
    """Loads all tiles in the order in which the consumers read them: of each item the last tile of
    keys first, and the values of a tile after the keys of the next."""
    stage, phase = 0, 0
    for round in range(work.num_rounds()):
        q_row, k_start, head = work.read(round, 0, S.Q_HEADS)
        first_position, num_rows, _ = work.read(round, 2, S.Q_HEADS)
        end = first_position + num_rows
        first, _, _, last = _key_tiles(first_position, num_rows, S.BLOCK_N, S.WINDOW)
        begin = gl.maximum(first_position + 1 - S.WINDOW, 0) if S.WINDOW else 0
        column = head // S.GROUP * S.HEAD_DIM
        rest = k_start, begin, end, column, table_stride, S
        _load_keys(k_desc, k, stage, phase, last, tables_ptr, *rest)
        mbarrier.wait(q.empty.index(0), round & 1 ^ 1)
        full = q.full.index(0)
        mbarrier.expect(full, S.CONSUMERS * GL_ROWS * S.HEAD_DIM * 2)
        for i in gl.static_range(S.CONSUMERS):
            row = GL_MANY - num_rows + i * GL_ROWS
            coordinates = [GL_MANY, q_row + num_rows, row, head * S.HEAD_DIM]
            tma.async_copy_global_to_shared(q_desc, coordinates, full, q.tiles.index(i))
        for i in range(last - first):
            next_stage, next_phase = _next_stage(stage, phase, S.STAGES)
            _load_keys(k_desc, k, next_stage, next_phase, last - i - 1, tables_ptr, *rest)
            _load_keys(v_desc, v, stage, phase, last - i, tables_ptr, *rest)
            stage, phase = next_stage, next_phase
        _load_keys(v_desc, v, stage, phase, first, tables_ptr, *rest)
        stage, phase = _next_stage(stage, phase, S.STAGES)


@gluon.jit
def _sync(BARRIER: gl.constexpr):
    """Waits at a named barrier for the other consumer's ``_arrive``."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, $1;", "=r,r", [BARRIER], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _arrive(BARRIER: gl.constexpr):
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, $1;", "=r,r", [BARRIER], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _compute_first(x):
    """Returns x, a tensor of two nonnegative numbers per thread, and makes the assembler keep what
    computes it before later waits. Otherwise it moves the wait for a matmul up, before the softmax
    that the matmul should overlap. It does not move code across a branch, even one never taken."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred negative;
        setp.lt.f32 negative, $2, 0f00000000;
        again:
        @negative nanosleep.u32 100;
        @negative bra again;
        mov.f32 $0, $2;
        mov.f32 $1, $3;
        }""",
        "=f,=f,f,f",
        [x],
        gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def _softmax(scores, row_max, row_sum, scale_log2e, tile, position, MASKED: gl.constexpr, S):
    """One step of the online softmax, in base 2. Returns weights, maximum, sum, and the factor by
    which earlier weights shrink."""
    if S.SOFTCAP > 0:
        scores = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;",
            "=f,f",
            [scores * (scale_log2e / S.SOFTCAP)],
            gl.float32,
            is_pure=True,
            pack=1,
        )
        scale_log2e = gl.to_tensor(S.SOFTCAP)
    if MASKED:
        key = gl.arange(0, S.BLOCK_N, gl.SliceLayout(0, scores.type.layout))[None, :]
        newest = (position - tile * S.BLOCK_N)[:, None]
        visible = key <= newest
        if S.WINDOW:
            visible = visible & (key > newest - S.WINDOW)
        scores = gl.where(visible, scores, -float("inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2e)
    offset = new_max
    if MASKED:
        offset = gl.where(new_max == -float("inf"), 0.0, new_max)
    weights = gl.exp2(scores * scale_log2e - offset[:, None])
    decay = gl.exp2(row_max - offset)
    return weights, new_max, row_sum * decay + gl.sum(weights, 1), decay


@gluon.jit
def _start_scores(q, k, stage, S):
    """Issues the matmul of the queries and a tile of keys."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BLOCK_N, 16])
    keys = k.tiles.index(stage).reshape([S.BLOCK_N, S.HEAD_DIM]).permute([1, 0])
    zeros = gl.zeros([GL_ROWS, S.BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_output(operand, v, out, stage, S):
    """Issues the matmul of weights, in registers, and a tile of values."""
    values = v.tiles.index(stage).reshape([S.BLOCK_N, S.HEAD_DIM])
    return warpgroup_mma(operand, values, out, is_async=True)


@gluon.jit
def _to_operand(weights, S):
    """Converts weights to the left operand of a matmul, in place: not after later matmuls start."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.HEAD_DIM, 16])
    operand = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [weights], gl.bfloat16, is_pure=False, pack=2
    )
    return gl.convert_layout(operand, gl.DotOperandLayout(0, o_layout, 2), assert_trivial=True)


@gluon.jit
def _attend(
    num_tiles,
    q,
    k,
    v,
    stage,
    phase,
    tile,
    weights,
    out,
    row_max,
    row_sum,
    scale_log2e,
    position,
    CONSUMER: gl.constexpr,
    MASKED: gl.constexpr,
    S,
):
    """Attends to the ``num_tiles`` tiles of keys before ``tile``, from the last to the first.

    ``weights`` are those of the tile before, whose values, in ``stage``, are still to be added to
    ``out``. Algorithm 2 of the paper.
    """
    for _ in range(num_tiles):
        tile -= 1
        operand = _to_operand(weights, S)
        k_stage, k_phase = _next_stage(stage, phase, S.STAGES)
        mbarrier.wait(k.full.index(k_stage), k_phase)
        if S.PING_PONG:
            _sync(8 + CONSUMER)
        scores = _start_scores(q, k, k_stage, S)
        mbarrier.wait(v.full.index(stage), phase)
        out = _start_output(operand, v, out, stage, S)
        if S.PING_PONG:
            _arrive(8 + (CONSUMER + 1) % S.CONSUMERS)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k.empty.index(k_stage))
        weights, row_max, row_sum, decay = _softmax(
            scores, row_max, row_sum, scale_log2e, tile, position, MASKED, S
        )
        row_sum = _compute_first(row_sum)
        out, operand, weights = warpgroup_mma_wait(0, deps=[out, operand, weights])
        mbarrier.arrive(v.empty.index(stage))
        out *= gl.convert_layout(decay, gl.SliceLayout(1, out.type.layout))[:, None]
        stage, phase = k_stage, k_phase
    return stage, phase, tile, weights, out, row_max, row_sum


@gluon.jit
def _consume(CONSUMER: gl.constexpr, sinks_ptr, out_desc, q, k, v, out_tiles, work, scale_log2e, S):
    """Computes the rows of one consumer, in all items of the program."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.HEAD_DIM, 16])
    r_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    if S.PING_PONG and CONSUMER == S.CONSUMERS - 1:
        _arrive(8)
    queries = q.tiles.index(CONSUMER).reshape([GL_ROWS, S.HEAD_DIM])
    out_tile = out_tiles.index(CONSUMER)
    row = gl.arange(0, GL_ROWS, r_layout) + CONSUMER * GL_ROWS
    stage, phase = 0, 0
    first_position, num_rows, _ = work.read(0, 2, S.Q_HEADS)
    for round in range(work.num_rounds()):
        next_first_position, next_num_rows, _ = work.read(round + 1, 2, S.Q_HEADS)  # ahead of use
        first, first_full, diagonal, tile = _key_tiles(
            first_position, num_rows, S.BLOCK_N, S.WINDOW
        )
        position = first_position + row
        max_before, sum_before = -float("inf"), 0.0
        if sinks_ptr is not None:  # a score without a key
            _, _, head = work.read(round, 0, S.Q_HEADS)
            max_before, sum_before = gl.load(sinks_ptr + head) * GL_LOG2_E, 1.0
        row_max = gl.full([GL_ROWS], max_before, gl.float32, r_layout)
        row_sum = gl.full([GL_ROWS], sum_before, gl.float32, r_layout)
        out = gl.zeros([GL_ROWS, S.HEAD_DIM], gl.float32, o_layout)
        mbarrier.wait(q.full.index(0), round & 1)
        mbarrier.wait(k.full.index(stage), phase)
        scores = warpgroup_mma_wait(0, deps=[_start_scores(queries, k, stage, S)])
        mbarrier.arrive(k.empty.index(stage))
        weights, row_max, row_sum, _ = _softmax(
            scores, row_max, row_sum, scale_log2e, tile, position, True, S
        )
        args = queries, k, v
        stage, phase, tile, weights, out, row_max, row_sum = _attend(
            tile - diagonal,
            *args,
            stage,
            phase,
            tile,
            weights,
            out,
            row_max,
            row_sum,
            scale_log2e,
            position,
            CONSUMER,
            True,
            S,
        )
        stage, phase, tile, weights, out, row_max, row_sum = _attend(
            tile - first_full,
            *args,
            stage,
            phase,
            tile,
            weights,
            out,
            row_max,
            row_sum,
            scale_log2e,
            position,
            CONSUMER,
            False,
            S,
        )
        if S.WINDOW:
            stage, phase, tile, weights, out, row_max, row_sum = _attend(
                tile - first,
                *args,
                stage,
                phase,
                tile,
                weights,
                out,
                row_max,
                row_sum,
                scale_log2e,
                position,
                CONSUMER,
                True,
                S,
            )
        if S.OWN_OUTPUT:
            mbarrier.arrive(q.empty.index(0))
        q_row, _, head = work.read(round, 0, S.Q_HEADS)
        mbarrier.wait(v.full.index(stage), phase)
        operand = _to_operand(weights, S)
        out = _start_output(operand, v, out, stage, S)
        out, operand = warpgroup_mma_wait(0, deps=[out, operand])
        mbarrier.arrive(v.empty.index(stage))
        stage, phase = _next_stage(stage, phase, S.STAGES)
        out *= gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, o_layout))[:, None]
        if S.OWN_OUTPUT:
            tma.store_wait(0)
        out_tile.reshape([GL_ROWS, S.HEAD_DIM]).store(out.to(gl.bfloat16))
        fence_async_shared()
        first_row = GL_MANY - num_rows + CONSUMER * GL_ROWS
        coordinates = [GL_MANY, q_row + num_rows, first_row, head * S.HEAD_DIM]
        tma.async_copy_shared_to_global(out_desc, coordinates, out_tile)
        if not S.OWN_OUTPUT:
            tma.store_wait(0)
            mbarrier.arrive(q.empty.index(0))
        first_position, num_rows = next_first_position, next_num_rows
    tma.store_wait(0)


@gluon.jit
def _buffers(desc, COUNT: gl.constexpr, NUM_ROWS: gl.constexpr, BARRIERS: gl.constexpr, S):
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(gl.bfloat16, [COUNT, 1, 1, NUM_ROWS, S.HEAD_DIM], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], barrier)
    for i in gl.static_range(BARRIERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=S.CONSUMERS)
    return Buffers(tiles, full, empty)


@gluon.jit(do_not_specialize=["table_stride", "num_items"])
def _prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    tiles_ptr,
    num_items,
    tables_ptr,
    table_stride,
    sinks_ptr,
    scale_log2e,
    SIZES: gl.constexpr,
):
    """Computes the attention of all new tokens of a batch, see ``prefill``."""
    S = KernelSizes(SIZES)
    q = _buffers(q_desc, S.CONSUMERS, GL_ROWS, 1, S)
    k = _buffers(k_desc, S.STAGES, S.BLOCK_N, S.STAGES, S)
    v = _buffers(v_desc, S.STAGES, S.BLOCK_N, S.STAGES, S)
    out_tiles = q.tiles
    if S.OWN_OUTPUT:
        out_tiles = gl.allocate_shared_memory(
            gl.bfloat16, [S.CONSUMERS, 1, 1, GL_ROWS, S.HEAD_DIM], out_desc.layout
        )
    fence_async_shared()
    work = Work(tiles_ptr, num_items)
    args = out_desc, q, k, v, out_tiles, work, scale_log2e, S
    load_args = q_desc, k_desc, v_desc, q, k, v, work, table_stride, S
    if S.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, sinks_ptr) + args),
                (_consume, (1, sinks_ptr) + args),
                (_produce, (tables_ptr,) + load_args),
            ],
            [4, 1],
            [240, 24],  # with the first consumer's 240, three warpgroups' share of 65536
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, sinks_ptr) + args),
                (_consume, (1, sinks_ptr) + args),
                (_consume, (2, sinks_ptr) + args),
                (_produce, (tables_ptr,) + load_args),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


class Tile(NamedTuple):
    """Sizes of the kernel for one head size.

    Attributes:
        head_dim: size of a head.
        num_consumers: consumers, of 64 rows of queries each.
        num_keys: BLOCK_N, keys per tile.
        num_stages: tiles of keys, and of values, in shared memory.
        own_output: whether outputs have their own shared memory, instead of the queries'. The next
            queries are then loaded earlier.
        ping_pong: whether the consumers take turns with the tensor cores.
    """

    head_dim: int
    num_consumers: int
    num_keys: int
    num_stages: int
    own_output: bool = True
    ping_pong: bool = True

    @property
    def name(self) -> str:
        flags = ("" if self.own_output else "-shared") + ("" if self.ping_pong else "-free")
        return f"d{self.head_dim}-{self.num_consumers}x{ROWS}x{self.num_keys}-s{self.num_stages}{flags}"


TILES = (
    Tile(128, 2, 128, 2),
    Tile(128, 2, 128, 2, ping_pong=False),
    Tile(128, 2, 128, 3, own_output=False),
    Tile(128, 2, 64, 4),
    Tile(128, 3, 64, 3),
    Tile(64, 3, 128, 3),
    Tile(64, 3, 128, 3, ping_pong=False),
    Tile(64, 3, 64, 4),
    Tile(64, 2, 128, 4),
    Tile(256, 2, 64, 2, own_output=False),
    Tile(256, 2, 32, 4, own_output=False),
)


def schedule(
    lens_q: list[int], lens_k: list[int], num_rows: int, window: int = 0, paged: bool = False
) -> np.ndarray:
    """Cuts the queries of each sequence into tiles, those that attend to the most keys first.

    A model's layers share the result, so it is made once per step, on the host.

    Args:
        lens_q, lens_k: new tokens and context length of each sequence.
        num_rows: rows of queries per tile.
        window: keys that a token attends to; 0 for all.
        paged: whether keys are found through a block table.

    Returns:
        int32 [num_tiles, 4]: of each tile the first row of queries; the row of the sequence's first
        key, or the row of its block table; the first query's position; and the number of queries.
    """
    q, k = np.array(lens_q), np.array(lens_k)
    counts = -(-q // num_rows)
    seq = np.repeat(np.arange(len(q)), counts)
    offset = (np.arange(len(seq)) - np.repeat(counts.cumsum() - counts, counts)) * num_rows
    rows = np.minimum(q[seq] - offset, num_rows)
    position = (k - q)[seq] + offset
    start = seq if paged else (k.cumsum() - k)[seq]
    tiles = np.stack(((q.cumsum() - q)[seq] + offset, start, position, rows), axis=1)
    num_keys = position + rows - (np.maximum(position + 1 - window, 0) if window else 0)
    return tiles[np.argsort(-num_keys, kind="stable")].astype(np.int32)


def ragged_descriptor(x: Tensor, num_rows: int) -> TensorDescriptor:
    """Describes the rows of x, [N, heads, head_dim], to the TMA, in boxes of ``num_rows`` rows of a
    head. A box at (MANY, start + size, MANY - size + row, column) begins at row ``start + row``, and
    its rows from ``start + size`` on are out of bounds: they are read as zeros and not written.
    Addresses wrap around at 2^64, where the strides let the constants cancel. Triton's
    tools/ragged_tma.py has this idea.
    """
    stride, width = x.stride(0), x.size(1) * x.size(2)
    assert x.stride()[1:] == (x.size(2), 1)
    return TensorDescriptor(
        x,
        [0x7FFF0000, 0x7FFF0000, MANY, width],
        [(1 << 34) - stride, stride, stride, 1],
        [1, 1, num_rows, x.size(2)],
        gl.NVMMASharedLayout(128, 16, 4),
    )


class Case(NamedTuple):
    """A batch, and the parameters of a layer: ``len_q`` and ``len_k`` of each sequence, heads, and
    the window, softcap, sinks and page size, if any."""

    lens: tuple[tuple[int, int], ...]
    q_heads: int = 4
    kv_heads: int = 2
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    page_size: int = 0


class Inputs(NamedTuple):
    """The tensors of a case. k and v are [rows, kv_heads, head_dim], pages one after another."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: Tensor | None
    sinks: Tensor | None


def prefill(tile: Tile, case: Case, x: Inputs, tiles: Tensor, out: Tensor) -> Any:
    """Launches the kernel, or only compiles it if the inputs are not on a GPU. Returns it.

    Args:
        tile: sizes of the kernel.
        case: what ``tiles`` and ``x`` were made for.
        x: inputs in bf16.
        tiles: the result of ``schedule``.
        out: [N, q_heads, head_dim], the result.
    """
    box = tile.num_keys
    if case.page_size:  # a box is in one page
        box = min(box, case.page_size & -case.page_size)
    programs, launch = len(tiles) * case.q_heads, _prefill_kernel.warmup
    if x.q.is_cuda:
        properties = torch.cuda.get_device_properties(x.q.device)
        programs, launch = min(programs, properties.multi_processor_count), _prefill_kernel.run
    args = (
        ragged_descriptor(x.q, ROWS),
        ragged_descriptor(x.k, box),
        ragged_descriptor(x.v, box),
        ragged_descriptor(out, ROWS),
        tiles,
        len(tiles) * case.q_heads,
        x.tables,
        0 if x.tables is None else x.tables.stride(0),
        x.sinks,
        tile.head_dim**-0.5 * LOG2_E,
        Sizes(
            tile.num_consumers,
            tile.num_stages,
            tile.num_keys,
            tile.head_dim,
            case.q_heads,
            case.q_heads // case.kv_heads,
            case.page_size,
            box,
            case.window,
            case.softcap * LOG2_E,
            tile.own_output,
            tile.ping_pong,
        ),
    )
    return launch(*args, grid=(programs,), num_warps=4)


CHECKS = (
    Case(((1, 1),)),
    Case(((128, 128), (1, 1), (129, 129), (64, 64), (333, 333))),
    Case(((1000, 1000), (2, 1500), (77, 840)), q_heads=8, kv_heads=1),
    Case(((4097, 4097), (1024, 1024), (5, 5)), q_heads=16, kv_heads=8),
    Case(((700, 700), (130, 901)), window=128, softcap=50.0, sinks=True),
    Case(((1500, 1500), (40, 1100)), window=300, page_size=16),
    Case(((600, 600), (3, 512), (256, 1300)), page_size=256),
)
NUM_TIMINGS, CALLS = 10, 5
CHECK_SECONDS, TIME_SECONDS, NUM_CHECKS = 120, 90, 4
TIMED = ("1x8192", "8x2048", "16x1024", "1x30000")
TIMED_HEADS = {64: ((32, 8),), 128: ((16, 8), (32, 8)), 256: ((8, 4),)}


def make_inputs(case: Case, head_dim: int, device: str) -> tuple[Inputs, Inputs]:
    """Makes random inputs, with NaN in all keys and values that no query may read: after the last
    sequence, and in unused slots of the cache. Also returns the inputs without pages."""
    generator = torch.Generator().manual_seed(0)

    def make(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, head_dim, generator=generator).to(torch.bfloat16)

    lens_q, lens_k = zip(*case.lens, strict=True)
    q = make(sum(lens_q), case.q_heads)
    sinks = torch.randn(case.q_heads, generator=generator) if case.sinks else None
    keys = [make(sum(lens_k), case.kv_heads) for _ in range(2)]
    flat = Inputs(*(t if t is None else t.to(device) for t in (q, *keys, None, sinks)))
    unused, tables = 256, None
    slots = torch.arange(sum(lens_k))
    if size := case.page_size:
        num_pages = [-(-n // size) for n in lens_k]
        unused = sum(num_pages) * size + size - sum(lens_k)
        pages = 1 + torch.randperm(sum(num_pages), generator=generator).int()
        tables = torch.zeros(len(lens_k), max(num_pages) + 1, dtype=torch.int32)
        parts = []
        for i, (of_sequence, n) in enumerate(zip(pages.split(num_pages), lens_k, strict=True)):
            tables[i, : len(of_sequence)] = of_sequence
            position = torch.arange(n)
            parts.append(of_sequence[position // size] * size + position % size)
            if case.window:  # entries of pages that all windows have left
                tables[i, : max(n - case.lens[i][0] + 1 - case.window, 0) // size] = 1 << 30
        slots = torch.cat(parts).long()
    stored = []
    for key in keys:
        cache = torch.full((sum(lens_k) + unused, *key.shape[1:]), torch.nan, dtype=key.dtype)
        cache[slots] = key
        stored.append(cache.to(device))
    return Inputs(flat.q, *stored, None if tables is None else tables.to(device), flat.sinks), flat


def reference(case: Case, x: Inputs, dtype: torch.dtype) -> Tensor:
    """Attention in PyTorch, of inputs that are not paged, with matmuls of ``dtype``."""
    group, outs = case.q_heads // case.kv_heads, []
    starts = accumulate(case.lens, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0))
    for (q_start, k_start), (len_q, len_k) in zip(starts, case.lens, strict=False):
        q = x.q[q_start : q_start + len_q].transpose(0, 1).to(dtype)
        k, v = (
            t[k_start : k_start + len_k].repeat_interleave(group, 1).transpose(0, 1).to(dtype)
            for t in (x.k, x.v)
        )
        scores = (q @ k.transpose(1, 2)).float() * q.size(2) ** -0.5
        if case.softcap:
            scores = case.softcap * (scores / case.softcap).tanh()
        age = torch.arange(len_k - len_q, len_k, device=q.device)[:, None]
        age = age - torch.arange(len_k, device=q.device)
        hidden = (age < 0) | (age >= case.window) if case.window else age < 0
        scores.masked_fill_(hidden, -torch.inf)
        if x.sinks is not None:
            sinks = x.sinks[:, None, None].expand(-1, len_q, 1)
            scores = torch.cat((scores, sinks), 2)
        weights = scores.softmax(2)[..., :len_k].to(dtype)
        outs.append((weights @ v).transpose(0, 1).float())
    return torch.cat(outs)


def check(tile: Tile, case: Case, device: str = "cuda") -> str:
    """Compares with PyTorch in fp32. The largest error must be at most twice that of PyTorch in
    bf16. Returns what is wrong, or an empty string."""
    x, flat = make_inputs(case, tile.head_dim, device)
    num_rows = tile.num_consumers * ROWS
    lens_q, lens_k = (list(lens) for lens in zip(*case.lens, strict=True))
    tiles = schedule(lens_q, lens_k, num_rows, case.window, bool(case.page_size))
    canvas = torch.full((len(x.q) + num_rows, *x.q.shape[1:]), 7.0, dtype=x.q.dtype, device=device)
    out = canvas[: len(x.q)]
    prefill(tile, case, x, torch.from_numpy(tiles).to(device), out)
    expected = reference(case, flat, torch.float32)
    error = (out.float() - expected).abs()
    bound = 2 * (reference(case, flat, torch.bfloat16) - expected).abs().max() + 1e-3
    wrong = ~(error <= bound)  # so that NaN is wrong
    if wrong.any():
        rows, heads = wrong.any(2).nonzero().unbind(1)
        return (
            f"error {error.max():.4f}, at most {bound:.4f} expected; {len(rows)} of "
            f"{wrong[..., 0].numel()} rows wrong, the first ones (row, head): "
            f"{list(zip(rows.tolist(), heads.tolist(), strict=True))[:8]}"
        )
    return "" if (canvas[len(x.q) :] == 7).all() else "wrote after the last row"


def measure(tile: Tile) -> None:
    """Times the kernel and nanovllm's Triton kernel in turn, and prints TFLOP/s of both."""
    from nanovllm.kernels.attention.base import AttentionParams
    from nanovllm.kernels.attention.kv_cache import KVCache
    from nanovllm.kernels.attention.prefill import prefill_attention
    from nanovllm.utils.context import Context

    for q_heads, kv_heads in TIMED_HEADS[tile.head_dim]:
        for batch in TIMED:
            num_seqs, length = map(int, batch.split("x"))
            case = Case(((length, length),) * num_seqs, q_heads, kv_heads)
            x, _ = make_inputs(case, tile.head_dim, "cuda")
            lens = [length] * num_seqs
            tiles = torch.from_numpy(schedule(lens, lens, tile.num_consumers * ROWS)).cuda()
            bounds = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * length
            context = Context(True, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
            params = AttentionParams(tile.head_dim**-0.5)
            cache = KVCache(x.k[:, None], x.v[:, None])  # not read
            k, v = x.k[: len(x.q)], x.v[: len(x.q)]
            out = torch.empty_like(x.q)
            kernels = (
                partial(prefill, tile, case, x, tiles, out),
                partial(prefill_attention, x.q, k, v, cache, context, params),
            )
            times: tuple[list[float], ...] = ([], [])
            for _ in range(NUM_TIMINGS):
                for kernel, of_kernel in zip(kernels, times, strict=True):
                    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                    kernel()  # the caches and the clock are then those of this kernel
                    events[0].record()
                    for _ in range(CALLS):
                        kernel()
                    events[1].record()
                    events[1].synchronize()
                    of_kernel.append(events[0].elapsed_time(events[1]) / CALLS)
            flops = 2 * q_heads * tile.head_dim * num_seqs * length * (length + 1)
            rates = [flops / np.median(of_kernel) / 1e9 for of_kernel in times]
            print(
                f"{tile.name:24} {q_heads:2}/{kv_heads} {batch:8} "
                f"gluon {rates[0]:4.0f}  triton {rates[1]:4.0f} TFLOP/s",
                flush=True,
            )


def compile_all() -> None:
    """Compiles every tile for a Hopper GPU, without one, and prints what the machine code has."""
    from triton.backends.compiler import GPUTarget

    class Hopper:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    triton.runtime.driver.set_active(Hopper())
    print("tile, features: registers at launch, bytes of stack, KiB of shared memory; instructions")
    for tile in TILES:
        for case in (Case(((1, 1),)), *CHECKS[-3:]):
            x, _ = make_inputs(case, tile.head_dim, "cpu")
            tiles = torch.zeros(1, 4, dtype=torch.int32)
            kernel = prefill(tile, case, x, tiles, torch.empty_like(x.q))
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(kernel.asm["cubin"])
                file.flush()
                usage, sass = (
                    subprocess.run(
                        [triton.knobs.nvidia.cuobjdump.path, option, file.name],
                        capture_output=True,
                        text=True,
                        check=True,
                    ).stdout
                    for option in ("-res-usage", "-sass")
                )
            registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
            names = ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "MUFU.EX2", "STL", "LDL")
            counts = "  ".join(f"{name} {sass.count(f' {name}')}" for name in names)
            features = f"window {case.window} softcap {case.softcap:.0f} page {case.page_size}"
            shared = kernel.metadata.shared / 1024
            print(f"{tile.name:24} {features}: {registers} {stack} {shared:.1f}; {counts}")


def run_child(stage: str, tile: Tile, timeout: int) -> tuple[bool, str]:
    """Runs one stage for one tile in a process that is killed if it hangs. Returns whether it
    succeeded, and its output."""
    command = [sys.executable, "-m", "benchmarks.gluon_prefill", "--stage", stage, tile.name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return False, f"{output}{tile.name}: {stage} killed after {timeout} s\n"
    return process.returncode == 0, output


def check_tile(tile: Tile) -> bool:
    """Checks one tile in all cases, prints the results, and returns whether all are right."""
    passed = True
    for case in CHECKS:
        problem = check(tile, case)
        passed &= not problem
        print(f"{tile.name:24} {problem or 'right'}: {case}", flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tiles", nargs="*", help="names of tiles; all by default")
    parser.add_argument("--output", type=Path, help="file that results are appended to")
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--stage", choices=("check", "time"), help="in this process, of one tile")
    options = parser.parse_args()
    if options.compile_only:
        compile_all()
        return
    tiles = [tile for tile in TILES if not options.tiles or tile.name in options.tiles]
    if options.stage == "check":
        sys.exit(not check_tile(tiles[0]))
    if options.stage == "time":
        measure(tiles[0])
        return

    def report(text: str) -> None:
        print(text, end="", flush=True)
        if options.output:
            with options.output.open("a") as file:
                file.write(text)

    with ThreadPoolExecutor(NUM_CHECKS) as executor:  # compiling takes most of the time
        results = list(executor.map(lambda tile: run_child("check", tile, CHECK_SECONDS), tiles))
    for _, output in results:
        report(output)
    for tile, (passed, _) in zip(tiles, results, strict=True):
        if passed:
            report(run_child("time", tile, TIME_SECONDS)[1])


if __name__ == "__main__":
    main()
