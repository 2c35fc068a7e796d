"""The kernel of prefill attention for Hopper, in Gluon. hopper_prefill.py launches it.

It has the structure of FlashAttention-3 (arXiv:2407.08608). Programs are persistent and
warp-specialised. One warp, the producer, loads queries, keys and values by TMA into shared memory.
Two or three warpgroups, the consumers, compute 64 rows of queries each. A consumer issues the
matmul for the scores of the next tile of keys before it computes the softmax of the current one
(the paper's section 3.2), and named barriers let one consumer compute its softmax while another
one uses the tensor cores (section 3.1, ping-pong scheduling).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from nanovllm.kernels.attention.hopper_prefill import MANY, ROWS
from nanovllm.kernels.attention.tiles import LOG2_E
from nanovllm.kernels.hopper import (
    FIRST_BARRIER,
    barrier_arrive,
    barrier_sync,
    tma_load,
    tma_store,
)

# Named barriers: those for turns with the tensor cores, and one per stage of keys and of values.
PING_PONG_BARRIER, KEY_BARRIER, VALUE_BARRIER = map(gl.constexpr, (FIRST_BARRIER, 8, 12))
GL_ROWS, GL_MANY, GL_LOG2_E = gl.constexpr(ROWS), gl.constexpr(MANY), gl.constexpr(LOG2_E)


@gluon.constexpr_function
def _accumulator(columns):
    """Layout of a consumer's matmul results, [ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _left_operand(columns):
    """Layout of the left operand of a matmul with that layout of results."""
    return gl.DotOperandLayout(0, _accumulator(columns), 2)


@gluon.constexpr_function
def _of_rows(columns):
    """Layout of a number per row of such results."""
    return gl.SliceLayout(1, _accumulator(columns))


@gluon.constexpr_function
def _of_columns(columns):
    return gl.SliceLayout(0, _accumulator(columns))


class Sizes(NamedTuple):
    """What a kernel is compiled for. DTYPE is bf16 or f16. WINDOW and SOFTCAP are 0 for none, and
    PAGE_SIZE is 0 for keys that are not paged. BOX is the number of keys per TMA load. See Tile for
    the rest."""

    DTYPE: str
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
    Q_STAGES: int
    PING_PONG: bool


@aggregate
class KernelSizes:
    """Sizes, for the compiler."""

    __annotations__ = dict.fromkeys(Sizes._fields, gl.constexpr)

    @gluon.constexpr_function
    def __init__(self, sizes):
        for name, size in zip(Sizes._fields, sizes, strict=True):  # may be a plain tuple here
            setattr(self, name, gl.constexpr(size))


@aggregate
class Buffers:
    """Tiles in shared memory. ``full`` completes a phase when the producer's loads into a tile have
    arrived. That every consumer has read a tile of queries is a phase of ``empty``. For a tile of
    keys or values it is a phase of a named barrier. EMPTY is the index of the first tile's one."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    EMPTY: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, EMPTY):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.EMPTY = gl.constexpr(EMPTY)


@aggregate
class Work:
    """The items of work: tiles of queries times query heads. A program computes one per round, and
    every other round goes through the programs backwards, so that all get about as many keys.
    ``tiles`` is the schedule, after its first row."""

    tiles: gl.tensor
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
        """Returns the number of items of this program, which may be 0."""
        full = self.num_items // gl.num_programs(0)
        return full + (self.index(full) < self.num_items).to(gl.int32)

    @gluon.jit
    def read(self, round, FIELD: gl.constexpr, S):
        """Reads two of the four fields of an item's tile. Past the last round, reads any item's."""
        item = gl.minimum(self.index(round), self.num_items - 1)
        pointer = self.tiles + item // S.Q_HEADS * 4 + FIELD
        return gl.load(pointer), gl.load(pointer + 1), item % S.Q_HEADS


@aggregate
class Parts:
    """What the producer and the consumers work with."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    out_desc: tma.tensor_descriptor
    q: Buffers
    k: Buffers
    v: Buffers
    work: Work
    table_stride: gl.tensor
    scale: gl.tensor  # of scores, times log2 e

    @gluon.constexpr_function
    def __init__(self, q_desc, k_desc, v_desc, out_desc, q, k, v, work, table_stride, scale):
        self.q_desc = q_desc
        self.k_desc = k_desc
        self.v_desc = v_desc
        self.out_desc = out_desc
        self.q = q
        self.k = k
        self.v = v
        self.work = work
        self.table_stride = table_stride
        self.scale = scale


