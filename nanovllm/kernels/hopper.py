"""Parts of the Gluon kernels for Hopper: named barriers, the wait for the previous kernel, loads
and stores by TMA, and SwiGLU."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Before Triton 3.9 they have the longer names.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Triton itself uses up to 5 named barriers, from 0 on: one per partition and one more.
FIRST_BARRIER = 5


@gluon.jit
def barrier_sync(barrier, NUM_THREADS: gl.constexpr):
    """Waits at a named barrier, until ``NUM_THREADS`` threads wait or have arrived."""
    gl.inline_asm_elementwise(
        f"bar.sync $1, {NUM_THREADS}; mov.u32 $0, $1;",
        "=r,r",
        [barrier],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def barrier_arrive(barrier, NUM_THREADS: gl.constexpr):
    """Arrives at a named barrier without waiting. This is cheaper than to arrive at an mbarrier:
    before and after that, Triton makes all threads of the partition wait for each other."""
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {NUM_THREADS}; mov.u32 $0, $1;",
        "=r,r",
        [barrier],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def grid_wait():
    """With programmatic dependent launch, allows the next kernel to start, and waits for the
    results of the previous one."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, $1;",
        "=r,r",
        [gl.program_id(0)],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def rounded_swiglu(gate, up, dtype: gl.constexpr):
    """Computes SwiGLU in fp32, rounds gate, up and the activated gate to ``dtype``, and returns the
    result in it, with the same operations as ``_silu_and_mul_kernel``."""
    gate = gate.to(dtype).to(gl.float32)
    return (gate / (1 + gl.exp(-gate))).to(dtype) * up.to(dtype)
