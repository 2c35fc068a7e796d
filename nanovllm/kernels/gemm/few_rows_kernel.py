"""The kernel of few_rows.py, in Gluon: a program multiplies up to ROWS rows by BLOCK_N rows of the
weight.

All columns of x lie in shared memory before the first matmul. Programs read them in different
orders: if all of them read the same cache line of x at a time, they wait for each other. The weight
does not depend on other kernels, so its first STAGES tiles are loaded before their results are
waited for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nanovllm.kernels.gemm.few_rows import BLOCK_K, BLOCK_N, ROWS
from nanovllm.kernels.hopper import grid_wait, tma_load

GL_ROWS, GL_BLOCK_N, GL_BLOCK_K = map(gl.constexpr, (ROWS, BLOCK_N, BLOCK_K))


@gluon.jit
def _load_weight(weight_desc, first, column, tiles, full, step, STAGES: gl.constexpr):
    """Loads a tile of the weight. With SwiGLU the box has four dimensions, see ``launch``."""
    stage = step % STAGES
    mbarrier.expect(full.index(stage), GL_BLOCK_N * GL_BLOCK_K * 2)
    column = column + step * GL_BLOCK_K
    tile = tiles.index(stage)
    if len(weight_desc.shape) == 4:
        boxes = tile.reshape([GL_BLOCK_N // 16, 2, 8, GL_BLOCK_K])
        tma_load(weight_desc, [first // 16, 0, 0, column], full.index(stage), boxes)
    else:
        tma_load(weight_desc, [first, column], full.index(stage), tile)


@gluon.jit
def _swiglu(sums):
    """Computes SwiGLU of a tile [BLOCK_N, ROWS]: [BLOCK_N / 2, ROWS]. Of 16 features 8 are of gate
    and 8 of up, so a thread has both. The operations are those of ``_silu_and_mul_kernel``."""
    pairs = sums.reshape([GL_BLOCK_N // 16, 2, 8, GL_ROWS]).permute([0, 2, 3, 1])
    gate, up = gl.split(pairs)
    gate = gate.to(gl.float32)
    out = (gate / (1 + gl.exp(-gate))).to(up.dtype) * up
    return out.reshape([GL_BLOCK_N // 2, GL_ROWS])


@gluon.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x_desc,
    weight_desc,
    residual_ptr,
    out_ptr,
    num_rows,
    out_features,
    columns,
    NUM_STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    SWIGLU: gl.constexpr,
    PDL: gl.constexpr,
):
    """Computes part p of the split-K with program (n, p): columns [p * columns, (p + 1) * columns).
    Its sums go to out [parts, num_rows, out_features]. A residual is added after rounding. With
    SWIGLU there are neither parts nor a residual, and out_features is half of the weight's rows.

    NUM_STEPS is the number of tiles of columns in a part. Columns past the end are zero, and change
    no sum. STAGES is the number of these tiles of the weight that are in shared memory at a time.
    """
    dtype: gl.constexpr = x_desc.dtype
    first, part = gl.program_id(0) * GL_BLOCK_N, gl.program_id(1)
    column = part * columns
    x = gl.allocate_shared_memory(dtype, [NUM_STEPS, GL_ROWS, GL_BLOCK_K], x_desc.layout)
    weight = gl.allocate_shared_memory(dtype, [STAGES, GL_BLOCK_N, GL_BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        _load_weight(weight_desc, first, column, weight, full, i, STAGES)
    if PDL:
        grid_wait()
    x_full = full.index(STAGES)
    mbarrier.expect(x_full, NUM_STEPS * GL_ROWS * GL_BLOCK_K * 2)
    for k in range(NUM_STEPS):
        tile = (k + gl.program_id(0)) % NUM_STEPS
        tma_load(x_desc, [0, column + tile * GL_BLOCK_K], x_full, x.index(tile))
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GL_ROWS, 16])
    row = gl.arange(0, GL_ROWS, gl.SliceLayout(0, layout))[None, :]
    feature = first + gl.arange(0, GL_BLOCK_N, gl.SliceLayout(1, layout))[:, None]
    offset = (part * num_rows + row) * out_features + feature
    mask = (row < num_rows) & (feature < out_features)
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + offset, mask=mask, other=0.0).to(gl.float32)
    acc = gl.zeros([GL_BLOCK_N, GL_ROWS], gl.float32, layout)
    mbarrier.wait(x_full, 0)
    if NUM_STEPS == STAGES:
        for i in gl.static_range(STAGES):
            mbarrier.wait(full.index(i), 0)
            acc = warpgroup_mma(weight.index(i), x.index(i).permute([1, 0]), acc, is_async=True)
    else:
        for step in range(NUM_STEPS):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            operands = weight.index(stage), x.index(step).permute([1, 0])
            acc = warpgroup_mma(*operands, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            next_step = step - 1 + STAGES  # into the stage that the matmul before has read
            if (step > 0) & (next_step < NUM_STEPS):
                _load_weight(weight_desc, first, column, weight, full, next_step, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    out = acc.to(out_ptr.dtype.element_ty)
    if HAS_RESIDUAL:
        out = (out.to(gl.float32) + residual).to(out.dtype)
    if SWIGLU:
        out_layout: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
        out = gl.convert_layout(_swiglu(out), out_layout)
        row = gl.arange(0, GL_ROWS, gl.SliceLayout(0, out_layout))[None, :]
        feature = gl.arange(0, GL_BLOCK_N // 2, gl.SliceLayout(1, out_layout))[:, None]
        feature += first // 2
        offset = row * out_features + feature
        mask = (row < num_rows) & (feature < out_features)
    gl.store(out_ptr + offset, out, mask=mask)
