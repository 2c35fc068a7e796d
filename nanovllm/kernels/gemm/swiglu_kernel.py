"""The kernel of swiglu.py, a GEMM for Hopper with SwiGLU in its epilogue, in Gluon.

Programs are persistent and warp-specialised. One warp, the producer, loads tiles of x and of the
weight by TMA into shared memory. Two warpgroups, the consumers, multiply 64 rows of x each. The
second one stays LAG steps behind, so that each has the tensor cores to itself while the other one
computes SwiGLU and stores its result.
"""

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

from nanovllm.kernels.attention.tiles import LOG2_E
from nanovllm.kernels.gemm.swiglu import BLOCK_K, BLOCK_N, ROWS
from nanovllm.kernels.hopper import (
    FIRST_BARRIER,
    barrier_arrive,
    barrier_sync,
    tma_load,
    tma_store,
)

GL_ROWS, GL_BLOCK_N, GL_BLOCK_K, GL_LOG2_E = map(gl.constexpr, (ROWS, BLOCK_N, BLOCK_K, LOG2_E))
# Steps in shared memory, steps that the second consumer is behind, and rows of tiles per group.
STAGES, LAG, GROUP = map(gl.constexpr, (4, 2, 16))
LAG_BARRIER, EMPTY_BARRIER = map(gl.constexpr, (FIRST_BARRIER, FIRST_BARRIER + 1))
CONSUMER_THREADS = gl.constexpr(2 * 128)
ALL_THREADS = gl.constexpr(32 + 2 * 128)  # of the producer and the consumers


@aggregate
class Inputs:
    """The inputs of STAGES steps in shared memory: tiles of x [2 ROWS, BLOCK_K], and of the weight
    [2 BLOCK_N, BLOCK_K] with rows of G above those of U. ``full`` completes a phase when the loads
    into a stage have arrived. That both consumers have read it is a phase of a named barrier."""

    x: gl.shared_memory_descriptor
    weight: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, x, weight, full):
        self.x = x
        self.weight = weight
        self.full = full


@gluon.jit
def _tile(index, num_m, num_n):
    """Returns the row and column of a tile. GROUP rows of tiles are computed column by column, so
    that what programs read at a time stays in the L2 cache."""
    first = index // (GROUP * num_n) * GROUP
    size = gl.minimum(num_m - first, GROUP)
    index -= first * num_n
    return first + index % size, index // size


@gluon.jit
def _produce(x_desc, weight_desc, inputs, num_m, num_n, num_steps, inner):
    """Loads the inputs of all tiles of the program."""
    step = 0
    for index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = _tile(index, num_m, num_n)
        row, feature = m * (2 * GL_ROWS), n * GL_BLOCK_N
        for k in range(num_steps):
            stage, column = step % STAGES, k * GL_BLOCK_K
            if step >= STAGES:
                barrier_sync(EMPTY_BARRIER + stage, ALL_THREADS)
            full, weight = inputs.full.index(stage), inputs.weight.index(stage)
            mbarrier.expect(full, (2 * GL_ROWS + 2 * GL_BLOCK_N) * GL_BLOCK_K * 2)
            tma_load(x_desc, [row, column], full, inputs.x.index(stage))
            gate, up = weight.slice(0, GL_BLOCK_N), weight.slice(GL_BLOCK_N, GL_BLOCK_N)
            tma_load(weight_desc, [feature, column], full, gate)
            tma_load(weight_desc, [inner + feature, column], full, up)
            step += 1


@gluon.jit
def _start(acc, step, inputs, CONSUMER: gl.constexpr):
    """Issues the matmul of a step, and waits for the one before."""
    stage = step % STAGES
    mbarrier.wait(inputs.full.index(stage), step // STAGES & 1)
    x = inputs.x.index(stage).slice(CONSUMER * GL_ROWS, GL_ROWS)
    weight = inputs.weight.index(stage).permute([1, 0])
    acc = warpgroup_mma(x, weight, acc, is_async=True)
    return warpgroup_mma_wait(1, deps=[acc])


@gluon.jit
def _release(step):
    """Says that this consumer has read the inputs of a step."""
    barrier_arrive(EMPTY_BARRIER + step % STAGES, ALL_THREADS)


@gluon.jit
def _multiply(num_steps, acc, step, inputs, CONSUMER: gl.constexpr):
    for _ in range(num_steps):
        acc = _start(acc, step, inputs, CONSUMER)
        _release(step - 1)
        step += 1
    return acc, step


@gluon.jit
def _silu(x):
    reciprocal = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",  # a division costs more than all the rest
        "=f,f",
        [1.0 + gl.exp2(x * -GL_LOG2_E)],
        gl.float32,
        is_pure=True,
        pack=1,
    )
    return x * reciprocal


@gluon.jit
def _consume(CONSUMER: gl.constexpr, out_desc, out_tiles, inputs, num_m, num_n, num_steps):
    """Computes the rows of one consumer in all tiles of the program."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * GL_BLOCK_N, 16])
    out_tile = out_tiles.index(CONSUMER)
    step = gl.to_tensor(0)
    for index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = _tile(index, num_m, num_n)
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
        _release(step - 1)
        gate, up = gl.split(acc.reshape([GL_ROWS, 2, GL_BLOCK_N]).permute([0, 2, 1]))
        out = (_silu(gate) * up).to(out_desc.dtype)
        tma.store_wait(0)
        out_tile.store(out)
        fence_async_shared()
        row = m * (2 * GL_ROWS) + CONSUMER * GL_ROWS
        tma_store(out_desc, [row, n * GL_BLOCK_N], out_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_m", "num_n", "num_steps", "inner"])
def swiglu_kernel(x_desc, weight_desc, out_desc, num_m, num_n, num_steps, inner):
    """Computes num_m x num_n tiles of the result. ``num_steps`` is the number of tiles of columns,
    and ``inner`` the number of columns of the result."""
    dtype: gl.constexpr = x_desc.dtype
    inputs = Inputs(
        gl.allocate_shared_memory(dtype, [STAGES, 2 * GL_ROWS, GL_BLOCK_K], x_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 2 * GL_BLOCK_N, GL_BLOCK_K], weight_desc.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    out_tiles = gl.allocate_shared_memory(dtype, [2, GL_ROWS, GL_BLOCK_N], out_desc.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(inputs.full.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, out_desc, out_tiles, inputs, num_m, num_n, num_steps)),
            (_consume, (1, out_desc, out_tiles, inputs, num_m, num_n, num_steps)),
            (_produce, (x_desc, weight_desc, inputs, num_m, num_n, num_steps, inner)),
        ],
        [4, 1],
        [240, 24],  # registers per thread; the first consumer has 240, too
    )
