"""The kernel of hopper_grouped.py: grouped GEMMs for Hopper, in Gluon. A consumer activates or
scales its results, and stores them, while the other one multiplies: see gemm/hopper_loop.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from nanovllm.kernels.gemm.hopper_loop import (
    GL_BLOCK_N,
    GL_ROWS,
    make_inputs,
    multiply_tile,
    produce,
    skip_tile,
)
from nanovllm.kernels.hopper import rounded_swiglu

STAGES = gl.constexpr(4)


@aggregate
class GroupedTiles:
    """The tiles of all experts: ``num_tiles`` from ``moe.sort.Groups``, with ``num_n`` columns of
    tiles each. An expert's weight has ``weight_rows`` rows. For the rest see ``Tiles``."""

    tiles_ptr: gl.tensor
    num_tiles: gl.tensor
    num_n: gl.tensor
    num_steps: gl.tensor
    weight_rows: gl.tensor
    STRIDE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles_ptr, num_tiles, num_n, num_steps, weight_rows, STRIDE):
        self.tiles_ptr = tiles_ptr
        self.num_tiles = num_tiles
        self.num_n = num_n
        self.num_steps = num_steps
        self.weight_rows = weight_rows
        self.STRIDE = gl.constexpr(STRIDE)

    @gluon.jit
    def count(self):
        return self.num_tiles * self.num_n

    @gluon.jit
    def rows(self, index):
        """Returns the first row of a tile, and the end of its expert's rows."""
        tile = self.tiles_ptr + index // self.num_n * 3
        return gl.load(tile + 1), gl.load(tile + 2)

    @gluon.jit
    def origin(self, index):
        """Returns the first row of x, and of the weight, for a tile."""
        tile = self.tiles_ptr + index // self.num_n * 3
        expert, column = gl.load(tile), index % self.num_n
        return gl.load(tile + 1), expert * self.weight_rows + column * self.STRIDE

    @gluon.jit
    def steps(self, index):
        """Returns the first step of a tile, and the end of its steps."""
        return 0, self.num_steps


@gluon.jit
def _store(tile, out, out_ptr, order_ptr, first_row, end, first_column, out_features):
    """Stores a tile [ROWS, BLOCK_N] of the result through shared memory, so that rows are written
    in wide pieces. Row r goes to row order[r], or r if ``order_ptr`` is None."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = first_row + gl.arange(0, GL_ROWS, gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, GL_BLOCK_N, gl.SliceLayout(0, layout))
    exists = row < end
    if order_ptr is not None:
        row = gl.load(order_ptr + row, mask=exists, other=0)
    tile.store(out)
    offset = row.to(gl.int64)[:, None] * out_features + column[None, :]
    mask = exists[:, None] & (column < out_features)[None, :]
    gl.store(out_ptr + offset, tile.load(layout), mask=mask)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr,
    out_ptr,
    order_ptr,
    weights_ptr,
    out_features,
    out_tiles,
    inputs,
    tiles,
):  # fmt: skip
    """Computes the rows of one consumer in all tiles of the program."""
    dtype: gl.constexpr = out_tiles.dtype
    out_tile = out_tiles.index(CONSUMER)
    step = gl.to_tensor(0)
    for index in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        start, end = tiles.rows(index)
        start += CONSUMER * GL_ROWS
        column = index % tiles.num_n * tiles.STRIDE
        if (CONSUMER == 0) | (start < end):
            if weights_ptr is not None:
                layout: gl.constexpr = gl.NVMMADistributedLayout(
                    [3, 0], [4, 1], [16, GL_BLOCK_N, 16]
                )
                row = start + gl.arange(0, GL_ROWS, gl.SliceLayout(1, layout))
                assignment = gl.load(order_ptr + row, mask=row < end, other=0)
                weight = gl.load(weights_ptr + assignment, mask=row < end, other=0.0)[:, None]
            upper, lower, step = multiply_tile(step, inputs, tiles.num_steps, CONSUMER)
            if weights_ptr is None:
                out = rounded_swiglu(upper, lower, dtype)
                _store(out_tile, out, out_ptr, None, start, end, column, out_features)
            else:
                upper = gl.convert_layout(upper, layout, assert_trivial=True) * weight
                lower = gl.convert_layout(lower, layout, assert_trivial=True) * weight
                upper, lower = upper.to(dtype), lower.to(dtype)
                _store(out_tile, upper, out_ptr, order_ptr, start, end, column, out_features)
                column += GL_BLOCK_N
                _store(out_tile, lower, out_ptr, order_ptr, start, end, column, out_features)
        else:
            step = skip_tile(step, inputs, tiles.num_steps)


@gluon.jit(do_not_specialize=["num_n", "num_steps"])
def hopper_grouped_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    weights_ptr,
    out_features,
    num_n,
    num_steps,
):
    """Computes the first grouped GEMM if ``weights_ptr`` is None, otherwise the second, with these
    routing weights: see ``grouped.py``. The rows of x are sorted in both. ``num_steps`` is the
    number of tiles of x's columns."""
    inputs = make_inputs(x_desc, weight_desc, STAGES)
    out_tiles = gl.allocate_shared_memory(x_desc.dtype, [2, GL_ROWS, GL_BLOCK_N], x_desc.layout)
    GATED: gl.constexpr = weights_ptr is None
    PARTS: gl.constexpr = 2 if GATED else 1
    second = out_features if GATED else GL_BLOCK_N
    tiles = GroupedTiles(
        tiles_ptr,
        gl.load(num_tiles_ptr),
        num_n,
        num_steps,
        PARTS * out_features,
        GL_BLOCK_N if GATED else 2 * GL_BLOCK_N,
    )
    gl.warp_specialize(
        [
            (
                _consume,
                (0, out_ptr, order_ptr, weights_ptr, out_features, out_tiles, inputs, tiles),
            ),
            (
                _consume,
                (1, out_ptr, order_ptr, weights_ptr, out_features, out_tiles, inputs, tiles),
            ),
            (produce, (x_desc, weight_desc, inputs, tiles, second)),
        ],
        [4, 1],
        [240, 24],  # registers per thread; the first consumer has 240, too
    )
