"""Faster GEMMs that are bitwise identical to the batch-invariant one: cuBLAS in CUDA graphs, and on
Hopper the GEMM for decodes, and in prefills the one with SwiGLU in its epilogue.

Like invariant.py, they sum a row in one chain of tensor core instructions. cuBLAS does so if its
kernel has no split-K. Its choice of kernel is not documented, so ``compare`` checks each number of
rows that is used.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.fallback import run_or_replace
from nanovllm.kernels.gemm import decode_gemm, hopper_gemm, swiglu
from nanovllm.kernels.gemm.invariant import (
    invariant_linear,
    invariant_linear_add,
    num_parts,
    part_columns,
)
from nanovllm.kernels.gemm.split_k import add_parts
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.utils.compile_ahead import compiling_only

MIN_CUBLAS_ROWS, MIN_SWIGLU_ROWS = 17, 1024  # with fewer rows, invariant.py is as fast


class SameBits(NamedTuple):
    """Which kernels are bitwise identical to ``invariant_linear``, for the shape and dtype of a
    weight.

    Attributes:
        cublas_rows: the numbers of rows for which cuBLAS is, in CUDA graphs.
        has_swiglu: whether ``swiglu_linear`` is, from MIN_SWIGLU_ROWS rows on.
        decode_rows: the numbers of rows for which ``decode_linear`` is, and ``decode_swiglu`` with
            SwiGLU after it.
    """

    cublas_rows: frozenset[int] = frozenset()
    has_swiglu: bool = False
    decode_rows: frozenset[int] = frozenset()


@torch.inference_mode()
def compare(weight: Tensor, row_counts: Iterable[int]) -> SameBits:
    """Compares the bits of the other kernels with those of ``invariant_linear``.

    Call it with the cuBLAS workspace of the CUDA graphs, because cuBLAS' choice of a kernel depends
    on it. The choice does not depend on values, so the result holds for all weights of this shape
    and dtype.

    Args:
        weight: [out, in].
        row_counts: the numbers of rows in CUDA graphs.
    """
    out_features, width = weight.shape
    is_split = num_parts(out_features, width) > 1
    generator = torch.Generator(weight.device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        return values.normal_(0, scale, generator=generator)

    def is_identical(linear: Callable[..., Tensor], num_rows: int) -> bool:
        x, residual = randn(num_rows, width), randn(num_rows, out_features)
        expected = invariant_linear(x, other, None), invariant_linear(x, other, None, residual)
        found = linear(x, other), linear(x, other, residual)
        return all(map(_are_identical, found, expected))

    def is_swiglu_identical(linear: Callable[..., Tensor], num_rows: int) -> bool:
        x = randn(num_rows, width)
        return _are_identical(linear(x, other), silu_and_mul(invariant_linear(x, other, None)))

    def has_cublas(num_rows: int) -> bool:
        return is_identical(cublas_linear, num_rows)

    def has_decode(num_rows: int) -> bool:
        if not decode_gemm.is_fastest(num_rows, weight):
            return False
        found = is_identical(decode_linear, num_rows), is_swiglu_identical(decode_swiglu, num_rows)
        # If the kernel does not compile, ``decode_linear`` falls back to the other one.
        return all(found) and decode_gemm.is_fastest(num_rows, weight)

    def has_swiglu() -> bool:
        if is_split or not hopper_gemm.supports(swiglu.KERNEL, weight):
            return False
        is_same = is_swiglu_identical(swiglu_linear, MIN_SWIGLU_ROWS)
        return is_same and hopper_gemm.supports(swiglu.KERNEL, weight)

    row_counts = set(row_counts)
    cublas_rows = [n for n in row_counts if n >= MIN_CUBLAS_ROWS and not is_split]
    with suppress(torch.OutOfMemoryError):  # then only ``invariant_linear`` is used
        other = randn(out_features, width, scale=width**-0.5)
        with compiling_only():
            for num_rows in row_counts:
                has_decode(num_rows)
            for num_rows in cublas_rows:
                has_cublas(num_rows)
            has_swiglu()
        decode_rows = frozenset(filter(has_decode, row_counts))
        return SameBits(frozenset(filter(has_cublas, cublas_rows)), has_swiglu(), decode_rows)
    return SameBits()


def _are_identical(a: Tensor, b: Tensor) -> bool:
    """Compares all bits: 0.0 and -0.0 differ."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def cublas_linear(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """Computes ``invariant_linear`` without a bias by cuBLAS. Overwrites the residual."""
    if residual is None:
        return F.linear(x, weight)
    return torch.addmm(residual, x, weight.t(), out=residual)


def swiglu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Computes ``silu_and_mul(invariant_linear(x, weight, None))`` in one kernel: [N, in],
    [2 I, in] -> [N, I]."""
    return run_or_replace(
        swiglu.KERNEL,
        x.device,
        lambda: swiglu.launch(x, weight, is_rounded=True),
        lambda: silu_and_mul(invariant_linear(x, weight, None)),
    )


def decode_linear(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """Computes ``invariant_linear`` without a bias by decode_gemm.py."""

    def run() -> Tensor:
        sums = _launch_decode(x, weight, residual)
        if sums.dim() == 2:
            return sums
        out = x.new_empty(sums.shape[1:])
        add_parts(sums, None, residual, out)
        return out

    return run_or_replace(
        decode_gemm.KERNEL, x.device, run, lambda: invariant_linear(x, weight, None, residual)
    )


def decode_linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    """Computes ``invariant_linear_add`` as ``decode_linear`` does."""

    def run() -> tuple[Tensor, Tensor | None]:
        sums = _launch_decode(x, weight, residual)
        return sums, residual if sums.dim() == 3 else None

    return run_or_replace(
        decode_gemm.KERNEL, x.device, run, lambda: invariant_linear_add(x, weight, None, residual)
    )


def decode_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """Computes ``silu_and_mul(invariant_linear(x, weight, None))``: [N, in], [2 I, in] -> [N, I].
    Uses one kernel unless the weight has several parts."""
    if num_parts(*weight.shape) > 1:
        return silu_and_mul(decode_linear(x, weight))
    return run_or_replace(
        decode_gemm.KERNEL,
        x.device,
        lambda: _launch_decode(x, weight, swiglu=True),
        lambda: silu_and_mul(invariant_linear(x, weight, None)),
    )


def _launch_decode(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, swiglu: bool = False
) -> Tensor:
    columns = part_columns(*weight.shape)
    return decode_gemm.launch(x, weight, None, residual, swiglu, part_columns=columns)
