"""How the weights of experts are loaded, stored and multiplied."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.kernels.moe.few import mix_few
from nanovllm.kernels.moe.grouped import mix_grouped
from nanovllm.kernels.moe.mix import Experts, mix_reference
from nanovllm.kernels.moe.mxfp4 import (
    BLOCK,
    dequantise_mxfp4,
    fill_mxfp4,
    num_groups,
    pack_mxfp4,
    pack_mxfp4_scales,
)
from nanovllm.kernels.moe.route import MAX_UNSORTED_TOKENS, Routing
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import check_shape, copy_weight
from nanovllm.utils.math import divide
from nanovllm.utils.triton_compat import use_triton

# The kernels and the numbers of tokens that they are for. The first match is launched.
KERNELS = ((range(1, MAX_UNSORTED_TOKENS + 1), mix_few), (range(sys.maxsize), mix_grouped))


class UnquantizedExperts:
    """Weights in the model's own dtype: gate_up_proj [E, 2 I, hidden], the rows of gate, then those
    of up, and down_proj [E, hidden, I]. I is this rank's slice of the intermediate size.

    Args:
        layer: the module that the parameters belong to.
        tp: the ranks over which the intermediate dimension is split.
        limit, alpha, interleaved: as in a MoESpec.
    """

    kernels: tuple[tuple[range, Any], ...] = KERNELS

    def __init__(
        self, layer: nn.Module, tp: TPGroup, limit: float | None, alpha: float, interleaved: bool
    ) -> None:
        self.layer: Any = layer
        self.tp = tp
        self.limit, self.alpha, self.interleaved = limit, alpha, interleaved
        # By parameter, the MXFP4 blocks or scales that wait for their counterpart.
        self._parts: dict[str, dict[str, Tensor]] = {}

    def create_parameters(
        self, num_experts: int, hidden_size: int, num_columns: int, bias: bool
    ) -> None:
        """Registers the parameters with the layer, without values."""
        inner = divide(num_columns, self.tp.size)
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (num_experts, 2 * inner, hidden_size),
            "down_proj": (num_experts, hidden_size, inner),
        }
        if bias:
            shapes |= {f"{name}_bias": shape[:-1] for name, shape in shapes.items()}
        for name, shape in shapes.items():
            param = nn.Parameter(torch.empty(shape), requires_grad=False)
            self.layer.register_parameter(name, param)

    def load(
        self, param: nn.Parameter, tensor: Tensor, shard_id: int | str | None, expert: int | None
    ) -> None:
        """Copies this rank's slice of a checkpoint tensor: see
        ``layers.moe.Experts.weight_loader``.

        Raises:
            ValueError: the tensor has another shape than the model needs, or an unknown dtype.
        """
        name = self._name(param)
        if isinstance(shard_id, str):
            parts = self._parts.setdefault(name, {})
            parts[shard_id] = tensor
            if len(parts) < 2:
                return
            shard_id, tensor = None, dequantise_mxfp4(**self._parts.pop(name), dtype=param.dtype)
        elif self.interleaved and tensor.dim() == 3 and tensor.is_floating_point():
            tensor = tensor.transpose(1, 2)
        self._copy(name, param.data, tensor, shard_id, expert)

    def _name(self, param: nn.Parameter) -> str:
        return next(name for name, own in self.layer.named_parameters() if own is param)

    def _copy(
        self, name: str, target: Tensor, tensor: Tensor, shard_id: int | None, expert: int | None
    ) -> None:
        """Copies this rank's slice of a tensor that has a parameter's shape, but for the ranks."""
        # [E, 2, I, hidden] or [E, hidden, I], or the bias: [E, 2, I] or [E, hidden].
        axis, is_gate_up = 2, name.startswith("gate_up_proj")
        if is_gate_up:
            target = target.unflatten(1, (2, -1))
        if expert is not None:
            target, axis = target[expert], axis - 1
        if shard_id is not None:
            target, axis = target.select(axis - 1, shard_id), axis - 1
        needed = list(target.shape)
        if name != "down_proj_bias":  # every rank has all of it
            needed[axis] *= self.tp.size
        if is_gate_up and shard_id is None:
            check_shape([needed[0], 2 * needed[2], *needed[3:]], tensor)
            if self.interleaved:
                tensor = tensor.unflatten(1, (-1, 2)).transpose(1, 2)
            else:
                tensor = tensor.unflatten(1, (2, -1))
        check_shape(needed, tensor)
        if name != "down_proj_bias":
            size = target.size(axis)
            tensor = tensor.narrow(axis, self.tp.rank * size, size)
        if target.dtype is torch.uint8:
            target.copy_(tensor)
        else:
            copy_weight(target, tensor)

    def mix(self, x: Tensor, routing: Routing, residual: Tensor | None) -> Tensor:
        """Computes the weighted sum of the experts' outputs [N, hidden], plus the residual unless
        it is None."""
        kernel = mix_reference
        if use_triton(x):
            kernel = next(kernel for rows, kernel in self.kernels if len(x) in rows)
        return kernel(x, self._experts, routing, residual)

    @property
    def _experts(self) -> Experts:
        return self._with_biases(self.layer.gate_up_proj, self.layer.down_proj)

    def _with_biases(self, gate_up: Tensor, down: Tensor, *scales: Tensor) -> Experts:
        biases = [
            getattr(self.layer, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj")
        ]
        if self.tp.rank > 0:  # the bias of down_proj is added once, not once per rank
            biases[1] = None
        return Experts(gate_up, down, biases[0], biases[1], self.limit, self.alpha, *scales)


class Mxfp4Experts(UnquantizedExperts):
    """Weights that stay in MXFP4, packed, and are dequantised in the kernels: see
    ``kernels/moe/mxfp4.py`` and ``kernels.moe.mix.Experts``."""

    kernels = KERNELS[1:]  # GEMVs on the CUDA cores would take longer to dequantise

    def create_parameters(
        self, num_experts: int, hidden_size: int, num_columns: int, bias: bool
    ) -> None:
        self._shapes: dict[str, tuple[int, int, int]] = {}  # of this rank's unpacked weights
        inner = divide(num_columns, self.tp.size)
        if hidden_size % BLOCK or inner % BLOCK:
            raise ValueError(
                f"MXFP4 weights need sizes that are multiples of {BLOCK}, but there are "
                f"{hidden_size} hidden features and {inner} columns of each expert on a rank"
            )
        for name, rows, width in (
            ("gate_up_proj", 2 * inner, hidden_size),
            ("down_proj", hidden_size, inner),
        ):
            self._shapes[name] = num_experts, rows, width
            groups = (num_experts, num_groups(width), rows)
            tensors = {
                f"{name}_blocks": torch.empty(*groups, 32, dtype=torch.int16),
                f"{name}_scales": torch.empty(groups, dtype=torch.int32),
            }
            if bias:
                tensors[f"{name}_bias"] = torch.empty(num_experts, rows)
            for tensor_name, tensor in tensors.items():
                param: Any = nn.Parameter(tensor, requires_grad=False)
                if not param.is_floating_point():
                    param.fill_with_dummy_weights = fill_mxfp4
                self.layer.register_parameter(tensor_name, param)

    def load(
        self, param: nn.Parameter, tensor: Tensor, shard_id: int | str | None, expert: int | None
    ) -> None:
        if param.is_floating_point():
            super().load(param, tensor, shard_id, expert)
            return
        if tensor.dtype is not torch.uint8:
            raise ValueError(f"dtype {tensor.dtype} is not supported, MXFP4 weights are uint8")
        name, part = self._name(param).rsplit("_", 1)
        num_experts, rows, width = self._shapes[name]
        bytes_of_block = (16,) if part == "blocks" else ()
        own = tensor.new_empty(num_experts, rows, width // BLOCK, *bytes_of_block)
        self._copy(name, own, tensor, None, None)
        pack = pack_mxfp4 if part == "blocks" else pack_mxfp4_scales
        for target, values in zip(param.data, own.to(param.device), strict=True):
            target.copy_(pack(values))

    @property
    def _experts(self) -> Experts:
        layer = self.layer
        return self._with_biases(
            layer.gate_up_proj_blocks,
            layer.down_proj_blocks,
            layer.gate_up_proj_scales,
            layer.down_proj_scales,
        )