@aggregate
class Slot:
    """A stage of the buffers of keys, or of values, and how often all stages were used before."""

    stage: gl.tensor
    lap: gl.tensor

    @gluon.constexpr_function
    def __init__(self, stage, lap):
        self.stage = stage
        self.lap = lap

    @gluon.jit
    def next(self, S):
        wraps = self.stage == S.STAGES - 1
        return Slot(gl.where(wraps, 0, self.stage + 1), gl.where(wraps, self.lap + 1, self.lap))


@aggregate
class Source:
    """Where an item's keys and values are: ``start`` is the row of the first key, or of the block
    table. Those from ``begin`` to ``end`` are read, in columns from ``column`` on."""

    start: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    column: gl.tensor

    @gluon.constexpr_function
    def __init__(self, start, begin, end, column):
        self.start = start
        self.begin = begin
        self.end = end
        self.column = column


@aggregate
class Rows:
    """A consumer's rows of queries: the weights of the last tile of keys, the sum of the weighted
    values of the tiles before, and each row's maximum of scores and sum of weights."""

    weights: gl.tensor
    out: gl.tensor
    max: gl.tensor
    sum: gl.tensor

    @gluon.constexpr_function
    def __init__(self, weights, out, max, sum):
        self.weights = weights
        self.out = out
        self.max = max
        self.sum = sum


