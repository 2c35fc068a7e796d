"""The kernel of qkv.py: the projection to queries, keys and values on Hopper, with the norms of
heads, RoPE, and the store into the KV cache in its epilogue, in Gluon. See hopper_loop.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from nanovllm.kernels.gemm.hopper_loop import (
    GL_BLOCK_N,
    GL_ROWS,
    NEXT_BARRIER,
    Tiles,
    make_inputs,
    multiply_tile,
    produce,
)
from nanovllm.kernels.gemm.qkv import HEAD_DIM
from nanovllm.kernels.hopper import barrier_arrive, barrier_sync

FINISHER_WARPS = 2  # with more, consumers would have too few registers
# Half of a head's columns, steps in shared memory, and rows that are finished at a time.
HALF, STAGES, PART_ROWS = map(gl.constexpr, (HEAD_DIM // 2, 3, 16))
# Named barriers, one of each per consumer: that it has written its heads to shared memory, and that
# they have been read.
WRITTEN_BARRIER, READ_BARRIER = map(gl.constexpr, (NEXT_BARRIER, NEXT_BARRIER + 2))
HANDOVER_THREADS = gl.constexpr(128 + FINISHER_WARPS * 32)  # of a consumer and the finisher


@aggregate
class Rope:
    """The tensors and sizes that the epilogue uses, except for the weights of the norms."""

    out_ptr: gl.tensor
    positions_ptr: gl.tensor
    slot_mapping_ptr: gl.tensor
    cos_sin_ptr: gl.tensor
    k_cache_ptr: gl.tensor
    v_cache_ptr: gl.tensor
    num_rows: gl.tensor
    eps: gl.tensor
    Q_HEADS: gl.constexpr
    K_HEADS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        out_ptr,
        positions_ptr,
        slot_mapping_ptr,
        cos_sin_ptr,
        k_cache_ptr,
        v_cache_ptr,
        num_rows,
        eps,
        Q_HEADS,
        K_HEADS,
    ):
        self.out_ptr = out_ptr
        self.positions_ptr = positions_ptr
        self.slot_mapping_ptr = slot_mapping_ptr
        self.cos_sin_ptr = cos_sin_ptr
        self.k_cache_ptr = k_cache_ptr
        self.v_cache_ptr = v_cache_ptr
        self.num_rows = num_rows
        self.eps = eps
        self.Q_HEADS = gl.constexpr(Q_HEADS)
        self.K_HEADS = gl.constexpr(K_HEADS)


@gluon.constexpr_function
def _layout():
    """Layout of half a head in the epilogue: threads have 16 bytes of a row."""
    return gl.BlockedLayout([1, 8], [4, 8], [FINISHER_WARPS, 1], [1, 0])


@gluon.jit
def _columns():
    return gl.arange(0, HALF, gl.SliceLayout(0, _layout()))


@gluon.jit
def _normalize(x, head, rope):
    """Divides the rows of a query or key head [ROWS, 2 HALF] by their root mean square."""
    scale = gl.rsqrt(gl.sum(x * x, 1) / (2 * HALF) + rope.eps)
    return x * gl.where(head < rope.Q_HEADS + rope.K_HEADS, scale, 1.0)[:, None]


@gluon.jit
def _multiply(CONSUMER: gl.constexpr, heads, inputs, tiles, rope, HAS_NORM: gl.constexpr):
    """Computes the rows of one consumer in all tiles of the program. Their result goes to shared
    memory: two heads, in halves."""
    step = gl.to_tensor(0)
    for index in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        first, second, step = multiply_tile(step, inputs, tiles.num_steps, CONSUMER)
        if HAS_NORM:
            _, n = tiles.place(index)
            first, second = _normalize(first, 2 * n, rope), _normalize(second, 2 * n + 1, rope)
        first, second = first.to(heads.dtype), second.to(heads.dtype)
        first1, first2 = gl.split(first.reshape([GL_ROWS, 2, HALF]).permute([0, 2, 1]))
        second1, second2 = gl.split(second.reshape([GL_ROWS, 2, HALF]).permute([0, 2, 1]))
        if index >= gl.num_programs(0):
            barrier_sync(READ_BARRIER + CONSUMER, HANDOVER_THREADS)
        heads.index(4 * CONSUMER).store(first1)
        heads.index(4 * CONSUMER + 1).store(first2)
        heads.index(4 * CONSUMER + 2).store(second1)
        heads.index(4 * CONSUMER + 3).store(second2)
        barrier_arrive(WRITTEN_BARRIER + CONSUMER, HANDOVER_THREADS)


@aggregate
class Rows:
    """PART_ROWS rows of the result: their indices, positions and slots."""

    index: gl.tensor
    position: gl.tensor
    slot: gl.tensor

    @gluon.constexpr_function
    def __init__(self, index, position, slot):
        self.index = index
        self.position = position
        self.slot = slot


@gluon.jit
def _load_rows(first_row, rope):
    index = first_row + gl.arange(0, PART_ROWS, gl.SliceLayout(1, _layout()))
    is_row = index < rope.num_rows
    position = gl.load(rope.positions_ptr + index, mask=is_row, other=0)
    return Rows(index, position, gl.load(rope.slot_mapping_ptr + index, mask=is_row, other=-1))


@gluon.jit
def _load_angles(rows, rope):
    """Returns the cosines and sines of rows."""
    cos_sin_ptr = rope.cos_sin_ptr + (rows.position * (2 * HALF))[:, None] + _columns()[None, :]
    return gl.load(cos_sin_ptr), gl.load(cos_sin_ptr + HALF)


@gluon.jit
def _load_weight(head, rope, q_weight_ptr, k_weight_ptr):
    """Returns the weight of the norm of a query or key head, fp32, in halves."""
    weight_ptr = q_weight_ptr
    if head >= rope.Q_HEADS:
        weight_ptr = k_weight_ptr
    first, second = gl.load(weight_ptr + _columns()), gl.load(weight_ptr + HALF + _columns())
    return first.to(gl.float32)[None, :], second.to(gl.float32)[None, :]


@gluon.jit
def _finish_head(x1, x2, head, rows, cos, sin, w1, w2, rope, HAS_NORM: gl.constexpr):
    """Multiplies a head, given in halves [PART_ROWS, HALF], by the norm's weight, applies RoPE, and
    stores it in the result and in the KV cache."""
    dtype: gl.constexpr = x1.dtype
    NUM_HEADS: gl.constexpr = rope.Q_HEADS + 2 * rope.K_HEADS
    if head < rope.Q_HEADS + rope.K_HEADS:
        y1, y2 = x1.to(gl.float32), x2.to(gl.float32)
        if HAS_NORM:
            y1, y2 = y1 * w1, y2 * w2
        x1 = (y1 * cos - y2 * sin).to(dtype)
        x2 = (y2 * cos + y1 * sin).to(dtype)
    place = (rows.index.to(gl.int64) * NUM_HEADS + head) * (2 * HALF)
    address = rope.out_ptr + place[:, None] + _columns()[None, :]
    is_row = ((rows.index < rope.num_rows) & (head < NUM_HEADS))[:, None]
    gl.store(address, x1, mask=is_row)
    gl.store(address + HALF, x2, mask=is_row)
    if (head >= rope.Q_HEADS) & (head < NUM_HEADS):
        cache_ptr, cache_head = rope.k_cache_ptr, head - rope.Q_HEADS
        if cache_head >= rope.K_HEADS:
            cache_ptr, cache_head = rope.v_cache_ptr, cache_head - rope.K_HEADS
        place = (rows.slot.to(gl.int64) * rope.K_HEADS + cache_head) * (2 * HALF)
        address = cache_ptr + place[:, None] + _columns()[None, :]
        is_stored = (rows.slot >= 0)[:, None]
        gl.store(address, x1, mask=is_stored)
        gl.store(address + HALF, x2, mask=is_stored)


@gluon.jit
def _finish_rows(heads, consumer, first_row, head, rope, q_weight_ptr, k_weight_ptr):
    """Finishes two heads of a consumer's rows. What belongs to the next rows is loaded before the
    current ones are finished."""
    layout: gl.constexpr = _layout()
    parts = (
        _load_rows(first_row, rope),
        _load_rows(first_row + PART_ROWS, rope),
        _load_rows(first_row + 2 * PART_ROWS, rope),
        _load_rows(first_row + 3 * PART_ROWS, rope),
    )
    HAS_NORM: gl.constexpr = q_weight_ptr is not None
    w1, w2, next_w1, next_w2 = 1.0, 1.0, 1.0, 1.0
    if HAS_NORM:
        w1, w2 = _load_weight(head, rope, q_weight_ptr, k_weight_ptr)
        next_w1, next_w2 = _load_weight(head + 1, rope, q_weight_ptr, k_weight_ptr)
    next_cos, next_sin = _load_angles(parts[0], rope)
    barrier_sync(WRITTEN_BARRIER + consumer, HANDOVER_THREADS)
    for i in gl.static_range(4):
        cos, sin = next_cos, next_sin
        if i < 3:
            next_cos, next_sin = _load_angles(parts[i + 1], rope)
        x1 = heads.index(4 * consumer).slice(i * PART_ROWS, PART_ROWS).load(layout)
        x2 = heads.index(4 * consumer + 1).slice(i * PART_ROWS, PART_ROWS).load(layout)
        y1 = heads.index(4 * consumer + 2).slice(i * PART_ROWS, PART_ROWS).load(layout)
        y2 = heads.index(4 * consumer + 3).slice(i * PART_ROWS, PART_ROWS).load(layout)
        _finish_head(x1, x2, head, parts[i], cos, sin, w1, w2, rope, HAS_NORM)
        _finish_head(y1, y2, head + 1, parts[i], cos, sin, next_w1, next_w2, rope, HAS_NORM)


@gluon.jit
def _finish(heads, tiles, rope, q_weight_ptr, k_weight_ptr):
    """Finishes all tiles of the program, while the consumers multiply the next ones."""
    for index in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        m, n = tiles.place(index)
        for consumer in range(2):
            first_row = m * (2 * GL_ROWS) + consumer * GL_ROWS
            _finish_rows(heads, consumer, first_row, 2 * n, rope, q_weight_ptr, k_weight_ptr)
            if index + gl.num_programs(0) < tiles.count():
                barrier_arrive(READ_BARRIER + consumer, HANDOVER_THREADS)


@gluon.jit(do_not_specialize=["num_rows", "num_m", "num_n", "num_steps"])
def qkv_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    positions_ptr,
    slot_mapping_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_weight_ptr,
    k_weight_ptr,
    num_rows,
    num_m,
    num_n,
    num_steps,
    eps,
    Q_HEADS: gl.constexpr,
    K_HEADS: gl.constexpr,
):
    """Computes num_m x num_n tiles of the result. ``num_steps`` is the number of tiles of x's
    columns. Without norms, both of their weights are None."""
    inputs = make_inputs(x_desc, weight_desc, STAGES)
    tiles = Tiles(num_m, num_n, num_steps, 2 * GL_BLOCK_N)
    heads = gl.allocate_shared_memory(x_desc.dtype, [8, GL_ROWS, HALF], x_desc.layout)
    rope = Rope(
        out_ptr,
        positions_ptr,
        slot_mapping_ptr,
        cos_sin_ptr,
        k_cache_ptr,
        v_cache_ptr,
        num_rows,
        eps,
        Q_HEADS,
        K_HEADS,
    )
    gl.warp_specialize(
        [
            (_multiply, (0, heads, inputs, tiles, rope, q_weight_ptr is not None)),
            (_multiply, (1, heads, inputs, tiles, rope, q_weight_ptr is not None)),
            (_finish, (heads, tiles, rope, q_weight_ptr, k_weight_ptr)),
            (produce, (x_desc, weight_desc, inputs, tiles, GL_BLOCK_N)),
        ],
        [4, 2, 1],
        [168, 168, 168],  # registers per thread
    )
