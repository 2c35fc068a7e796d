"""Weights in FP8 (e4m3) with one scale for each output feature (``Config.quantization``).

Weights are quantised as they are loaded, tensor by tensor. The scales depend on the whole rows of a
checkpoint's tensor, so each tensor-parallel rank has its part of the same FP8 weights.
"""

import torch
from torch import Tensor, nn

from nanovllm.kernels.fp8 import FP8, Fp8Rows, dequantize, quantize, quantize_rows
from nanovllm.kernels.gemm.fp8 import fp8_linear
from nanovllm.kernels.rms_norm import fp8_rms_norm
from nanovllm.kernels.silu_and_mul import fp8_gelu_tanh_and_mul, fp8_silu_and_mul
from nanovllm.quantization.base import InputFormat, LinearWeight, Shard
from nanovllm.quantization.unquantized import UnquantizedWeight
from nanovllm.utils.loader import check_shape, copy_weight

FP8_ROWS = InputFormat(fp8_rms_norm, fp8_silu_and_mul, fp8_gelu_tanh_and_mul)
FP8_MATMUL_CAPABILITY = (8, 9)


def new_fp8_weight(layer: nn.Module) -> LinearWeight:
    """Creates the weight of a new linear layer, in the class for the device under construction."""
    device = torch.get_default_device()
    if device.type == "cpu":
        return DequantizedFp8Weight(layer)
    if torch.cuda.get_device_capability(device) < FP8_MATMUL_CAPABILITY:
        return StoredFp8Weight(layer)
    return Fp8Weight(layer)


class DequantizedFp8Weight(UnquantizedWeight):
    """A weight that is quantised and dequantised when it is loaded, for CPUs. Matmuls use the
    values of the FP8 weight, and inputs that are not quantised."""

    def load(self, param: nn.Parameter, tensor: Tensor, shard: Shard) -> None:
        if tensor.dim() == 2 and tensor.is_floating_point():  # else a bias, or refused
            tensor = dequantize(quantize(tensor))
        super().load(param, tensor, shard)


class StoredFp8Weight(LinearWeight):
    """The parameter "weight", in FP8 [out, in], and the buffer "weight_scale", fp32 [out]. For GPUs
    without FP8 matmuls: the weight is dequantised in each matmul, and inputs are not quantised."""

    def create_parameters(self, input_size: int, output_size: int) -> None:
        codes = torch.empty(output_size, input_size, dtype=FP8)
        self.layer.weight = nn.Parameter(codes, requires_grad=False)
        self.layer.weight.fill_with_dummy_weights = self._fill_with_dummy_weights
        # Not a parameter, because checkpoints have no tensor for it.
        self.layer.register_buffer("weight_scale", torch.empty(output_size, dtype=torch.float32))

    def load(self, param: nn.Parameter, tensor: Tensor, shard: Shard) -> None:
        needed = [len(range(param.size(0))[shard.rows]), *param.shape[1:]]
        is_split = shard.dim < len(needed)  # a bias has no input features
        if is_split:
            needed[shard.dim] *= shard.num_parts
        check_shape(needed, tensor)
        if is_split and shard.dim == 0:
            tensor = tensor.chunk(shard.num_parts)[shard.part]
        with torch.inference_mode(param.is_inference()):  # else it cannot be written
            if param is not self.layer.weight:
                copy_weight(param.data[shard.rows], tensor)
                return
            if not tensor.is_floating_point():
                raise ValueError(f"dtype {tensor.dtype} is not supported (quantised checkpoint?)")
            codes, scales = quantize(tensor.to(param.device))
            if shard.dim == 1:
                codes = codes.chunk(shard.num_parts, 1)[shard.part]
            param.data[shard.rows].copy_(codes)
            self.layer.weight_scale[shard.rows].copy_(scales)

    def _fill_with_dummy_weights(self, param: nn.Parameter, generator: torch.Generator) -> None:
        values = torch.empty(param.shape, device=param.device).normal_(0, 0.02, generator=generator)
        self.load(param, values, Shard())

    @property
    def _weight(self) -> Fp8Rows:
        return Fp8Rows(self.layer.weight, self.layer.weight_scale)

    def matmul(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, dequantize(self._weight, x.dtype), self.bias)


class Fp8Weight(StoredFp8Weight):
    """The same parameters, for GPUs with FP8 matmuls. Inputs are quantised too, with one scale for
    each row."""

    input_format = FP8_ROWS

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.dtype = torch.get_default_dtype()

    def matmul(self, x: Tensor | Fp8Rows) -> Tensor:
        if isinstance(x, Tensor):
            x = quantize_rows(x)
        return fp8_linear(x, self._weight, self.bias, self.dtype)
