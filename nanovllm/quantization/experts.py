"""How the weights of experts are loaded, stored and multiplied."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.kernels.moe.experts import INVARIANT_OPS, ExpertWeights, experts_reference
from nanovllm.kernels.moe.gemv import experts_gemv
from nanovllm.kernels.moe.grouped import experts_grouped
from nanovllm.kernels.moe.mxfp4 import (
    BLOCK,
    dequantize_mxfp4,
    fill_mxfp4,
    num_groups,
    pack_mxfp4,
    pack_mxfp4_scales,
)
from nanovllm.kernels.moe.mxfp4_gemv import experts_gemv_mxfp4
from nanovllm.kernels.moe.route import MAX_UNSORTED_TOKENS, Routing
from nanovllm.quantization.base import FP8_METHODS, get_quantization_config, is_batch_invariant
from nanovllm.utils.distributed import TPGroup, get_tp_group
from nanovllm.utils.loader import check_shape, copy_weight
from nanovllm.utils.math import divide
from nanovllm.utils.triton_compat import use_triton

# Each kernel with the numbers of tokens that it is for. ``apply`` launches the first match.
KERNELS = ((range(1, MAX_UNSORTED_TOKENS + 1), experts_gemv), (range(sys.maxsize), experts_grouped))


def new_expert_weights(
    layer: nn.Module, limit: float | None, alpha: float, interleaved: bool, mxfp4: bool
) -> "UnquantizedExperts":
    """Creates the weights of the experts of a new layer, for the quantisation in use. The arguments
    are those of a MoESpec. MXFP4 weights are not quantised again."""
    weights_class, on_cpu = UnquantizedExperts, torch.get_default_device().type == "cpu"
    method = get_quantization_config().get("quant_method")
    if mxfp4 and not on_cpu:  # on a CPU, MXFP4 weights are dequantised when they are loaded
        weights_class = BatchInvariantMxfp4Experts if is_batch_invariant() else Mxfp4Experts
    elif method in FP8_METHODS and not mxfp4:
        weights_class = _fp8_class(method, on_cpu)
    elif method is not None and not mxfp4:
        raise ValueError(f"{method!r} quantisation of experts is not supported")
    elif is_batch_invariant():
        weights_class = BatchInvariantExperts
    return weights_class(layer, get_tp_group(), limit, alpha, interleaved)


def _fp8_class(method: str, on_cpu: bool) -> "type[UnquantizedExperts]":
    from nanovllm.quantization import fp8_experts

    if is_batch_invariant():
        return fp8_experts.RoundedToFp8Experts
    if on_cpu:
        return fp8_experts.DequantizedFp8Experts
    return fp8_experts.BlockFp8Experts if method == "fp8_groups" else fp8_experts.Fp8Experts


class UnquantizedExperts:
    """Weights in the model's own dtype: gate_up_proj [E, 2 I, hidden], the rows of gate, then those
    of up, and down_proj [E, hidden, I]. I is this rank's slice of the intermediate size.

    Args:
        layer: the module that the parameters belong to.
        tp: the ranks over which the intermediate dimension is split.
        limit, alpha, interleaved: as in a MoESpec.

    Attributes:
        kernels: the numbers of tokens and the kernel for them, in the order of preference.
    """

    kernels: tuple[tuple[range, Any], ...] = KERNELS

    def __init__(
        self, layer: nn.Module, tp: TPGroup, limit: float | None, alpha: float, interleaved: bool
    ) -> None:
        self.layer: Any = layer
        self.tp = tp
        self.limit, self.alpha, self.interleaved = limit, alpha, interleaved
        self.dtype = torch.get_default_dtype()
        # MXFP4 blocks and scales are separate tensors, but are dequantised together. This has, for
        # each parameter, a copy of the one that was loaded first, until the other is loaded:
        # {"blocks": ...} or {"scales": ...}.
        self._parts: dict[str, dict[str, Tensor]] = {}

    def create_parameters(
        self, num_experts: int, hidden_size: int, num_columns: int, bias: bool
    ) -> None:
        """Registers the parameters with the layer, without values.

        Args:
            num_columns: the intermediate size of an expert, over all ranks.
            bias: whether the experts have biases.
        """
        inner = divide(num_columns, self.tp.size)
        sizes = ("gate_up_proj", 2 * inner, hidden_size), ("down_proj", hidden_size, inner)
        for name, rows, width in sizes:
            self._create_weight(name, num_experts, rows, width)
            if bias:
                self._register(f"{name}_bias", torch.empty(num_experts, rows))

    def _create_weight(self, name: str, num_experts: int, rows: int, width: int) -> None:
        self._register(name, torch.empty(num_experts, rows, width))

    def _register(self, name: str, tensor: Tensor) -> Any:
        param = nn.Parameter(tensor, requires_grad=False)
        self.layer.register_parameter(name, param)
        return param

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
            self._check_part(name, param, tensor, shard_id)
            parts = self._parts.setdefault(name, {})
            if len(parts.keys() | {shard_id}) < 2:
                parts[shard_id] = tensor.clone()  # because the caller may reuse it
                return
            parts[shard_id] = tensor
            shard_id, tensor = None, dequantize_mxfp4(**self._parts.pop(name), dtype=self.dtype)
        elif self.interleaved and tensor.dim() == 3 and tensor.is_floating_point():
            tensor = tensor.transpose(1, 2)  # from [E, in, out]: see MoESpec
        self._store(name, param, tensor, shard_id, expert)
        self._parts.pop(name, None)  # replaced by a tensor in another format

    def incomplete(self) -> dict[str, str]:
        """Returns the MXFP4 tensors that wait for another before they are loaded, each with the
        other's name, such as {"down_proj_blocks": "down_proj_scales"}."""
        other = {"blocks": "scales", "scales": "blocks"}
        waiting = [(name, part) for name, parts in self._parts.items() for part in parts]
        return {f"{name}_{part}": f"{name}_{other[part]}" for name, part in waiting}

    def drop_incomplete(self) -> None:
        """Drops the tensors that wait for another."""
        self._parts.clear()

    def _check_part(self, name: str, param: nn.Parameter, tensor: Tensor, part: str) -> None:
        """Raises ValueError if MXFP4 blocks or scales do not fit the parameter."""
        num_experts, rows, width = param.shape
        if name == "gate_up_proj":
            rows *= self.tp.size
        else:
            width *= self.tp.size
        block_shape = [16] if part == "blocks" else []
        check_shape([num_experts, rows, width // BLOCK, *block_shape], tensor)
        _check_uint8(tensor)

    def _name(self, param: nn.Parameter) -> str:
        return next(name for name, own in self.layer.named_parameters() if own is param)

    def _store(self, name: str, param: Any, tensor: Tensor, *part: int | None) -> None:
        """Copies this rank's slice of a checkpoint tensor, as it is stored. ``part`` is the
        ``shard_id`` and the ``expert``."""
        self._copy(name, param.data, tensor, *part)

    def _copy(
        self, name: str, target: Tensor, tensor: Tensor, shard_id: int | None, expert: int | None
    ) -> None:
        """Copies this rank's slice of a checkpoint tensor: see ``_slice``."""
        target, tensor = self._slice(name, target, tensor, shard_id, expert)
        if target.dtype is torch.uint8:
            target.copy_(tensor)
        else:
            copy_weight(target, tensor)

    def _slice(
        self, name: str, target: Tensor, tensor: Tensor, shard_id: int | None, expert: int | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the part of a parameter that a checkpoint tensor fills, and this rank's slice of
        the tensor.

        Args:
            name: of the parameter.
            target: of the parameter's shape; the last dimensions may be those of blocks or scales
                instead.
            tensor: has the shape of ``target`` with the intermediate dimension of all ranks, or
                the part of it for ``expert`` and ``shard_id``.
        """
        # The intermediate dimension is axis 2 of [E, 2, I, hidden] and of [E, hidden, I]. Biases
        # are [E, 2, I] and [E, hidden].
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
        return target, tensor

    def apply(self, x: Tensor, routing: Routing, residual: Tensor | None) -> Tensor:
        """Computes the weighted sum of the experts' outputs [N, hidden], plus the residual unless
        it is None."""
        kernel = experts_reference
        if use_triton(x):
            kernel = next(kernel for rows, kernel in self.kernels if len(x) in rows)
        return kernel(x, self._experts, routing, residual)

    @property
    def _experts(self) -> ExpertWeights:
        return self._with_biases(self.layer.gate_up_proj, self.layer.down_proj)

    def _with_biases(self, gate_up: Tensor, down: Tensor, *scales: Tensor) -> ExpertWeights:
        biases = [
            getattr(self.layer, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj")
        ]
        if self.tp.rank > 0:  # the bias of down_proj is added once, not once per rank
            biases[1] = None
        return ExpertWeights(gate_up, down, biases[0], biases[1], self.limit, self.alpha, *scales)


def _check_uint8(tensor: Tensor) -> None:
    if tensor.dtype is not torch.uint8:
        raise ValueError(f"dtype {tensor.dtype} is not supported, MXFP4 weights are uint8")


class BatchInvariantExperts(UnquantizedExperts):
    """Computes each token's result with the same bits whatever the other tokens are. All tiles of
    ``experts_grouped`` add in the same order."""

    kernels = KERNELS[1:]

    def apply(self, x: Tensor, routing: Routing, residual: Tensor | None) -> Tensor:
        if use_triton(x):
            return super().apply(x, routing, residual)
        return experts_reference(x, self._experts, routing, residual, INVARIANT_OPS)


class Mxfp4Experts(UnquantizedExperts):
    """Weights that stay in MXFP4, packed, and are dequantised in the kernels: see
    ``kernels/moe/mxfp4.py``. The parameters are gate_up_proj_blocks, gate_up_proj_scales,
    down_proj_blocks and down_proj_scales, and biases as those of UnquantizedExperts."""

    kernels: tuple[tuple[range, Any], ...] = (
        (range(1, MAX_UNSORTED_TOKENS + 1), experts_gemv_mxfp4),
        *KERNELS[1:],
    )

    def _create_weight(self, name: str, num_experts: int, rows: int, width: int) -> None:
        if width % BLOCK:
            raise ValueError(
                f"MXFP4 weights need sizes that are multiples of {BLOCK}, but on a rank {name} has "
                f"{width} columns of each expert"
            )
        groups = num_experts, num_groups(width), rows
        words = torch.empty(*groups, 32, dtype=torch.int16)
        scales = torch.empty(groups, dtype=torch.int32)
        for part, tensor in (("blocks", words), ("scales", scales)):
            param = self._register(f"{name}_{part}", tensor)
            param.num_blocks, param.fill_with_dummy_weights = width // BLOCK, fill_mxfp4

    def load(
        self, param: Any, tensor: Tensor, shard_id: int | str | None, expert: int | None
    ) -> None:
        if param.is_floating_point():
            super().load(param, tensor, shard_id, expert)
            return
        _check_uint8(tensor)
        name, part = self._name(param).rsplit("_", 1)
        pack, block_shape = (pack_mxfp4, [16]) if part == "blocks" else (pack_mxfp4_scales, [])
        num_experts, _, rows = param.shape[:3]
        own = tensor.new_empty(num_experts, rows, param.num_blocks, *block_shape)
        self._copy(name, own, tensor, None, None)
        for target, values in zip(param.data, own.to(param.device), strict=True):
            target.copy_(pack(values))

    @property
    def _experts(self) -> ExpertWeights:
        layer = self.layer
        return self._with_biases(
            layer.gate_up_proj_blocks,
            layer.down_proj_blocks,
            layer.gate_up_proj_scales,
            layer.down_proj_scales,
        )


class BatchInvariantMxfp4Experts(Mxfp4Experts):
    """All tiles of ``experts_grouped`` add in the same order."""

    kernels = KERNELS[1:]
