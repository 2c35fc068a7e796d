"""The main loop of the GEMMs for FP8 with scales of blocks on Hopper, in Gluon.

Programs are persistent and warp-specialised. One warp, the producer, loads tiles of x, of the
weight and of the scales of x by TMA. Two warpgroups, the consumers, multiply 64 rows each. Tensor
cores cannot apply the scales. So each consumer scales the partial sums of each group of columns,
and adds them to its total, while the matmuls of the next group and of the other consumer run.

Rows of x are the M dimension of the matmul. So a thread needs two scales of x per group, and the
weight's scale is the same for a whole tile, or for its rows of gate and of up.
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

from nanovllm.kernels.hopper import (
    FIRST_BARRIER,
    barrier_arrive,
    barrier_sync,
    grid_wait,
    tma_load,
)

CONSUMER_ROWS, GROUP = map(gl.constexpr, (64, 128))
EMPTY_BARRIER = gl.constexpr(FIRST_BARRIER)
ALL_THREADS = gl.constexpr(32 + 2 * 128)  # of the producer and the consumers


@aggregate
class Inputs:
    """The inputs of STAGES steps, at most 8, in shared memory: tiles of x [ROWS, GROUP], of the
    weight [FEATURES, GROUP], and the scales of x [1, ROWS]. ``full`` completes a phase when the
    loads into a stage have arrived. A phase of a named barrier completes when both consumers have
    read the stage.

    With 128 ROWS each consumer multiplies half of them, with 64 half of the FEATURES.
    """

    x: gl.shared_memory_descriptor
    weight: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    ROWS: gl.constexpr
    FEATURES: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, x, weight, scales, full, ROWS, FEATURES, STAGES):
        self.x = x
        self.weight = weight
        self.scales = scales
        self.full = full
        self.ROWS = gl.constexpr(ROWS)
        self.FEATURES = gl.constexpr(FEATURES)
        self.STAGES = gl.constexpr(STAGES)


@gluon.jit
def make_inputs(
    x_desc, weight_desc, scale_desc, FEATURES: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    ROWS: gl.constexpr = x_desc.block_shape[0]
    inputs = Inputs(
        gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, GROUP], x_desc.layout),
        gl.allocate_shared_memory(x_desc.dtype, [STAGES, FEATURES, GROUP], weight_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], scale_desc.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        ROWS,
        FEATURES,
        STAGES,
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(inputs.full.index(i), count=1)
    fence_async_shared()
    return inputs


@gluon.jit
def _load_weight(desc, feature, second, step, stage, inputs):
    full, weight = inputs.full.index(stage), inputs.weight.index(stage)
    mbarrier.expect(full, (inputs.ROWS + inputs.FEATURES) * GROUP + inputs.ROWS * 4)
    if desc.block_shape[0] == inputs.FEATURES:
        tma_load(desc, [feature, step * GROUP], full, weight)
    else:
        HALF: gl.constexpr = inputs.FEATURES // 2
        tma_load(desc, [feature, step * GROUP], full, weight.slice(0, HALF))
        tma_load(desc, [feature + second, step * GROUP], full, weight.slice(HALF, HALF))


@gluon.jit
def produce(x_desc, weight_desc, scale_desc, inputs, tiles, second, PDL: gl.constexpr):
    """Loads the inputs of all tiles of the program. A tile of the weight is one box, or two, of
    which the second begins ``second`` rows after the first one.

    With PDL, the tiles do not depend on other kernels. The weight never does, so its first tiles
    are loaded before the results of other kernels are waited for. Each tile has STAGES steps or
    more.
    """
    if gl.program_id(0) < tiles.count():
        _, feature = tiles.origin(gl.program_id(0))
        first, _ = tiles.steps(gl.program_id(0))
        for i in gl.static_range(inputs.STAGES):
            _load_weight(weight_desc, feature, second, first + i, i, inputs)
    if PDL:
        grid_wait()
    count = 0
    for index in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        row, feature = tiles.origin(index)
        first, end = tiles.steps(index)
        for step in range(first, end):
            stage = count % inputs.STAGES
            if count >= inputs.STAGES:
                barrier_sync(EMPTY_BARRIER + stage, ALL_THREADS)
                _load_weight(weight_desc, feature, second, step, stage, inputs)
            full = inputs.full.index(stage)
            tma_load(x_desc, [row, step * GROUP], full, inputs.x.index(stage))
            tma_load(scale_desc, [step, row], full, inputs.scales.index(stage))
            count += 1


@gluon.jit
def _scales(scales, step, num_groups, scale_ptr, up_scale_ptr, layout: gl.constexpr):
    """Returns the scales of the rows in shared memory times those of the weight's group: [rows, 1],
    or [rows, features] if gate and up have scales of their own."""
    group = gl.minimum(step, num_groups - 1)
    if up_scale_ptr is None:
        scale = scales.load(layout) * gl.load(scale_ptr + group)
    else:
        HALF: gl.constexpr = layout.instr_shape[1] // 2
        half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
        row = scales.load(half_layout) + gl.zeros([CONSUMER_ROWS, HALF], gl.float32, half_layout)
        both = gl.join(row * gl.load(scale_ptr + group), row * gl.load(up_scale_ptr + group))
        both = both.permute([0, 2, 1]).reshape([CONSUMER_ROWS, 2 * HALF])
        scale = gl.convert_layout(both, layout, assert_trivial=True)
    return scale


@gluon.jit
def _start(count, inputs, CONSUMER: gl.constexpr, layout: gl.constexpr):
    """Issues a step's matmul once its inputs have arrived. Returns its partial sums, and the scales
    of the rows in shared memory."""
    stage = count % inputs.STAGES
    mbarrier.wait(inputs.full.index(stage), count // inputs.STAGES & 1)
    x, weight, scales = (
        inputs.x.index(stage),
        inputs.weight.index(stage),
        inputs.scales.index(stage),
    )
    NUM_FEATURES: gl.constexpr = layout.instr_shape[1]
    if inputs.ROWS == CONSUMER_ROWS:
        weight = weight.slice(CONSUMER * NUM_FEATURES, NUM_FEATURES)
    else:
        x = x.slice(CONSUMER * CONSUMER_ROWS, CONSUMER_ROWS)
        scales = scales.slice(CONSUMER * CONSUMER_ROWS, CONSUMER_ROWS, 1)
    zeros = gl.zeros([CONSUMER_ROWS, NUM_FEATURES], gl.float32, layout)
    partial = warpgroup_mma(x, weight.permute([1, 0]), zeros, use_acc=False, is_async=True)
    return partial, scales.permute([1, 0])


@gluon.jit
def _add(pending: gl.constexpr, total, partial, scale, count, inputs):
    """Waits until at most ``pending`` matmuls are running, releases the inputs of this step, and
    adds its partial sums, scaled, to the total."""
    partial = warpgroup_mma_wait(pending, deps=[partial])
    barrier_arrive(EMPTY_BARRIER + count % inputs.STAGES, ALL_THREADS)
    return total + partial * scale


@gluon.jit
def multiply_tile(
    count,
    inputs,
    first,
    end,
    num_groups,
    scale_ptr,
    up_scale_ptr,
    CONSUMER: gl.constexpr,
    layout: gl.constexpr,
):
    """Multiplies this consumer's rows, or features, of the next tile.

    Args:
        count: the number of steps before, in all tiles.
        first, end: the steps of the tile, an even number. The last one may be past the last group,
            where all columns are zero.
        num_groups: the number of groups of columns.
        scale_ptr, up_scale_ptr: the scales of the weight's row of blocks; with the second one, of
            gate and of up, which are a half of the tile each.
        layout: of the result.

    Returns:
        The result, fp32 [CONSUMER_ROWS, features], and the next count.
    """
    NUM_FEATURES: gl.constexpr = layout.instr_shape[1]
    total = gl.zeros([CONSUMER_ROWS, NUM_FEATURES], gl.float32, layout)
    # Pairs, because a matmul may not run while the loop begins again.
    for step in range(first, end, 2):
        even, even_scales = _start(count, inputs, CONSUMER, layout)
        odd, odd_scales = _start(count + 1, inputs, CONSUMER, layout)
        even_scale = _scales(even_scales, step, num_groups, scale_ptr, up_scale_ptr, layout)
        odd_scale = _scales(odd_scales, step + 1, num_groups, scale_ptr, up_scale_ptr, layout)
        total = _add(1, total, even, even_scale, count, inputs)
        total = _add(0, total, odd, odd_scale, count + 1, inputs)
        count += 2
    return total, count


@gluon.jit
def skip_tile(count, inputs, first, end):
    """Does what ``multiply_tile`` does, but without a result: none of this consumer's rows exist.
    Returns the next count."""
    for _ in range(first, end):
        mbarrier.wait(inputs.full.index(count % inputs.STAGES), count // inputs.STAGES & 1)
        barrier_arrive(EMPTY_BARRIER + count % inputs.STAGES, ALL_THREADS)
        count += 1
    return count
