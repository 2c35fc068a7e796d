"""The kernel of decode_gemm.py, in Gluon: a program multiplies ROWS rows by FEATURES rows of the
weight.

Features are the M dimension of the matmul, which has to be 64 in Hopper's instructions, and rows of
x the N dimension, which may be 8. Tiles of the weight and of x are loaded by TMA. The weight does
not depend on other kernels, so its first STAGES tiles are loaded before their results are waited
for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nanovllm.kernels.hopper import grid_wait, rounded_swiglu, tma_load


@gluon.jit
def _load_weight(desc, first, column, full, tile):
    """Loads a tile of the weight. With SwiGLU the box has four dimensions, see ``launch``."""
    if len(desc.shape) == 4:
        tma_load(desc, [first // 16, 0, 0, column], full, tile.reshape(desc.block_shape))
    else:
        tma_load(desc, [first, column], full, tile)


@gluon.jit
def _load_rows(desc, first, column, full, tile, ROWS: gl.constexpr):
    """Loads ROWS rows of x into a tile, whose number of rows is a power of two. If ROWS is none,
    several boxes are loaded: one that lies past the end in part would take longer."""
    BOX: gl.constexpr = desc.block_shape[0]
    if BOX == ROWS:
        tma_load(desc, [first, column], full, tile)
    else:
        for row in gl.static_range(0, ROWS, BOX):
            tma_load(desc, [first + row, column], full, tile.slice(row, BOX))


@gluon.jit
def _swiglu(sums):
    """Computes SwiGLU of a tile [FEATURES, ROWS]: [FEATURES / 2, ROWS]. Each 16
    features are 8 of gate and 8 of up, so a thread has both."""
    FEATURES: gl.constexpr = sums.shape[0]
    ROWS: gl.constexpr = sums.shape[1]
    pairs = sums.reshape([FEATURES // 16, 2, 8, ROWS]).permute([0, 2, 3, 1])
    gate, up = gl.split(pairs)
    out = rounded_swiglu(gate, up, up.dtype)
    return out.reshape([FEATURES // 2, ROWS])


@gluon.constexpr_function
def _wide_layout(features, per_thread, num_warps):
    """Returns a layout of [features, rows] in which neighbouring threads have neighbouring features
    of a row, ``per_thread`` each."""
    threads = min(features // per_thread, 32)
    return gl.BlockedLayout([per_thread, 1], [threads, 32 // threads], [1, num_warps], [0, 1])


@gluon.jit
def _load_scales(x_scale_ptr, weight_scale_ptr, step, num_groups, group_stride, row, num_rows):
    """Loads the scales of rows of x in the group of a step, times that of the weight's block. Past
    the last group it loads those of the last one."""
    group = gl.minimum(step, num_groups - 1)
    scales = gl.load(x_scale_ptr + group * group_stride + row, mask=row < num_rows, other=0.0)
    return scales * gl.load(weight_scale_ptr + group)


@gluon.jit
def _multiply(weight, x, full, step, acc, STAGES: gl.constexpr, use_acc: gl.constexpr):
    """Issues the matmul of a step, once its inputs have arrived."""
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    operands = weight.index(stage), x.index(stage).permute([1, 0])
    return warpgroup_mma(*operands, acc, use_acc=use_acc, is_async=True)


@gluon.jit(do_not_specialize=["num_rows", "num_steps", "group_stride"])
def decode_gemm_kernel(
    x_desc,
    weight_desc,
    x_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    out_features,
    part_columns,
    num_steps,
    group_stride,
    FEATURES: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    IS_WHOLE: gl.constexpr,
    ITEMSIZE: gl.constexpr,
    HAS_GROUPS: gl.constexpr,
    SWIGLU: gl.constexpr,
    PDL: gl.constexpr,
):
    """Computes part p of the split-K with program (m, n, p): columns [p * part_columns, (p + 1) *
    part_columns), in num_steps tiles of COLUMNS. Its sums go to out [parts, num_rows,
    out_features]. With SWIGLU, out_features is half of the weight's rows.

    Columns past the end are zero, and change no sum. The bias is added before rounding, and the
    residual after it. With IS_WHOLE, num_steps is STAGES.

    With scales, the result for row m and feature n is multiplied by the scales of row m of x and of
    row n of the weight. With HAS_GROUPS, each group of COLUMNS columns of a row of x has a scale,
    which lies group_stride elements after that of the group before, and so has each block of
    COLUMNS x COLUMNS elements of the weight.
    """
    dtype: gl.constexpr = x_desc.dtype
    TILE_BYTES: gl.constexpr = (FEATURES + ROWS) * COLUMNS * ITEMSIZE
    # A box of x that lies past the end in part takes much longer to load. So the last rows of a
    # tile before are in the last tile too, with the same results.
    first_row = gl.minimum(gl.program_id(0) * ROWS, gl.maximum(num_rows - ROWS, 0))
    first, part = gl.program_id(1) * FEATURES, gl.program_id(2)
    column = part * part_columns
    x = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_ROWS, COLUMNS], x_desc.layout)
    weight = gl.allocate_shared_memory(dtype, [STAGES, FEATURES, COLUMNS], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), TILE_BYTES)
        _load_weight(weight_desc, first, column + i * COLUMNS, full.index(i), weight.index(i))
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [FEATURES // 16, 1], [16, BLOCK_ROWS, 32 // ITEMSIZE]
    )
    feature = first + gl.arange(0, FEATURES, gl.SliceLayout(1, layout))
    if HAS_GROUPS:
        weight_scale_ptr += first // COLUMNS * (weight_desc.shape[1] // COLUMNS) + column // COLUMNS
    elif weight_scale_ptr is not None:
        weight_scale = gl.load(weight_scale_ptr + feature, mask=feature < out_features, other=0.0)
    if PDL:
        grid_wait()
    for i in gl.static_range(STAGES):
        # Programs read x in different orders: if all of them read the same cache line at a time,
        # they wait for each other.
        stage = (i + gl.program_id(1)) % STAGES
        next_column = column + stage * COLUMNS
        _load_rows(x_desc, first_row, next_column, full.index(stage), x.index(stage), ROWS)
    if x_scale_ptr is not None:
        row = first_row + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(0, layout))
        if HAS_GROUPS:
            num_groups = (weight_desc.shape[1] - column) // COLUMNS
            x_scale_ptr += column // COLUMNS * group_stride
        else:
            x_scale = gl.load(x_scale_ptr + row, mask=row < num_rows, other=0.0)
    acc = gl.zeros([FEATURES, BLOCK_ROWS], gl.float32, layout)
    if HAS_GROUPS:
        scales = x_scale_ptr, weight_scale_ptr
        where = num_groups, group_stride, row, num_rows
        even_scale, odd_scale = _load_scales(*scales, 0, *where), _load_scales(*scales, 1, *where)
        for step in range(0, num_steps, 2):
            even = _multiply(weight, x, full, step, acc, STAGES, False)
            odd = _multiply(weight, x, full, step + 1, acc, STAGES, False)
            next_even_scale = _load_scales(*scales, step + 2, *where)
            next_odd_scale = _load_scales(*scales, step + 3, *where)
            acc += warpgroup_mma_wait(1, deps=[even]) * even_scale[None, :]
            acc += warpgroup_mma_wait(0, deps=[odd]) * odd_scale[None, :]
            even_scale, odd_scale = next_even_scale, next_odd_scale
            for i in gl.static_range(2):
                next_step = step + i + STAGES
                if next_step < num_steps:
                    free, next_column = next_step % STAGES, column + next_step * COLUMNS
                    mbarrier.expect(full.index(free), TILE_BYTES)
                    _load_weight(
                        weight_desc, first, next_column, full.index(free), weight.index(free)
                    )
                    _load_rows(
                        x_desc, first_row, next_column, full.index(free), x.index(free), ROWS
                    )
    elif IS_WHOLE:
        for i in gl.static_range(STAGES):
            acc = _multiply(weight, x, full, i, acc, STAGES, True)
    else:
        for step in range(num_steps):
            acc = _multiply(weight, x, full, step, acc, STAGES, True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            next_step = step - 1 + STAGES  # into the stage that the matmul before has read
            if (step > 0) & (next_step < num_steps):
                free, next_column = next_step % STAGES, column + next_step * COLUMNS
                mbarrier.expect(full.index(free), TILE_BYTES)
                _load_weight(weight_desc, first, next_column, full.index(free), weight.index(free))
                _load_rows(x_desc, first_row, next_column, full.index(free), x.index(free), ROWS)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if x_scale_ptr is not None and not HAS_GROUPS:
        acc = acc * weight_scale[:, None] * x_scale[None, :]
    if bias_ptr is not None:
        if SWIGLU:  # 8 features of gate, the same 8 of up, and so on
            feature = feature // 16 * 8 + feature % 8 + feature // 8 % 2 * out_features
            mask = feature < 2 * out_features
        else:
            mask = feature < out_features
        acc += gl.load(bias_ptr + feature, mask=mask, other=0.0).to(gl.float32)[:, None]
    out = acc.to(out_ptr.dtype.element_ty)
    if SWIGLU:
        out = _swiglu(out)
        first = first // 2
    NUM_OUT: gl.constexpr = out.shape[0]
    per_thread: gl.constexpr = 4 if out.dtype == gl.float32 else 8
    out_layout: gl.constexpr = (
        _wide_layout(NUM_OUT, per_thread, FEATURES // 16) if BLOCK_ROWS > 8 or SWIGLU else layout
    )
    out = gl.convert_layout(out, out_layout)
    index = gl.arange(0, BLOCK_ROWS, gl.SliceLayout(0, out_layout))[None, :]
    row = first_row + index
    feature = first + gl.arange(0, NUM_OUT, gl.SliceLayout(1, out_layout))[:, None]
    offset = (part * num_rows + row) * out_features + feature
    mask = (index < ROWS) & (row < num_rows) & (feature < out_features)
    if residual_ptr is not None:
        residual = gl.load(residual_ptr + offset, mask=mask, other=0.0).to(gl.float32)
        out = (out.to(gl.float32) + residual).to(out.dtype)
    gl.store(out_ptr + offset, out, mask=mask)
