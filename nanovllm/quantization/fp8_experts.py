"""Weights of experts in FP8 (e4m3), with scales of rows or of blocks: see ``ExpertWeights``.

As in linear layers (``fp8.py``), weights are quantised as they are loaded, unless the checkpoint
has them in FP8, and each rank has its part of the same FP8 weights.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.fp8 import (
    FP8,
    GROUP,
    Fp8Rows,
    dequantize,
    quantize,
    quantize_blocks,
    unpack_rows,
)
from nanovllm.kernels.moe.experts import ExpertWeights
from nanovllm.quantization.experts import BatchInvariantExperts, UnquantizedExperts
from nanovllm.quantization.fp8 import FP8_MATMUL_CAPABILITY


class DequantizedFp8Experts(UnquantizedExperts):
    """Weights that are quantised and dequantised when they are loaded, for CPUs and for batch
    invariance."""

    def _store(self, name: str, param: Any, tensor: Tensor, *part: int | None) -> None:
        if not name.endswith("_bias") and tensor.is_floating_point():  # else refused
            # One expert after the other, because FP8 numbers are computed in fp32.
            experts = (tensor if tensor.dim() == 3 else tensor[None]).unbind()
            rounded = [dequantize(quantize(x.to(param.device)), self.dtype) for x in experts]
            tensor = torch.stack(rounded).view(tensor.shape)
        super()._store(name, param, tensor, *part)


class RoundedToFp8Experts(DequantizedFp8Experts, BatchInvariantExperts):
    """BatchInvariantExperts in the model's dtype, whose values are rounded to FP8 at load."""


class Fp8Experts(UnquantizedExperts):
    """The parameters gate_up_proj and down_proj in FP8, and the buffers gate_up_proj_scale and
    down_proj_scale: fp32 [E, 2 I] and [E, hidden]. Biases are as those of UnquantizedExperts."""

    has_blocks = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        device = torch.get_default_device()
        self.multiplies = (  # else weights are converted in the kernels
            device.type == "cpu"
            or torch.cuda.get_device_capability(device) >= FP8_MATMUL_CAPABILITY
        )

    def _create_weight(self, name: str, num_experts: int, rows: int, width: int) -> None:
        codes = torch.empty(num_experts, rows, width, dtype=FP8)
        self._register(name, codes).fill_with_dummy_weights = self._fill_with_dummy_weights
        # Not a parameter, because checkpoints have no tensor for it.
        shape: tuple[int, ...] = (num_experts, rows)
        if self.has_blocks:
            # Rows of gate and up must not alternate within a block.
            assert rows % GROUP == width % GROUP == 0 and not self.interleaved
            shape = (num_experts, rows // GROUP, width // GROUP)
        self.layer.register_buffer(f"{name}_scale", torch.empty(shape, dtype=torch.float32))

    def _store(self, name: str, param: Any, tensor: Tensor, *part: int | None) -> None:
        if name.endswith("_bias"):
            super()._store(name, param, tensor, *part)
            return
        num_groups = 0
        if tensor.dtype is torch.uint8:  # packed rows of a checkpoint in FP8
            width = param.size(2) * (self.tp.size if name == "down_proj" else 1)
            num_groups = width // GROUP if self.has_blocks else 1
        elif not tensor.is_floating_point():
            raise ValueError(f"dtype {tensor.dtype} is not supported (quantised checkpoint?)")
        self._slice(name, param.data, tensor[..., 4 * num_groups :], *part)  # checks the shape
        codes, scales = self._unpack(tensor, num_groups) if num_groups else self._quantize(tensor)
        self._copy(name, param.data, codes, *part)
        # Scales of rows are split over the ranks as biases are.
        like = name if self.has_blocks else f"{name}_bias"
        self._copy(like, self.layer.get_buffer(f"{name}_scale"), scales, *part)

    def _unpack(self, packed: Tensor, num_groups: int) -> Fp8Rows:
        codes, scales = unpack_rows(packed.to(self.layer.down_proj.device), num_groups)
        return Fp8Rows(codes, scales[..., ::GROUP, :] if self.has_blocks else scales.squeeze(-1))

    def _quantize(self, tensor: Tensor) -> Fp8Rows:
        """Quantises a whole tensor of a checkpoint: one expert's, or that of all experts one by
        one, because FP8 numbers are computed in fp32."""
        if tensor.dim() == 3:
            return Fp8Rows(*map(torch.stack, zip(*map(self._quantize, tensor), strict=True)))
        tensor = tensor.to(self.layer.down_proj.device)
        return quantize_blocks(tensor) if self.has_blocks else quantize(tensor)

    def _fill_with_dummy_weights(self, param: Any, generator: torch.Generator) -> None:
        scales = self.layer.get_buffer(f"{self._name(param)}_scale")
        for target in map(Fp8Rows, param.data, scales):  # one expert's
            values = torch.empty(param.shape[1:], device=param.device)
            rows = self._quantize(values.normal_(0, 0.02, generator=generator))
            target.codes.copy_(rows.codes)
            target.scales.copy_(rows.scales)

    @property
    def _experts(self) -> ExpertWeights:
        layer = self.layer
        weights = layer.gate_up_proj, layer.down_proj
        if not self.multiplies:
            weights = tuple(weight.view(torch.uint8) for weight in weights)
        return self._with_biases(*weights, layer.gate_up_proj_scale, layer.down_proj_scale)


class BlockFp8Experts(Fp8Experts):
    """The same, but the scales are those of blocks of GROUP x GROUP elements."""

    has_blocks = True
