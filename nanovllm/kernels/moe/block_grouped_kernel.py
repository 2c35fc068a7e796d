"""Grouped GEMMs for Hopper and FP8 with scales of blocks, in Gluon, with the loop of
gemm/block_loop.py. A consumer activates or weights its results, and stores them, while the other
one multiplies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.kernels.gemm.block_loop import (
    CONSUMER_ROWS,
    GROUP,
    make_inputs,
    multiply_tile,
    produce,
    skip_tile,
)
from nanovllm.kernels.hopper import rounded_swiglu
from nanovllm.kernels.moe.hopper_grouped_kernel import GroupedTiles


@gluon.jit
def _store(out, out_ptr, order_ptr, first_row, end, column, out_features):
    """Stores rows of a result in wide pieces. Row r goes to row order[r], or r if ``order_ptr`` is
    None."""
    BLOCK: gl.constexpr = out.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, layout))
    exists = row < end
    if order_ptr is not None:
        row = gl.load(order_ptr + row, mask=exists, other=0)
    columns = column + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    offset = row.to(gl.int64)[:, None] * out_features + columns[None, :]
    gl.store(out_ptr + offset, gl.convert_layout(out, layout), mask=exists[:, None])


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, scale_ptr, weights_ptr, order_ptr, out_ptr, num_groups, inputs, tiles
):  # fmt: skip
    """Computes the rows of one consumer in all tiles of the program."""
    GATED: gl.constexpr = weights_ptr is None
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    FEATURES: gl.constexpr = inputs.FEATURES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FEATURES, 32])
    count = gl.to_tensor(0)
    for index in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        row, end_row = tiles.rows(index)
        row += CONSUMER * CONSUMER_ROWS
        _, feature = tiles.origin(index)
        first, end = tiles.steps(index)
        column = index % tiles.num_n * tiles.STRIDE
        if (CONSUMER == 0) | (row < end_row):
            gate_ptr = scale_ptr + feature // GROUP * num_groups
            if GATED:
                up = feature + tiles.weight_rows // 2
                up_ptr = scale_ptr + up // GROUP * num_groups
                sums, count = multiply_tile(
                    count, inputs, first, end, num_groups, gate_ptr, up_ptr, CONSUMER, layout
                )
                halves = sums.reshape([CONSUMER_ROWS, 2, FEATURES // 2]).permute([0, 2, 1])
                gate, up = gl.split(halves)
                out = rounded_swiglu(gate, up, dtype)
                _store(out, out_ptr, None, row, end_row, column, tiles.weight_rows // 2)
            else:
                rows = row + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, layout))
                assignment = gl.load(order_ptr + rows, mask=rows < end_row, other=0)
                weight = gl.load(weights_ptr + assignment, mask=rows < end_row, other=0.0)
                sums, count = multiply_tile(
                    count, inputs, first, end, num_groups, gate_ptr, None, CONSUMER, layout
                )
                out = (sums * weight[:, None]).to(dtype)
                _store(out, out_ptr, order_ptr, row, end_row, column, tiles.weight_rows)
        else:
            count = skip_tile(count, inputs, first, end)


@gluon.jit(do_not_specialize=["num_n", "num_groups", "num_steps"])
def block_grouped_kernel(
    x_desc,
    weight_desc,
    scale_desc,
    scale_ptr,
    weights_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    out_ptr,
    weight_rows,
    num_n,
    num_groups,
    num_steps,
    FEATURES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Computes the first grouped GEMM if ``weights_ptr`` is None, otherwise the second, with these
    routing weights: see ``grouped.py``. The rows of x are sorted in both. An expert's weight has
    ``weight_rows`` rows. A step multiplies one of ``num_groups`` groups of columns. The number of
    steps is even. If that of groups is odd, the last step is past the end, where the TMA returns
    zeros."""
    inputs = make_inputs(x_desc, weight_desc, scale_desc, FEATURES, STAGES)
    GATED: gl.constexpr = weights_ptr is None
    tiles = GroupedTiles(
        tiles_ptr,
        gl.load(num_tiles_ptr),
        num_n,
        num_steps,
        weight_rows,
        FEATURES // 2 if GATED else FEATURES,
    )
    gl.warp_specialize(
        [
            (
                _consume,
                (0, scale_ptr, weights_ptr, order_ptr, out_ptr, num_groups, inputs, tiles),
            ),
            (
                _consume,
                (1, scale_ptr, weights_ptr, order_ptr, out_ptr, num_groups, inputs, tiles),
            ),
            (
                produce,
                (x_desc, weight_desc, scale_desc, inputs, tiles, weight_rows // 2, False),
            ),
        ],
        [4, 1],
        [240, 24],  # registers per thread; the first consumer has 240, too
    )