@gluon.jit
def _key_tiles(first_position, num_rows, S):
    """Returns the first and last tile of keys that a tile of queries attends to, and in between the
    first one that needs no mask for the window and the first one that needs the causal mask, which
    the last tile always gets."""
    first, first_full = 0, 0
    if S.WINDOW:
        end = first_position + num_rows
        first = gl.maximum(first_position + 1 - S.WINDOW, 0) // S.BLOCK_N
        first_full = gl.maximum(end - S.WINDOW + S.BLOCK_N - 1, 0) // S.BLOCK_N
    last = (first_position + num_rows - 1) // S.BLOCK_N
    diagonal = gl.minimum((first_position + 1) // S.BLOCK_N, last)
    return first, gl.minimum(first_full, diagonal), diagonal, last


@gluon.jit
def _wait_empty(buffers, slot, S):
    """Lets the producer wait until the consumers have read what is in ``slot``."""
    if slot.lap > 0:
        barrier_sync(buffers.EMPTY + slot.stage, 32 + S.CONSUMERS * 128)


@gluon.jit
def _release(buffers, slot, S):
    """Says that this consumer has read what is in ``slot``. Threads arrive at a named barrier each
    for itself."""
    barrier_arrive(buffers.EMPTY + slot.stage, 32 + S.CONSUMERS * 128)


@gluon.jit
def _load_keys(desc, buffers, slot, tile, tables_ptr, table_stride, source, S):
    """Loads a tile of keys or values. Those from ``source.end`` on become zeros, see
    ragged_descriptor. So do those in pages before ``source.begin``, which may be in no table."""
    _wait_empty(buffers, slot, S)
    full = buffers.full.index(slot.stage)
    mbarrier.expect(full, S.BLOCK_N * S.HEAD_DIM * 2)
    smem = buffers.tiles.index(slot.stage)
    for i in gl.static_range(S.BLOCK_N // S.BOX):
        start, size, row = source.start, source.end, tile * S.BLOCK_N + i * S.BOX
        if S.PAGE_SIZE:
            page = row // S.PAGE_SIZE
            is_read = (row < source.end) & (row + S.BOX > source.begin)
            pointer = tables_ptr + source.start.to(gl.int64) * table_stride + page
            start = gl.load(pointer, mask=is_read, other=0) * S.PAGE_SIZE
            size = gl.minimum(source.end - page * S.PAGE_SIZE, S.PAGE_SIZE)
            size = gl.where(is_read, size, 0)
            row = row % S.PAGE_SIZE
        coordinates = [GL_MANY, start + size, GL_MANY - size + row, source.column]
        box = smem.slice(i * S.BOX, S.BOX, 2)
        tma_load(desc, coordinates, full, box)


@gluon.jit
def _load_queries(desc, q, round, row, num_rows, column, S):
    """Loads a tile of queries. Rows from ``num_rows`` on become zeros."""
    buffer = round % S.Q_STAGES
    mbarrier.wait(q.empty.index(buffer), round // S.Q_STAGES & 1 ^ 1)
    full = q.full.index(buffer)
    mbarrier.expect(full, S.CONSUMERS * GL_ROWS * S.HEAD_DIM * 2)
    for i in gl.static_range(S.CONSUMERS):
        coordinates = [GL_MANY, row + num_rows, GL_MANY - num_rows + i * GL_ROWS, column]
        smem = q.tiles.index(buffer * S.CONSUMERS + i)
        tma_load(desc, coordinates, full, smem)


@gluon.jit
def _produce(tables_ptr, parts, S):
    """Loads all tiles in the order in which the consumers read them: of each item the last tile of
    keys first, and the values of a tile after the next tile of keys, be it the next item's."""
    zero, stride = gl.to_tensor(0), parts.table_stride
    slot = Slot(zero + S.STAGES - 1, zero - 1)  # one before the first
    source, tile = Source(zero, zero, zero, zero), zero
    for round in range(parts.work.num_rounds()):
        q_row, start, head = parts.work.read(round, 0, S)
        first_position, num_rows, _ = parts.work.read(round, 2, S)
        first, _, _, last = _key_tiles(first_position, num_rows, S)
        begin = gl.maximum(first_position + 1 - S.WINDOW, 0) if S.WINDOW else zero
        end = first_position + num_rows
        new_source = Source(start, begin, end, head // S.GROUP * S.HEAD_DIM)
        new_slot = slot.next(S)
        _load_keys(parts.k_desc, parts.k, new_slot, last, tables_ptr, stride, new_source, S)
        if round > 0:
            _load_keys(parts.v_desc, parts.v, slot, tile, tables_ptr, stride, source, S)
        slot, source, tile = new_slot, new_source, last
        _load_queries(parts.q_desc, parts.q, round, q_row, num_rows, head * S.HEAD_DIM, S)
        for _ in range(last - first):
            new_slot = slot.next(S)
            _load_keys(parts.k_desc, parts.k, new_slot, tile - 1, tables_ptr, stride, source, S)
            _load_keys(parts.v_desc, parts.v, slot, tile, tables_ptr, stride, source, S)
            slot, tile = new_slot, tile - 1
    if slot.lap >= 0:  # there was an item
        _load_keys(parts.v_desc, parts.v, slot, tile, tables_ptr, stride, source, S)


@gluon.jit
def _end_block(stage):
    """Ends a basic block, by a branch that is never taken, because ``stage`` is not negative. The
    assembler moves no code across it. Otherwise it would put the wait for a matmul before the
    softmax that the matmul should overlap, and release a tile of keys only after that softmax."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred negative;
        setp.lt.s32 negative, $1, 0;
        again:
        @negative nanosleep.u32 100;
        @negative bra again;
        mov.u32 $0, $1;
        }""",
        "=r,r",
        [stage],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _softmax(scores, rows, scale, tile, position, MASKED: gl.constexpr, S):
    """One step of the online softmax, in base 2. Returns the weights, the new maximum and sum, and
    the factor by which earlier weights shrink."""
    if S.SOFTCAP > 0:  # scores become tanh(scaled scores / softcap)
        power = gl.exp2(scores * (scale * (2 * GL_LOG2_E / S.SOFTCAP)))
        scores = 1.0 - 2.0 / (power + 1.0)
        scale = gl.to_tensor(S.SOFTCAP)
    if MASKED:
        key = gl.arange(0, S.BLOCK_N, _of_columns(S.BLOCK_N))[None, :]
        newest = (position - tile * S.BLOCK_N)[:, None]
        visible = key <= newest
        if S.WINDOW:
            visible = visible & (key > newest - S.WINDOW)
        scores = gl.where(visible, scores, -float("inf"))
    new_max = gl.maximum(rows.max, gl.max(scores, 1) * scale)
    offset = new_max
    if MASKED:
        offset = gl.where(new_max == -float("inf"), 0.0, new_max)
    weights = gl.exp2(scores * scale - offset[:, None])
    decay = gl.exp2(rows.max - offset)
    return weights, new_max, rows.sum * decay + gl.sum(weights, 1), decay


@gluon.jit
def _queries(q, buffer, tile, CONSUMER: gl.constexpr, S):
    """Returns this consumer's queries in shared memory. Their address depends on ``tile``, but only
    for the assembler, as ``tile`` is not negative. With an address that several loops share, the
    assembler of CUDA 12.8 puts a part of it into a register before the first of these loops, and
    reads that register in the next loop even if the first one was skipped."""
    index = buffer * S.CONSUMERS + CONSUMER + gl.minimum(tile, 0)
    return q.tiles.index(index).reshape([GL_ROWS, S.HEAD_DIM])


@gluon.jit
def _start_scores(queries, k, slot, S):
    """Issues the matmul of the queries and a tile of keys."""
    keys = k.tiles.index(slot.stage).reshape([S.BLOCK_N, S.HEAD_DIM]).permute([1, 0])
    zeros = gl.zeros([GL_ROWS, S.BLOCK_N], gl.float32, _accumulator(S.BLOCK_N))
    return warpgroup_mma(queries, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _to_operand(weights, S):
    """Converts weights to the left operand of a matmul, in place: not after later matmuls start."""
    if S.DTYPE == "bf16":
        operand = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [weights], gl.bfloat16, is_pure=False, pack=2
        )
    else:
        operand = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [weights], gl.float16, is_pure=False, pack=2
        )
    return gl.convert_layout(operand, _left_operand(S.HEAD_DIM), assert_trivial=True)


@gluon.jit
def _start_output(operand, v, slot, out, S):
    """Issues the matmul of weights, in registers, and a tile of values."""
    values = v.tiles.index(slot.stage).reshape([S.BLOCK_N, S.HEAD_DIM])
    return warpgroup_mma(operand, values, out, is_async=True)


@gluon.jit
def _scaled(out, factor, S):
    return out * gl.convert_layout(factor, _of_rows(S.HEAD_DIM))[:, None]


@gluon.jit
def _step(
    buffer, parts, slot, rows, tile, position, CONSUMER: gl.constexpr, MASKED: gl.constexpr, S
):
    """Adds the values in ``slot``, whose weights are known, to the output, and meanwhile computes
    the softmax of the next tile of keys, ``tile``. Algorithm 2 of the paper. Returns the rows, with
    the sum and weights after ``tile`` and the output before it, and by how much that shrinks."""
    operand = _to_operand(rows.weights, S)
    k_slot = slot.next(S)
    mbarrier.wait(parts.k.full.index(k_slot.stage), k_slot.lap & 1)
    if S.PING_PONG:
        barrier_sync(PING_PONG_BARRIER + CONSUMER, 256)
    queries = _queries(parts.q, buffer, tile, CONSUMER, S)
    scores = _start_scores(queries, parts.k, k_slot, S)
    mbarrier.wait(parts.v.full.index(slot.stage), slot.lap & 1)
    out = _start_output(operand, parts.v, slot, rows.out, S)
    if S.PING_PONG:
        barrier_arrive(PING_PONG_BARRIER + (CONSUMER + 1) % S.CONSUMERS, 256)
    scores = warpgroup_mma_wait(1, deps=[scores])
    _release(parts.k, k_slot, S)
    _end_block(k_slot.stage)
    weights, new_max, new_sum, decay = _softmax(
        scores, rows, parts.scale, tile, position, MASKED, S
    )
    _end_block(k_slot.stage)
    out, operand, weights = warpgroup_mma_wait(0, deps=[out, operand, weights])
    _release(parts.v, slot, S)
    return Rows(weights, out, new_max, new_sum), decay


@gluon.jit
def _attend(
    num_tiles,
    buffer,
    parts,
    slot,
    rows,
    tile,
    position,
    CONSUMER: gl.constexpr,
    MASKED: gl.constexpr,
    S,
):
    """Attends to the ``num_tiles`` tiles of keys before ``tile``, from the last to the first."""
    for _ in range(num_tiles):
        tile -= 1
        rows, decay = _step(buffer, parts, slot, rows, tile, position, CONSUMER, MASKED, S)
        rows = Rows(rows.weights, _scaled(rows.out, decay, S), rows.max, rows.sum)
        slot = slot.next(S)
    return slot, rows, tile


@gluon.jit
def _empty_rows(sinks_ptr, head, S):
    """The state of rows before the first key."""
    max_before, sum_before = -float("inf"), 0.0
    if sinks_ptr is not None:  # a score without a key
        max_before, sum_before = gl.load(sinks_ptr + head) * GL_LOG2_E, 1.0
    return Rows(
        gl.zeros([GL_ROWS, S.BLOCK_N], gl.float32, _accumulator(S.BLOCK_N)),
        gl.zeros([GL_ROWS, S.HEAD_DIM], gl.float32, _accumulator(S.HEAD_DIM)),
        gl.full([GL_ROWS], max_before, gl.float32, _of_rows(S.BLOCK_N)),
        gl.full([GL_ROWS], sum_before, gl.float32, _of_rows(S.BLOCK_N)),
    )


@gluon.jit
def _first_step(buffer, parts, slot, rows, tile, position, CONSUMER: gl.constexpr, S):
    """Computes the softmax of an item's first tile of keys, with nothing else to do meanwhile."""
    queries = _queries(parts.q, buffer, tile, CONSUMER, S)
    mbarrier.wait(parts.k.full.index(slot.stage), slot.lap & 1)
    scores = warpgroup_mma_wait(0, deps=[_start_scores(queries, parts.k, slot, S)])
    _release(parts.k, slot, S)
    weights, new_max, new_sum, _ = _softmax(scores, rows, parts.scale, tile, position, True, S)
    return Rows(weights, rows.out, new_max, new_sum)


@gluon.jit
def _last_step(parts, slot, rows, S):
    """Adds the values in ``slot`` to the output, with nothing else to do meanwhile."""
    mbarrier.wait(parts.v.full.index(slot.stage), slot.lap & 1)
    operand = _to_operand(rows.weights, S)
    out = _start_output(operand, parts.v, slot, rows.out, S)
    out, operand = warpgroup_mma_wait(0, deps=[out, operand])
    _release(parts.v, slot, S)
    return Rows(rows.weights, out, rows.max, rows.sum)


@gluon.jit
def _consume(CONSUMER: gl.constexpr, sinks_ptr, parts, S):
    """Computes the rows of one consumer, in all items of the program."""
    num_rounds = parts.work.num_rounds()
    if num_rounds > 0:
        _consume_items(num_rounds, CONSUMER, sinks_ptr, parts, S)


@gluon.jit
def _consume_items(num_rounds, CONSUMER: gl.constexpr, sinks_ptr, parts, S):
    """With two stages of queries, an item's first step is also the last step of the item before.
    The tensor cores are then busy while the first softmax is computed."""
    if S.PING_PONG and CONSUMER == S.CONSUMERS - 1:
        barrier_arrive(PING_PONG_BARRIER, 256)
    first_position, num_rows, head = parts.work.read(0, 2, S)
    _, _, _, tile = _key_tiles(first_position, num_rows, S)
    slot, rows = Slot(gl.to_tensor(0), gl.to_tensor(0)), _empty_rows(sinks_ptr, head, S)
    row = gl.arange(0, GL_ROWS, _of_rows(S.BLOCK_N)) + CONSUMER * GL_ROWS
    mbarrier.wait(parts.q.full.index(0), 0)
    rows = _first_step(0, parts, slot, rows, tile, first_position + row, CONSUMER, S)
    for round in range(num_rounds):
        # Read and computed again: when tiles were carried over from the round before, the loop over
        # tiles with the causal mask was left out on the GPU.
        first_position, num_rows, head = parts.work.read(round, 2, S)
        first, first_full, diagonal, tile = _key_tiles(first_position, num_rows, S)
        position = first_position + row
        # Read long before its use, because reading takes long.
        next_position, next_num_rows, next_head = parts.work.read(round + 1, 2, S)
        buffer = round % S.Q_STAGES
        slot, rows, tile = _attend(
            tile - diagonal, buffer, parts, slot, rows, tile, position, CONSUMER, True, S
        )
        if S.Q_STAGES == 2:  # the output of the item before was stored from the other buffer
            tma.store_wait(0)
            mbarrier.arrive(parts.q.empty.index(1 - buffer), pred=round > 0)
        slot, rows, tile = _attend(
            tile - first_full, buffer, parts, slot, rows, tile, position, CONSUMER, False, S
        )
        if S.WINDOW:
            slot, rows, tile = _attend(
                tile - first, buffer, parts, slot, rows, tile, position, CONSUMER, True, S
            )
        _, _, _, tile = _key_tiles(next_position, next_num_rows, S)
        position = next_position + row
        q_row, _, _ = parts.work.read(round, 0, S)
        rows_sum = rows.sum
        has_next = round + 1 < num_rounds
        empty = _empty_rows(sinks_ptr, next_head, S)
        if has_next & (S.Q_STAGES == 2):
            rows = Rows(rows.weights, rows.out, empty.max, empty.sum)
            mbarrier.wait(parts.q.full.index(1 - buffer), (round + 1) // 2 & 1)
            rows = _step(1 - buffer, parts, slot, rows, tile, position, CONSUMER, True, S)[0]
        else:
            rows = _last_step(parts, slot, rows, S)
        slot = slot.next(S)
        out_tile = parts.q.tiles.index(buffer * S.CONSUMERS + CONSUMER)
        out = _scaled(rows.out, 1.0 / rows_sum, S).to(parts.out_desc.dtype)
        out_tile.reshape([GL_ROWS, S.HEAD_DIM]).store(out)
        fence_async_shared()
        first_row = GL_MANY - num_rows + CONSUMER * GL_ROWS
        coordinates = [GL_MANY, q_row + num_rows, first_row, head * S.HEAD_DIM]
        tma_store(parts.out_desc, coordinates, out_tile)
        rows = Rows(rows.weights, empty.out, rows.max, rows.sum)
        if S.Q_STAGES == 1:
            tma.store_wait(0)
            mbarrier.arrive(parts.q.empty.index(0))
            if has_next:
                mbarrier.wait(parts.q.full.index(0), round + 1 & 1)
                rows = _first_step(0, parts, slot, empty, tile, position, CONSUMER, S)
    tma.store_wait(0)


@gluon.jit
def _buffers(
    desc,
    COUNT: gl.constexpr,
    NUM_ROWS: gl.constexpr,
    BARRIERS: gl.constexpr,
    EMPTY: gl.constexpr,
    S,
):
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(desc.dtype, [COUNT, 1, 1, NUM_ROWS, S.HEAD_DIM], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], barrier)
    for i in gl.static_range(BARRIERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=S.CONSUMERS)
    return Buffers(tiles, full, empty, EMPTY)


@gluon.jit(do_not_specialize=["table_stride"])
def hopper_prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    schedule_ptr,
    tables_ptr,
    table_stride,
    sinks_ptr,
    scale_log2e,
    SIZES: gl.constexpr,
):
    """Computes the attention of all new tokens of a batch. q, k, v and out are described by
    ``ragged_descriptor``. See make_schedule for the schedule."""
    S = KernelSizes(SIZES)
    q = _buffers(q_desc, S.Q_STAGES * S.CONSUMERS, GL_ROWS, S.Q_STAGES, 0, S)
    k = _buffers(k_desc, S.STAGES, S.BLOCK_N, S.STAGES, KEY_BARRIER, S)
    v = _buffers(v_desc, S.STAGES, S.BLOCK_N, S.STAGES, VALUE_BARRIER, S)
    fence_async_shared()
    work = Work(schedule_ptr + 4, gl.load(schedule_ptr) * S.Q_HEADS)
    parts = Parts(q_desc, k_desc, v_desc, out_desc, q, k, v, work, table_stride, scale_log2e)
    if S.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, sinks_ptr, parts, S)),
                (_consume, (1, sinks_ptr, parts, S)),
                (_produce, (tables_ptr, parts, S)),
            ],
            [4, 1],
            [240, 24],  # and 240 for the first consumer: what three warpgroups have, 65536 in all
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, sinks_ptr, parts, S)),
                (_consume, (1, sinks_ptr, parts, S)),
                (_consume, (2, sinks_ptr, parts, S)),
                (_produce, (tables_ptr, parts, S)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
