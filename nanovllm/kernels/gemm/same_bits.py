"""Faster kernels with the bits of the batch-invariant GEMM: those of cuBLAS in CUDA graphs and, for
prefills on Hopper, the GEMM with SwiGLU in its epilogue.

Like invariant.py, they sum a row in one chain of tensor core instructions. For cuBLAS this holds if
it does not split the input features. Which kernel it chooses is not documented, so ``compare``
compares the bits for each number of rows that is used.
"""

from collections.abc import Iterable
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.gemm import hopper_gemm, swiglu
from nanovllm.kernels.gemm.invariant import invariant_linear, num_parts
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.utils.compile_ahead import compiling_only

MIN_CUBLAS_ROWS, MIN_SWIGLU_ROWS = 17, 1024  # with fewer rows, invariant.py is as fast
Key = tuple[torch.Size, torch.dtype, torch.device]  # of a weight
_cublas_rows: dict[Key, set[int]] = {}  # numbers of rows with the same bits
_swiglu: set[Key] = set()  # weights with the same bits


def fastest_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """Computes ``invariant_linear`` with the fastest kernel that has its bits. The residual may be
    overwritten."""
    has_same_bits = bias is None and len(x) in _cublas_rows.get(_key(weight), ())
    # Outside of graphs cuBLAS has another workspace than the one that was compared.
    if has_same_bits and torch.cuda.is_current_stream_capturing():
        return _cublas_linear(x, weight, residual)
    return invariant_linear(x, weight, bias, residual)


def fastest_swiglu(x: Tensor, weight: Tensor) -> Tensor | None:
    """Computes ``silu_and_mul(invariant_linear(x, weight, None))`` in one kernel with the same
    bits: [N, in], [2 I, in] -> [N, I]. Returns None if none is faster."""
    if len(x) < MIN_SWIGLU_ROWS or _key(weight) not in _swiglu:
        return None
    return _swiglu_linear(x, weight)


@torch.inference_mode()
def compare(weight: Tensor, row_counts: Iterable[int]) -> None:
    """Finds out which kernels have the same bits. Each shape and dtype is compared once.

    Call it with the cuBLAS workspace of the CUDA graphs, because cuBLAS' choice of a kernel depends
    on it. It does not depend on the values, so all weights of a shape have the same result.

    Args:
        weight: [out, in].
        row_counts: the numbers of rows in CUDA graphs.
    """
    key, (out_features, width) = _key(weight), weight.shape
    if key in _cublas_rows or num_parts(out_features, width) > 1:
        return
    _cublas_rows[key] = set()
    generator = torch.Generator(weight.device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        return values.normal_(0, scale, generator=generator)

    def has_same_bits(num_rows: int) -> bool:
        x, residual = randn(num_rows, width), randn(num_rows, out_features)
        expected = invariant_linear(x, other, None), invariant_linear(x, other, None, residual)
        found = _cublas_linear(x, other, None), _cublas_linear(x, other, residual)
        return all(map(torch.equal, found, expected))

    def has_swiglu_bits() -> bool:
        x = randn(MIN_SWIGLU_ROWS, width)
        return torch.equal(_swiglu_linear(x, other), silu_and_mul(invariant_linear(x, other, None)))

    row_counts = [num_rows for num_rows in row_counts if num_rows >= MIN_CUBLAS_ROWS]
    has_swiglu = hopper_gemm.supports(swiglu.EPILOGUE, weight)
    with suppress(torch.OutOfMemoryError):  # then other kernels with the same bits are used
        other = randn(out_features, width, scale=width**-0.5)
        with compiling_only():
            for num_rows in row_counts:
                has_same_bits(num_rows)
            if has_swiglu:
                has_swiglu_bits()
        _cublas_rows[key].update(filter(has_same_bits, row_counts))
        if has_swiglu and has_swiglu_bits():
            _swiglu.add(key)


def _cublas_linear(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    if residual is None:
        return F.linear(x, weight)
    return torch.addmm(residual, x, weight.t(), out=residual)


def _swiglu_linear(x: Tensor, weight: Tensor) -> Tensor:
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return invariant_linear(x, weight, None)

    return swiglu.gated_linear(x, weight, linear, is_rounded=True)


def _key(weight: Tensor) -> Key:
    return weight.shape, weight.dtype, weight.device
