"""Weights in the model's own dtype whose matmul gives a row the same bits whatever the other rows
are (``Config.batch_invariant``)."""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.kernels.gemm.cublas import small_cublas_workspace
from nanovllm.kernels.gemm.invariant import (
    check_launches,
    invariant_linear,
    invariant_linear_add,
)
from nanovllm.kernels.gemm.onednn import check_row_blocks, pack_for_row_blocks, row_block_linear
from nanovllm.kernels.gemm.same_bits import (
    MIN_SWIGLU_ROWS,
    SameBits,
    compare,
    cublas_linear,
    decode_linear,
    decode_linear_add,
    decode_swiglu,
    swiglu_linear,
)
from nanovllm.kernels.silu_and_mul import invariant_gelu_tanh_and_mul, invariant_silu_and_mul
from nanovllm.quantization.base import PLAIN, InputFormat, LinearWeight
from nanovllm.quantization.fp8 import DequantizedFp8Weight
from nanovllm.quantization.unquantized import UnquantizedWeight
from nanovllm.utils.distributed import RankPart
from nanovllm.utils.triton_compat import by_device, use_triton

BATCH_INVARIANT = InputFormat(PLAIN.rms_norm, invariant_silu_and_mul, invariant_gelu_tanh_and_mul)
# (x, weight, bias) -> x W^T + b, for any number of rows.
batch_invariant_linear = by_device(row_block_linear, invariant_linear)


class BatchInvariantWeight(UnquantizedWeight):
    """An UnquantizedWeight whose matmul sums in one order for any number of rows. The fused
    operations are, on a GPU, the sum with the residual and, for some numbers of rows, SwiGLU.

    On a CPU all matmuls are computed in fp32. With bf16 or fp16, a copy of the weight in fp32 is
    kept for them.
    """

    input_format = BATCH_INVARIANT
    same_bits = SameBits()  # found by start-up on a GPU

    def pack(self) -> None:
        """Also checks that the matmul is batch-invariant on this CPU or GPU.

        Raises:
            ValueError: it is not.
        """
        super().pack()
        weight = self.layer.weight
        if weight.device.type == "cpu":
            if weight.dtype is not torch.float32:
                self._packed_copy = pack_for_row_blocks(weight.data)
            check_row_blocks(self._weight)
        elif use_triton(weight):
            check_launches(weight.data)

    def matmul(self, x: Tensor) -> Tensor:
        if self._uses_decode_gemm(x):
            return decode_linear(x, self._weight)
        if self._uses_cublas(x):
            return cublas_linear(x, self._weight)
        return batch_invariant_linear(x, self._weight, self.bias)

    def matmul_swiglu(self, x: Tensor, act_fn: Any) -> Any:
        if self.bias is None and act_fn.function is invariant_silu_and_mul:
            if self.same_bits.has_swiglu and len(x) >= MIN_SWIGLU_ROWS:
                return swiglu_linear(x, self._weight)
            if self._uses_decode_gemm(x):
                return decode_swiglu(x, self._weight)
        return LinearWeight.matmul_swiglu(self, x, act_fn)

    def matmul_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._uses_decode_gemm(x):
            return decode_linear_add(x, self._weight, residual)
        if self._uses_cublas(x):
            return cublas_linear(x, self._weight, residual), None
        if use_triton(x):
            return invariant_linear_add(x, self._weight, self.bias, residual)
        return LinearWeight.matmul_add(self, x, residual)

    def _uses_cublas(self, x: Tensor) -> bool:
        if self.bias is not None or len(x) not in self.same_bits.cublas_rows:
            return False
        # Outside of graphs cuBLAS has another workspace than the one that was compared.
        return torch.cuda.is_current_stream_capturing()

    def _uses_decode_gemm(self, x: Tensor) -> bool:
        return self.bias is None and len(x) in self.same_bits.decode_rows

    def norm_matmul(
        self, x: Tensor | RankPart, residual: Tensor | None, norm: Any, act_fn: Any = None
    ) -> tuple[Any, Tensor]:
        return LinearWeight.norm_matmul(self, x, residual, norm, act_fn)

    def norm_and_matmul(
        self, x: Tensor | RankPart, residual: Tensor | None, norm: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return LinearWeight.norm_and_matmul(self, x, residual, norm)

    def norm_matmul_rope(self, *args: Any) -> None:
        return None


class RoundedToFp8Weight(DequantizedFp8Weight, BatchInvariantWeight):
    """A BatchInvariantWeight in the model's dtype, whose values are rounded to FP8 at load."""


class BatchInvariantVocabulary(BatchInvariantWeight):
    """The weight of an embedding or an LM head. On a GPU logits are fp32.

    Penalties, for example, need fp32 logits, and a step computes them for all of its rows. Kernels
    that sum over logits add in another order if they read another dtype.
    """

    def matmul(self, x: Tensor) -> Tensor:
        if use_triton(x):
            return invariant_linear(x, self._weight, self.bias, dtype=torch.float32)
        return super().matmul(x)


def choose_identical_kernels(model: nn.Module, row_counts: set[int]) -> None:
    """Lets the model's linear layers use faster kernels that are bitwise identical to the
    batch-invariant GEMM on this GPU. Call it at start-up.

    Args:
        row_counts: the numbers of rows in CUDA graphs.
    """
    found: dict[torch.Size, SameBits] = {}
    with small_cublas_workspace():
        for module in model.modules():
            linear = getattr(module, "linear_weight", None)
            if isinstance(linear, BatchInvariantVocabulary):
                continue  # its results are fp32
            if isinstance(linear, BatchInvariantWeight):
                weight = linear.layer.weight
                if weight.shape not in found:
                    found[weight.shape] = compare(weight, row_counts)
                linear.same_bits = found[weight.shape]
