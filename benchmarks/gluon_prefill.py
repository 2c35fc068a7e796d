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
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


@aggregate
class Shape:
    """What a kernel is compiled for. WINDOW and SOFTCAP are 0 for none, and PAGE_SIZE is 0 for keys
    that are not paged. BOX is the number of keys per TMA load."""

    CONSUMERS: gl.constexpr
    STAGES: gl.constexpr
    BLOCK_N: gl.constexpr
    HEAD_DIM: gl.constexpr
    Q_HEADS: gl.constexpr
    GROUP: gl.constexpr
    PAGE_SIZE: gl.constexpr
    BOX: gl.constexpr
    WINDOW: gl.constexpr
    SOFTCAP: gl.constexpr
    OWN_OUTPUT: gl.constexpr
    PING_PONG: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        CONSUMERS,
        STAGES,
        BLOCK_N,
        HEAD_DIM,
        Q_HEADS,
        GROUP,
        PAGE_SIZE,
        BOX,
        WINDOW,
        SOFTCAP,
        OWN_OUTPUT,
        PING_PONG,
    ):
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.STAGES = gl.constexpr(STAGES)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.Q_HEADS = gl.constexpr(Q_HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.PAGE_SIZE = gl.constexpr(PAGE_SIZE)
        self.BOX = gl.constexpr(BOX)
        self.WINDOW = gl.constexpr(WINDOW)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.OWN_OUTPUT = gl.constexpr(OWN_OUTPUT)
        self.PING_PONG = gl.constexpr(PING_PONG)


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
    desc, buffers, stage, phase, tile, k_start, end, column, tables_ptr, table_stride, S
):
    """Loads a tile of keys or values. Those from ``end`` on become zeros, see ragged_descriptor."""
    mbarrier.wait(buffers.empty.index(stage), phase ^ 1)
    full = buffers.full.index(stage)
    mbarrier.expect(full, S.BLOCK_N * S.HEAD_DIM * 2)
    smem = buffers.tiles.index(stage)
    for i in gl.static_range(S.BLOCK_N // S.BOX):
        start, size, row = k_start, end, tile * S.BLOCK_N + i * S.BOX
        if S.PAGE_SIZE:
            page = row // S.PAGE_SIZE
            table = tables_ptr + k_start.to(gl.int64) * table_stride
            start = gl.load(table + page, mask=row < end, other=0) * S.PAGE_SIZE
            size = gl.minimum(end - page * S.PAGE_SIZE, S.PAGE_SIZE)
            row = row % S.PAGE_SIZE
        coordinates = [GL_MANY, start + size, GL_MANY - size + row, column]
        box = smem.slice(i * S.BOX, S.BOX, 2)
        tma.async_copy_global_to_shared(desc, coordinates, full, box)


@gluon.jit
def _produce(q_desc, k_desc, v_desc, q, k, v, work, tables_ptr, table_stride, S):
    """Loads all tiles in the order in which the consumers read them: of each item the last tile of
    keys first, and the values of a tile after the keys of the next."""
    stage, phase = 0, 0
    for round in range(work.num_rounds()):
        q_row, k_start, head = work.read(round, 0, S.Q_HEADS)
        first_position, num_rows, _ = work.read(round, 2, S.Q_HEADS)
        end = first_position + num_rows
        first, _, _, last = _key_tiles(first_position, num_rows, S.BLOCK_N, S.WINDOW)
        column = head // S.GROUP * S.HEAD_DIM
        rest = k_start, end, column, tables_ptr, table_stride, S
        _load_keys(k_desc, k, stage, phase, last, *rest)
        mbarrier.wait(q.empty.index(0), round & 1 ^ 1)
        full = q.full.index(0)
        mbarrier.expect(full, S.CONSUMERS * GL_ROWS * S.HEAD_DIM * 2)
        for i in gl.static_range(S.CONSUMERS):
            row = GL_MANY - num_rows + i * GL_ROWS
            coordinates = [GL_MANY, q_row + num_rows, row, head * S.HEAD_DIM]
            tma.async_copy_global_to_shared(q_desc, coordinates, full, q.tiles.index(i))
        for i in range(last - first):
            next_stage, next_phase = _next_stage(stage, phase, S.STAGES)
            _load_keys(k_desc, k, next_stage, next_phase, last - i - 1, *rest)
            _load_keys(v_desc, v, stage, phase, last - i, *rest)
            stage, phase = next_stage, next_phase
        _load_keys(v_desc, v, stage, phase, first, *rest)
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
    if S.SOFTCAP:
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
def _start_output(weights, v, out, stage, S):
    """Issues the matmul of weights, in registers, and a tile of values."""
    layout: gl.constexpr = gl.DotOperandLayout(0, out.type.layout, 2)
    weights = gl.convert_layout(weights.to(gl.bfloat16), layout, assert_trivial=True)
    values = v.tiles.index(stage).reshape([S.BLOCK_N, S.HEAD_DIM])
    return weights, warpgroup_mma(weights, values, out, is_async=True)


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
        k_stage, k_phase = _next_stage(stage, phase, S.STAGES)
        mbarrier.wait(k.full.index(k_stage), k_phase)
        if S.PING_PONG:
            _sync(8 + CONSUMER)
        scores = _start_scores(q, k, k_stage, S)
        mbarrier.wait(v.full.index(stage), phase)
        operand, out = _start_output(weights, v, out, stage, S)
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
def _consume(
    CONSUMER: gl.constexpr, out_desc, q, k, v, out_tiles, work, sinks_ptr, scale_log2e, S
):
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
        row_max = gl.full([GL_ROWS], -float("inf"), gl.float32, r_layout)
        row_sum = gl.full([GL_ROWS], 0.0, gl.float32, r_layout)
        if sinks_ptr is not None:  # a score without a key
            _, _, head = work.read(round, 0, S.Q_HEADS)
            row_max += gl.load(sinks_ptr + head) * GL_LOG2_E
            row_sum += 1.0
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
            tile - diagonal, *args, stage, phase, tile, weights, out, row_max, row_sum,
            scale_log2e, position, CONSUMER, True, S
        )
        stage, phase, tile, weights, out, row_max, row_sum = _attend(
            tile - first_full, *args, stage, phase, tile, weights, out, row_max, row_sum,
            scale_log2e, position, CONSUMER, False, S
        )
        if S.WINDOW:
            stage, phase, tile, weights, out, row_max, row_sum = _attend(
                tile - first, *args, stage, phase, tile, weights, out, row_max, row_sum,
                scale_log2e, position, CONSUMER, True, S
            )
        if S.OWN_OUTPUT:
            mbarrier.arrive(q.empty.index(0))
        q_row, _, head = work.read(round, 0, S.Q_HEADS)
        mbarrier.wait(v.full.index(stage), phase)
        weights, out = _start_output(weights, v, out, stage, S)
        out, weights = warpgroup_mma_wait(0, deps=[out, weights])
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
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    Q_HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    OWN_OUTPUT: gl.constexpr,
    PING_PONG: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    S = Shape(
        CONSUMERS, STAGES, BLOCK_N, HEAD_DIM, Q_HEADS, Q_HEADS // KV_HEADS, PAGE_SIZE,
        k_desc.block_shape[2], WINDOW, SOFTCAP, OWN_OUTPUT, PING_PONG
    )
    q = _buffers(q_desc, CONSUMERS, GL_ROWS, 1, S)
    k = _buffers(k_desc, STAGES, BLOCK_N, STAGES, S)
    v = _buffers(v_desc, STAGES, BLOCK_N, STAGES, S)
    out_tiles = q.tiles
    if OWN_OUTPUT:
        out_tiles = gl.allocate_shared_memory(
            gl.bfloat16, [CONSUMERS, 1, 1, GL_ROWS, HEAD_DIM], out_desc.layout
        )
    fence_async_shared()
    work = Work(tiles_ptr, num_items)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, out_desc, q, k, v, out_tiles, work, sinks_ptr, scale_log2e, S)),
                (_consume, (1, out_desc, q, k, v, out_tiles, work, sinks_ptr, scale_log2e, S)),
                (_produce, (q_desc, k_desc, v_desc, q, k, v, work, tables_ptr, table_stride, S)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, out_desc, q, k, v, out_tiles, work, sinks_ptr, scale_log2e, S)),
                (_consume, (1, out_desc, q, k, v, out_tiles, work, sinks_ptr, scale_log2e, S)),
                (_consume, (2, out_desc, q, k, v, out_tiles, work, sinks_ptr, scale_log2e, S)),
                (_produce, (q_desc, k_desc, v_desc, q, k, v, work, tables_ptr, table_stride, S)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
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
