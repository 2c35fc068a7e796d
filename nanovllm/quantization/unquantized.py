"""Weights in the model's own dtype: fp32, bf16 or fp16."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels.gemm import decode_gemm, hopper_gemm, qkv, swiglu, tiled
from nanovllm.kernels.gemm.decode_gemm import decode_linear, decode_linear_add, decode_swiglu
from nanovllm.kernels.gemm.onednn import onednn_linear, pack_weight
from nanovllm.kernels.gemm.skinny import skinny_linear, skinny_norm_and_linear, skinny_norm_linear
from nanovllm.kernels.rope import CacheSlots, RopeInputs
from nanovllm.quantization.base import PLAIN, LinearWeight, Shard
from nanovllm.utils.distributed import RankPart
from nanovllm.utils.loader import copy_weight
from nanovllm.utils.triton_compat import use_triton


def _gated_linear(x: Tensor, weight: Tensor, bias: None) -> Tensor:
    return swiglu.gated_linear(x, weight)


def _qkv_linear(
    x: Tensor, weight: Tensor, bias: None, rope: RopeInputs, slots: CacheSlots
) -> Tensor:
    return qkv.qkv_linear(x, weight, rope, slots)


def _addmm(x: Tensor, weight: Tensor, bias: None, residual: Tensor) -> tuple[Tensor, None]:
    return torch.addmm(residual, x, weight.t(), out=residual), None


def _is_not_lm_head(num_rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    # For an LM head these kernels are slower than cuBLAS, whose matmul then takes long enough to
    # reach the memory bandwidth.
    return use_triton(weight) and weight.size(0) <= 1 << 16


def _is_small(num_rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    # With more input features or a larger weight cuBLAS is faster, because it reads x less often.
    is_small = weight.size(1) < 4096 and weight.numel() <= 13 << 20
    return is_small and _is_not_lm_head(num_rows, weight, bias)


def _is_decode(num_rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    # One row of other weights has skinny kernels, which are as fast, and have the norm fused.
    is_choice = num_rows > 1 or not _is_not_lm_head(num_rows, weight, bias)
    return is_choice and decode_gemm.is_fastest(num_rows, weight)


def _is_tiled(num_rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    # For larger weights cuBLAS is as fast.
    return use_triton(weight) and weight.numel() <= 1 << 22 and tiled.supports(weight)


def _is_gated(num_rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    return bias is None and hopper_gemm.supports(swiglu.KERNEL, weight)


def _has_rope(num_rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    return bias is None and hopper_gemm.supports(qkv.KERNEL, weight)


def _is_large_sum(num_rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    # A smaller result stays in the L2 cache, so adding the residual in the next norm costs little.
    is_large = weight.is_cuda and num_rows * weight.size(0) * weight.itemsize >= 16 << 20
    return bias is None and is_large


class Choice(NamedTuple):
    """One kernel that an operation may use: an entry of KERNELS.

    Attributes:
        rows: the numbers of rows of x for which the kernel is the fastest.
        applies: (number of rows, weight, bias) -> whether the kernel supports this weight and is
            the fastest kernel for it.
        kernel: (x, weight, bias, ...) -> result.
    """

    rows: range
    applies: Callable[[int, Tensor, Tensor | None], bool]
    kernel: Callable[..., Any]


ANY = range(sys.maxsize)
DECODE_ROWS = range(1, decode_gemm.MAX_ROWS + 1)

# The kernels of each operation on x [N, in] and a weight [out, in]. The first Choice is used whose
# ``rows`` contain N and that ``applies`` to the weight. If there is none, the operation runs as
# several kernels. The limits were measured on an H200 (docs/lab-log.md).
KERNELS: dict[str, tuple[Choice, ...]] = {
    "matmul": (
        Choice(DECODE_ROWS, _is_decode, decode_linear),
        Choice(range(1, 9), _is_not_lm_head, skinny_linear),
        Choice(range(9, 17), _is_small, skinny_linear),
        Choice(range(17, 65), _is_tiled, tiled.tile_linear),
        Choice(ANY, lambda num_rows, weight, bias: weight.is_mkldnn, onednn_linear),
        Choice(ANY, lambda num_rows, weight, bias: True, F.linear),
    ),
    "matmul_swiglu": (
        Choice(DECODE_ROWS, _is_decode, decode_swiglu),
        Choice(range(1, 9), _is_not_lm_head, partial(skinny_linear, silu=True)),
        Choice(range(9, 17), _is_small, partial(skinny_linear, silu=True)),
        Choice(range(1024, sys.maxsize), _is_gated, _gated_linear),
    ),
    "matmul_rope": (Choice(range(1024, sys.maxsize), _has_rope, _qkv_linear),),
    "norm_matmul": (Choice(range(1, 2), _is_not_lm_head, skinny_norm_linear),),
    "norm_and_matmul": (Choice(range(1, 2), _is_not_lm_head, skinny_norm_and_linear),),
    "matmul_add": (
        Choice(DECODE_ROWS, _is_decode, decode_linear_add),
        Choice(ANY, _is_large_sum, _addmm),
    ),
}


def choose_kernel(operation: str, x: Any, weight: Tensor, bias: Tensor | None) -> Any:
    """Returns the kernel from KERNELS for this operation, or None if it has none.

    An x that is not a contiguous matrix counts as 0 rows: F.linear and oneDNN take other tensors,
    and no fused kernel adds the parts of a sum.
    """
    is_matrix = isinstance(x, Tensor) and x.dim() == 2 and x.is_contiguous()
    num_rows = x.size(0) if is_matrix else 0
    for rows, applies, kernel in KERNELS[operation]:
        if num_rows in rows and applies(num_rows, weight, bias):
            return kernel
    return None


class UnquantizedWeight(LinearWeight):
    """One parameter, "weight" [out, in]. On a CPU ``pack`` converts it to oneDNN's layout."""

    # Set if an embedding shares the weight, because the embedding needs the plain layout.
    _packed_copy: Tensor | None = None
    _released_shape: torch.Size | None = None

    def create_parameters(self, input_size: int, output_size: int) -> None:
        weight = torch.empty(output_size, input_size)
        self.layer.weight = nn.Parameter(weight, requires_grad=False)

    def load(self, param: nn.Parameter, tensor: Tensor, shard: Shard) -> None:
        tensor = shard.take(tensor, param.shape)
        with torch.inference_mode(param.is_inference()):  # else ``data`` cannot be set
            data = param.data.to_dense() if param.is_mkldnn else param.data
            copy_weight(data[shard.rows], tensor)
            if param.is_mkldnn:
                param.data = pack_weight(data)

    def pack(self) -> None:
        weight = self.layer.weight
        # oneDNN needs instructions for half precision that not every CPU has.
        is_packable = weight.device.type == "cpu" and weight.dtype is torch.float32
        if weight.is_mkldnn or not is_packable or not torch.backends.mkldnn.is_available():
            return
        if weight.weight_loader != self.layer.weight_loader:  # shared with another layer
            self._packed_copy = pack_weight(weight.data)
            return
        self.layer.weight = nn.Parameter(pack_weight(weight.data), requires_grad=False)
        self.layer.weight.weight_loader = self.layer.weight_loader

    def release(self) -> None:
        weight = self.layer.weight
        self._packed_copy = None  # ``pack`` makes another after the next load
        if weight.is_mkldnn:
            self._released_shape = weight.shape
            self._replace((1, 1))

    def restore(self) -> None:
        if self._released_shape is not None:
            self._replace(self._released_shape)
            self._released_shape = None

    def _replace(self, shape: Sequence[int]) -> None:
        """Sets the packed weight to one of another shape, without values."""
        weight = self.layer.weight
        data = torch.empty(*shape, dtype=weight.dtype, device="cpu")
        with torch.inference_mode(weight.is_inference()):  # else ``data`` cannot be set
            weight.data = pack_weight(data)

    @property
    def _weight(self) -> Tensor:
        return self.layer.weight if self._packed_copy is None else self._packed_copy

    def matmul(self, x: Tensor) -> Tensor:
        weight = self._weight
        return choose_kernel("matmul", x, weight, self.bias)(x, weight, self.bias)

    def matmul_swiglu(self, x: Tensor, act_fn: Any) -> Any:
        weight = self._weight
        kernel = choose_kernel("matmul_swiglu", x, weight, self.bias)
        if kernel is None or act_fn.function is not PLAIN.silu_and_mul:
            return super().matmul_swiglu(x, act_fn)
        return kernel(x, weight, self.bias)

    def matmul_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        weight = self._weight
        kernel = choose_kernel("matmul_add", x, weight, self.bias)
        if kernel is None:
            return self.matmul(x), residual
        return kernel(x, weight, self.bias, residual)

    def norm_matmul(
        self, x: Tensor | RankPart, residual: Tensor | None, norm: Any, act_fn: Any = None
    ) -> tuple[Any, Tensor]:
        weight = self._weight
        kernel = choose_kernel("norm_matmul", x, weight, self.bias)
        gated = act_fn is not None
        is_fused = not gated or act_fn.function is PLAIN.silu_and_mul
        if kernel is None or norm is None or not is_fused:
            return super().norm_matmul(x, residual, norm, act_fn)
        return kernel(x, weight, self.bias, gated, norm.weight, norm.eps, residual)

    def norm_and_matmul(
        self, x: Tensor | RankPart, residual: Tensor | None, norm: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight = self._weight
        kernel = choose_kernel("norm_and_matmul", x, weight, self.bias)
        if kernel is None:
            return super().norm_and_matmul(x, residual, norm)
        return kernel(x, weight, self.bias, norm.weight, norm.eps, residual)

    def norm_matmul_rope(
        self,
        x: Tensor | RankPart,
        residual: Tensor | None,
        norm: Any,
        rope: RopeInputs,
        slots: CacheSlots | None,
    ) -> tuple[Tensor, Tensor] | None:
        weight = self._weight
        rows = x.part if isinstance(x, RankPart) else x
        kernel = choose_kernel("matmul_rope", rows, weight, self.bias)
        if kernel is None or slots is None or not qkv.supports(rope, slots, rows.dtype):
            return None
        normed, total = self.normalize(x, residual, norm)
        return kernel(normed, weight, self.bias, rope, slots), total
