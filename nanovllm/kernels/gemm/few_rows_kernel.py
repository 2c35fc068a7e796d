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
def _load_weight(weight_desc, feature, column, tiles, full, step, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.expect(full.index(stage), GL_BLOCK_N * GL_BLOCK_K * 2)
    tma_load(
        weight_desc,
        [feature, column + step * GL_BLOCK_K],
        full.index(stage),
        tiles.index(stage),
    )


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
    PDL: gl.constexpr,
):
    """Computes part p of the split-K with program (n, p): columns [p * columns, (p + 1) * columns).
    Its sums go to out [parts, num_rows, out_features]. A residual is added after rounding.

    NUM_STEPS is the number of tiles of columns in a part. Columns past the end are zero, and change
    no sum. STAGES is the number of these tiles of the weight that are in shared memory at a time.
    """
    dtype: gl.constexpr = x_desc.dtype
    first, part = gl.program_id(0) * GL_BLOCK_N, gl.program_id(1)
    column = part * columns
    x = gl.allocate_shared_memory(dtype, [NUM_STEPS, GL_ROWS, GL_BLOCK_K], x_desc.layout)
    weight = gl.allocate_shared_memory(dtype, [STAGES, GL_BLOCK_N, GL_BLOCK_K], weight_desc.layout)
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
    feature = first + gl.arange(0, GL_BLOCK_N, gl.SliceLayout(1, layout))
    row = gl.arange(0, GL_ROWS, gl.SliceLayout(0, layout))
    offset = row[None, :] * out_features + feature[:, None]
    mask = (row < num_rows)[None, :] & (feature < out_features)[:, None]
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
    gl.store(out_ptr + part * num_rows * out_features + offset, out, mask=mask)
