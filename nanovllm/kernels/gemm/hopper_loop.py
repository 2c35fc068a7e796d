"""The main loop of the GEMMs for Hopper with fused epilogues, in Gluon.

Programs are persistent and warp-specialised. One warp, the producer, loads tiles of x and of the
weight by TMA into shared memory. Two warpgroups, the consumers, multiply 64 rows of x each. The
second one stays LAG steps behind, so that each has the tensor cores to itself while the other one
computes its epilogue and stores its result.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from nanovllm.kernels.gemm.hopper_gemm import BLOCK_K, BLOCK_N, ROWS
from nanovllm.kernels.hopper import FIRST_BARRIER, barrier_arrive, barrier_sync, tma_load

GL_ROWS, GL_BLOCK_N, GL_BLOCK_K = map(gl.constexpr, (ROWS, BLOCK_N, BLOCK_K))
# Steps that the second consumer is behind, and rows of tiles per group.
LAG, GROUP = map(gl.constexpr, (2, 16))
LAG_BARRIER, EMPTY_BARRIER = map(gl.constexpr, (FIRST_BARRIER, FIRST_BARRIER + 1))
NEXT_BARRIER = FIRST_BARRIER + 5  # the first one that an epilogue may use
CONSUMER_THREADS = gl.constexpr(2 * 128)
ALL_THREADS = gl.constexpr(32 + 2 * 128)  # of the producer and the consumers


@aggregate
class Inputs:
    """The inputs of STAGES steps, at most 4, in shared memory: tiles of x [2 ROWS, BLOCK_K], and of
    the weight [2 BLOCK_N, BLOCK_K], as two boxes of BLOCK_N rows. ``full`` completes a phase when
    the loads into a stage have arrived. A phase of a named barrier completes when both consumers
    have read the stage."""

    x: gl.shared_memory_descriptor
    weight: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, x, weight, full, STAGES):
        self.x = x
        self.weight = weight
        self.full = full
        self.STAGES = gl.constexpr(STAGES)


@aggregate
class Tiles:
    """The tiles of the result, in ``num_m`` rows and ``num_n`` columns of them, and the number of
    steps for one: tiles of x's columns. The weight's rows for a column of tiles begin STRIDE rows
    after those for the column before."""

    num_m: gl.tensor
    num_n: gl.tensor
    num_steps: gl.tensor
    STRIDE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, num_m, num_n, num_steps, STRIDE):
        self.num_m = num_m
        self.num_n = num_n
        self.num_steps = num_steps
        self.STRIDE = gl.constexpr(STRIDE)

    @gluon.jit
    def count(self):
        return self.num_m * self.num_n

    @gluon.jit
    def place(self, index):
        """Returns the row and column of a tile. GROUP rows of tiles are computed column by column,
        so that what programs read at a time stays in the L2 cache."""
        first = index // (GROUP * self.num_n) * GROUP
        size = gl.minimum(self.num_m - first, GROUP)
        index -= first * self.num_n
        return first + index % size, index // size

    @gluon.jit
    def origin(self, index):
        """Returns the first row of x, and of the weight, for a tile."""
        m, n = self.place(index)
        return m * (2 * GL_ROWS), n * self.STRIDE


@gluon.jit
def make_inputs(x_desc, weight_desc, STAGES: gl.constexpr):
    dtype: gl.constexpr = x_desc.dtype
    inputs = Inputs(
        gl.allocate_shared_memory(dtype, [STAGES, 2 * GL_ROWS, GL_BLOCK_K], x_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 2 * GL_BLOCK_N, GL_BLOCK_K], weight_desc.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        STAGES,
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(inputs.full.index(i), count=1)
    fence_async_shared()
    return inputs


@gluon.jit
def produce(x_desc, weight_desc, inputs, tiles, second):
    """Loads the inputs of all tiles of the program. A tile's second box of the weight begins
    ``second`` rows after the first one."""
    step, last = 0, tiles.count() - 1
    next_row, next_feature = tiles.origin(gl.minimum(gl.program_id(0), last))
    for index in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        row, feature = next_row, next_feature
        # Known before this tile's loads wait for the consumers.
        next_row, next_feature = tiles.origin(gl.minimum(index + gl.num_programs(0), last))
        for k in range(tiles.num_steps):
            stage, column = step % inputs.STAGES, k * GL_BLOCK_K
            if step >= inputs.STAGES:
                barrier_sync(EMPTY_BARRIER + stage, ALL_THREADS)
            full, weight = inputs.full.index(stage), inputs.weight.index(stage)
            mbarrier.expect(full, (2 * GL_ROWS + 2 * GL_BLOCK_N) * GL_BLOCK_K * 2)
            tma_load(x_desc, [row, column], full, inputs.x.index(stage))
            upper, lower = weight.slice(0, GL_BLOCK_N), weight.slice(GL_BLOCK_N, GL_BLOCK_N)
            tma_load(weight_desc, [feature, column], full, upper)
            tma_load(weight_desc, [feature + second, column], full, lower)
            step += 1


@gluon.jit
def _start(acc, step, inputs, CONSUMER: gl.constexpr):
    """Issues the matmul of a step, and waits for the one before."""
    stage = step % inputs.STAGES
    mbarrier.wait(inputs.full.index(stage), step // inputs.STAGES & 1)
    x = inputs.x.index(stage).slice(CONSUMER * GL_ROWS, GL_ROWS)
    weight = inputs.weight.index(stage).permute([1, 0])
    acc = warpgroup_mma(x, weight, acc, is_async=True)
    return warpgroup_mma_wait(1, deps=[acc])


@gluon.jit
def _release(step, inputs):
    """Says that this consumer has read the inputs of a step."""
    barrier_arrive(EMPTY_BARRIER + step % inputs.STAGES, ALL_THREADS)


@gluon.jit
def _multiply(num_steps, acc, step, inputs, CONSUMER: gl.constexpr):
    for _ in range(num_steps):
        acc = _start(acc, step, inputs, CONSUMER)
        _release(step - 1, inputs)
        step += 1
    return acc, step


@gluon.jit
def multiply_tile(step, inputs, num_steps, CONSUMER: gl.constexpr):
    """Multiplies this consumer's rows of the next tile.

    Args:
        step: the number of steps before, in all tiles.

    Returns:
        The result for each box of the weight, fp32 [ROWS, BLOCK_N], and the next step.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * GL_BLOCK_N, 16])
    if CONSUMER == 1:
        barrier_sync(LAG_BARRIER, CONSUMER_THREADS)
    acc = gl.zeros([GL_ROWS, 2 * GL_BLOCK_N], gl.float32, layout)
    acc = _start(acc, step, inputs, CONSUMER)
    lag = gl.minimum(num_steps, LAG)
    acc, step = _multiply(lag - 1, acc, step + 1, inputs, CONSUMER)
    if CONSUMER == 0:
        barrier_arrive(LAG_BARRIER, CONSUMER_THREADS)
    acc, step = _multiply(num_steps - lag, acc, step, inputs, CONSUMER)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _release(step - 1, inputs)
    upper, lower = gl.split(acc.reshape([GL_ROWS, 2, GL_BLOCK_N]).permute([0, 2, 1]))
    return upper, lower, step


@gluon.jit
def skip_tile(step, inputs, num_steps):
    """Does what ``multiply_tile`` does for the second consumer, but without a result: none of its
    rows exist. Returns the next step."""
    barrier_sync(LAG_BARRIER, CONSUMER_THREADS)
    for _ in range(num_steps):
        mbarrier.wait(inputs.full.index(step % inputs.STAGES), step // inputs.STAGES & 1)
        _release(step, inputs)
        step += 1
    return step
