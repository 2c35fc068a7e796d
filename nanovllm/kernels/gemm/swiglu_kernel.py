"""The kernel of swiglu.py, a GEMM for Hopper with SwiGLU in its epilogue, in Gluon. A consumer
computes SwiGLU while the other one multiplies: see hopper_loop.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from nanovllm.kernels.attention.tiles import LOG2_E
from nanovllm.kernels.gemm.hopper_loop import (
    GL_BLOCK_N,
    GL_ROWS,
    Tiles,
    make_inputs,
    multiply_tile,
    produce,
)
from nanovllm.kernels.hopper import rounded_swiglu, tma_store

STAGES, GL_LOG2_E = gl.constexpr(4), gl.constexpr(LOG2_E)


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
def _consume(
    CONSUMER: gl.constexpr, IS_ROUNDED: gl.constexpr, out_desc, out_tiles, inputs, tiles
):  # fmt: skip
    """Computes the rows of one consumer in all tiles of the program."""
    out_tile = out_tiles.index(CONSUMER)
    step = gl.to_tensor(0)
    for index in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        m, n = tiles.place(index)
        gate, up, step = multiply_tile(step, inputs, tiles.num_steps, CONSUMER)
        if IS_ROUNDED:
            out = rounded_swiglu(gate, up, out_desc.dtype)
        else:
            out = (_silu(gate) * up).to(out_desc.dtype)
        tma.store_wait(0)
        out_tile.store(out)
        fence_async_shared()
        row = m * (2 * GL_ROWS) + CONSUMER * GL_ROWS
        tma_store(out_desc, [row, n * GL_BLOCK_N], out_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_m", "num_n", "num_steps", "inner"])
def swiglu_kernel(
    x_desc,
    weight_desc,
    out_desc,
    num_m,
    num_n,
    num_steps,
    inner,
    IS_ROUNDED: gl.constexpr,
):
    """Computes num_m x num_n tiles of the result, each from as many rows of G as of U.
    ``num_steps`` is the number of tiles of x's columns, and ``inner`` the number of columns of the
    result. With IS_ROUNDED, the results of both matmuls and of silu are rounded too."""
    inputs = make_inputs(x_desc, weight_desc, STAGES)
    tiles = Tiles(num_m, num_n, num_steps, GL_BLOCK_N)
    out_tiles = gl.allocate_shared_memory(out_desc.dtype, [2, GL_ROWS, GL_BLOCK_N], out_desc.layout)
    gl.warp_specialize(
        [
            (_consume, (0, IS_ROUNDED, out_desc, out_tiles, inputs, tiles)),
            (_consume, (1, IS_ROUNDED, out_desc, out_tiles, inputs, tiles)),
            (produce, (x_desc, weight_desc, inputs, tiles, inner)),
        ],
        [4, 1],
        [240, 24],  # registers per thread; the first consumer has 240, too
    )
