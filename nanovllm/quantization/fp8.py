"""Weights in FP8 (e4m3) with a scale for each output feature, or each block of GROUP x GROUP.

Weights are quantised as they are loaded, tensor by tensor (``Config.quantization``), unless the
checkpoint has them in FP8. The scales depend on the whole rows of a checkpoint's tensor, so each
tensor-parallel rank has its part of the same FP8 weights.

Inputs are quantised by the norm or the activation. A single row is not, because most of its matmuls
are fastest on the CUDA cores, where the norm and SwiGLU are fused with them. But on Hopper, in bf16
and without blocks, it is quantised if the weight is large.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from nanovllm.kernels.fp8 import (
    FP8,
    GROUP,
    Fp8Rows,
    dequantize,
    quantize,
    quantize_blocks,
    quantize_row_groups,
    quantize_rows,
    unpack_rows,
)
from nanovllm.kernels.gemm.fp8 import fp8_linear, fp8_linear_add, hopper_kernel
from nanovllm.kernels.gemm.skinny import skinny_norm_linear
from nanovllm.kernels.rms_norm import fp8_group_rms_norm, fp8_rms_norm
from nanovllm.kernels.silu_and_mul import (
    fp8_gelu_tanh_and_mul,
    fp8_group_gelu_tanh_and_mul,
    fp8_group_silu_and_mul,
    fp8_silu_and_mul,
)
from nanovllm.quantization.base import PLAIN, InputFormat, LinearWeight, Shard
from nanovllm.quantization.unquantized import UnquantizedWeight
from nanovllm.utils.distributed import RankPart
from nanovllm.utils.loader import check_shape, copy_weight
from nanovllm.utils.triton_compat import use_triton

FP8_ROWS = InputFormat(fp8_rms_norm, fp8_silu_and_mul, fp8_gelu_tanh_and_mul)
FP8_GROUPS = InputFormat(fp8_group_rms_norm, fp8_group_silu_and_mul, fp8_group_gelu_tanh_and_mul)
SWIGLU = {fmt.silu_and_mul for fmt in (PLAIN, FP8_ROWS, FP8_GROUPS)}
FP8_MATMUL_CAPABILITY = (8, 9)
MIN_QUANTIZED_ROW_NUMEL = 1 << 24  # elements of a weight from which on a single row is quantised


def new_fp8_weight(layer: nn.Module, has_groups: bool = False) -> LinearWeight:
    """Creates the weight of a new linear layer, in the class for the device under construction.

    Args:
        has_groups: whether blocks of the weight and groups of inputs have scales, on a GPU.
    """
    device = torch.get_default_device()
    if device.type == "cpu":
        return DequantizedFp8Weight(layer)
    multiplies = torch.cuda.get_device_capability(device) >= FP8_MATMUL_CAPABILITY
    if has_groups:
        return GroupedFp8Weight(layer) if multiplies else StoredGroupedFp8Weight(layer)
    return Fp8Weight(layer) if multiplies else StoredFp8Weight(layer)


class DequantizedFp8Weight(UnquantizedWeight):
    """A weight that is quantised and dequantised when it is loaded, for CPUs and for batch
    invariance. Matmuls use the values of the FP8 weight, and inputs that are not quantised."""

    def load(self, param: nn.Parameter, tensor: Tensor, shard: Shard) -> None:
        if tensor.dim() == 2 and tensor.is_floating_point():  # else a bias, or refused
            tensor = dequantize(quantize(tensor))
        super().load(param, tensor, shard)


class StoredFp8Weight(LinearWeight):
    """The parameter "weight", in FP8 [out, in], and the buffer "weight_scale", fp32 [out]. For GPUs
    without FP8 matmuls: the weight is dequantised in each matmul, and inputs are not quantised."""

    has_groups = False

    def create_parameters(self, input_size: int, output_size: int) -> None:
        codes = torch.empty(output_size, input_size, dtype=FP8)
        self.layer.weight = nn.Parameter(codes, requires_grad=False)
        self.layer.weight.fill_with_dummy_weights = self._fill_with_dummy_weights
        # Not a parameter, because checkpoints have no tensor for it.
        shape: tuple[int, ...] = (output_size,)
        if self.has_groups:
            assert output_size % GROUP == input_size % GROUP == 0
            shape = (output_size // GROUP, input_size // GROUP)
        self.layer.register_buffer("weight_scale", torch.empty(shape, dtype=torch.float32))

    def load(self, param: nn.Parameter, tensor: Tensor, shard: Shard) -> None:
        with torch.inference_mode(param.is_inference()):  # else it cannot be written
            if param is not self.layer.weight:
                copy_weight(param.data[shard.rows], shard.take(tensor, param.shape))
                return
            targets, rows = self._weight, self._quantize(tensor, shard)
            shards = shard, _of_blocks(shard) if self.has_groups else shard
            parts = [s.take(v, t.shape) for s, v, t in zip(shards, rows, targets, strict=True)]
            for s, part, target in zip(shards, parts, targets, strict=True):
                target.data[s.rows].copy_(part)

    def _quantize(self, tensor: Tensor, shard: Shard) -> Fp8Rows:
        """Returns a whole checkpoint tensor in FP8. It may be packed (``pack_rows``)."""
        weight = self.layer.weight
        if tensor.dtype is not torch.uint8:
            shard.take(tensor, weight.shape)  # checks the shape
            if not tensor.is_floating_point():
                raise ValueError(f"dtype {tensor.dtype} is not supported (quantised checkpoint?)")
            return (quantize_blocks if self.has_groups else quantize)(tensor.to(weight.device))
        width = weight.size(1) * (shard.num_parts if shard.dim == 1 else 1)
        num_groups = width // GROUP if self.has_groups else 1
        check_shape((len(tensor), width + 4 * num_groups), tensor)  # bytes of numbers and scales
        codes, scales = unpack_rows(tensor.to(weight.device), num_groups)
        return Fp8Rows(codes, scales[::GROUP] if self.has_groups else scales.flatten())

    def _fill_with_dummy_weights(self, param: nn.Parameter, generator: torch.Generator) -> None:
        values = torch.empty(param.shape, device=param.device).normal_(0, 0.02, generator=generator)
        self.load(param, values, Shard())

    @property
    def _weight(self) -> Fp8Rows:
        return Fp8Rows(self.layer.weight, self.layer.weight_scale)

    def _uses_skinny(self, x: Any) -> TypeGuard[Tensor]:
        """Returns whether ``skinny_norm_linear`` multiplies this x."""
        is_row = isinstance(x, Tensor) and x.dim() == 2 and len(x) == 1 and x.is_contiguous()
        return is_row and use_triton(self.layer.weight)

    def matmul(self, x: Any) -> Tensor:
        if self._uses_skinny(x):
            return self._multiply_vector(x)[0]
        return torch.nn.functional.linear(x, dequantize(self._weight, x.dtype), self.bias)

    def norm_matmul(
        self, x: Tensor | RankPart, residual: Tensor | None, norm: Any, act_fn: Any = None
    ) -> tuple[Any, Tensor]:
        gated = act_fn is not None
        is_fused = norm is not None and (not gated or act_fn.function in SWIGLU)
        if not is_fused or not self._uses_skinny(x):
            return super().norm_matmul(x, residual, norm, act_fn)
        return self._multiply_vector(x, gated, norm.weight, norm.eps, residual)

    def _multiply_vector(
        self,
        x: Tensor,
        silu: bool = False,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        weight, scales = self._weight
        if x.is_cuda and torch.cuda.get_device_capability(x.device) < FP8_MATMUL_CAPABILITY:
            weight = weight.view(torch.uint8)
        return skinny_norm_linear(x, weight, self.bias, silu, norm, eps, residual, scales)


class Fp8Weight(StoredFp8Weight):
    """The parameters of a StoredFp8Weight, for GPUs with FP8 matmuls. Inputs are quantised too,
    with one scale for each row."""

    input_format = FP8_ROWS

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.dtype = torch.get_default_dtype()

    def matmul(self, x: Tensor | Fp8Rows) -> Tensor:
        if self._uses_skinny(x):
            return super().matmul(x)
        return fp8_linear(self._quantized(x), self._weight, self.bias, self.dtype)

    def matmul_add(self, x: Tensor | Fp8Rows, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._uses_skinny(x):
            return super().matmul_add(x, residual)
        return fp8_linear_add(self._quantized(x), self._weight, self.bias, residual)

    def _quantized(self, x: Tensor | Fp8Rows) -> Fp8Rows:
        if isinstance(x, Tensor):
            return (quantize_row_groups if self.has_groups else quantize_rows)(x)
        return x

    def _uses_skinny(self, x: Any) -> TypeGuard[Tensor]:
        is_large = not self.has_groups and self.layer.weight.numel() >= MIN_QUANTIZED_ROW_NUMEL
        if is_large and hopper_kernel(1, self._weight, self.dtype) is not None:
            return False
        return super()._uses_skinny(x)


class StoredGroupedFp8Weight(StoredFp8Weight):
    """A StoredFp8Weight whose "weight_scale" is fp32 [out / GROUP, in / GROUP], the scales of
    blocks."""

    has_groups = True


class GroupedFp8Weight(Fp8Weight):
    """A StoredGroupedFp8Weight for GPUs with FP8 matmuls. Inputs have a scale for each row and
    group of GROUP columns."""

    input_format = FP8_GROUPS
    has_groups = True


def _of_blocks(shard: Shard) -> Shard:
    """Returns the shard of the scales of blocks, for a shard of whole blocks."""
    bounds = shard.rows.start, shard.rows.stop
    assert not any(bound and bound % GROUP for bound in bounds)
    return shard._replace(rows=slice(*(bound and bound // GROUP for bound in bounds)))
