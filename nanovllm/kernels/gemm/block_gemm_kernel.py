"""The kernel of block_gemm.py, in Gluon, with the loop of block_loop.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from nanovllm.kernels.gemm.block_loop import (
    CONSUMER_ROWS,
    GROUP,
    make_inputs,
    multiply_tile,
    produce,
)
from nanovllm.kernels.hopper import grid_wait


@aggregate
class Tiles:
    """The tiles of the result: ``num_m`` rows and ``num_n`` columns of them, for each part of the
    split-K. A part has ``part_steps`` steps, the last one may have fewer, and all of them together
    have ``num_steps``."""

    num_m: gl.tensor
    num_n: gl.tensor
    num_parts: gl.tensor
    part_steps: gl.tensor
    num_steps: gl.tensor
    ROWS: gl.constexpr
    FEATURES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, num_m, num_n, num_parts, part_steps, num_steps, ROWS, FEATURES):
        self.num_m = num_m
        self.num_n = num_n
        self.num_parts = num_parts
        self.part_steps = part_steps
        self.num_steps = num_steps
        self.ROWS = gl.constexpr(ROWS)
        self.FEATURES = gl.constexpr(FEATURES)

    @gluon.jit
    def count(self):
        return self.num_m * self.num_n * self.num_parts

    @gluon.jit
    def origin(self, index):
        """Returns the first row and feature of a tile. Tiles of the same weights are neighbours, so
        that these are read once."""
        return index % self.num_m * self.ROWS, index // self.num_m % self.num_n * self.FEATURES

    @gluon.jit
    def part(self, index):
        return index // self.num_m // self.num_n

    @gluon.jit
    def steps(self, index):
        """Returns the first step of a tile, and the end of its steps."""
        first = self.part(index) * self.part_steps
        return first, gl.minimum(first + self.part_steps, self.num_steps)


@gluon.jit
def _consume(
    CONSUMER: gl.constexpr, weight_scale_ptr, num_groups, output, inputs, tiles, PDL: gl.constexpr
):  # fmt: skip
    """Computes one consumer's rows or features of all tiles of the program."""
    HAS_HALF: gl.constexpr = inputs.ROWS == CONSUMER_ROWS  # of the features
    NUM_FEATURES: gl.constexpr = inputs.FEATURES // (2 if HAS_HALF else 1)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NUM_FEATURES, 32])
    if PDL:
        grid_wait()
    count = gl.to_tensor(0)
    for index in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        row, feature = tiles.origin(index)
        first, end = tiles.steps(index)
        scale_ptr = weight_scale_ptr + feature // GROUP * num_groups
        sums, count = multiply_tile(
            count, inputs, first, end, num_groups, scale_ptr, None, CONSUMER, layout
        )
        if HAS_HALF:
            feature += CONSUMER * NUM_FEATURES
        else:
            row += CONSUMER * CONSUMER_ROWS
        _store(sums, row, feature, tiles.part(index), output, layout)


@gluon.jit
def _store(sums, row, feature, part, output, layout: gl.constexpr):
    """Adds the bias to the sums before rounding, and the residual after it. Stores the result."""
    bias_ptr, residual_ptr, out_ptr, num_rows, out_features = output
    BLOCK: gl.constexpr = sums.shape[1]
    if bias_ptr is not None:
        index = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
        sums += gl.load(bias_ptr + feature + index).to(gl.float32)[None, :]
    IS_PART: gl.constexpr = out_ptr.dtype.element_ty == gl.float32
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [4, 1], [1, 0])
    out_layout: gl.constexpr = layout if IS_PART else wide
    out = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), out_layout)
    rows = row + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, out_layout))[:, None]
    features = feature + gl.arange(0, BLOCK, gl.SliceLayout(0, out_layout))[None, :]
    offset = (part * num_rows + rows) * out_features + features
    mask = rows < num_rows
    if residual_ptr is not None:
        residual = gl.load(residual_ptr + offset, mask=mask, other=0.0).to(gl.float32)
        out = (out.to(gl.float32) + residual).to(out.dtype)
    gl.store(out_ptr + offset, out, mask=mask)


SIZES = "num_rows", "num_groups", "num_m", "num_n", "num_parts", "part_steps", "num_steps"


@gluon.jit(do_not_specialize=SIZES)
def block_gemm_kernel(
    x_desc,
    weight_desc,
    scale_desc,
    weight_scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    out_features,
    num_groups,
    num_m,
    num_n,
    num_parts,
    part_steps,
    num_steps,
    ROWS: gl.constexpr,
    FEATURES: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Computes the tiles of ``Tiles``. The sums of the parts go to out [num_parts, num_rows,
    out_features]. A step multiplies one of ``num_groups`` groups of columns. Each part has an even
    number of steps. If the number of groups is odd, the last step is past the end, where the TMA
    returns zeros. A thread of a consumer has REGISTERS registers."""
    inputs = make_inputs(x_desc, weight_desc, scale_desc, FEATURES, STAGES)
    tiles = Tiles(num_m, num_n, num_parts, part_steps, num_steps, ROWS, FEATURES)
    output = bias_ptr, residual_ptr, out_ptr, num_rows, out_features
    gl.warp_specialize(
        [
            (_consume, (0, weight_scale_ptr, num_groups, output, inputs, tiles, PDL)),
            (_consume, (1, weight_scale_ptr, num_groups, output, inputs, tiles, PDL)),
            (produce, (x_desc, weight_desc, scale_desc, inputs, tiles, 0, PDL)),
        ],
        [4, 1],
        [REGISTERS, 24],  # the first consumer has the rest
    )
