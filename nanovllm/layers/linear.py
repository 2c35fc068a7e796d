"""Linear layers split over the tensor-parallel ranks (Megatron-LM, arXiv:1909.08053).

A weight is [output, input]. Splitting the output needs no communication; splitting the input
leaves partial sums, added by an all-reduce. Each parameter's ``weight_loader`` takes a whole
checkpoint tensor and keeps this rank's part.
"""

from collections.abc import Sequence

import torch
from torch import nn

from nanovllm.kernels.linear import linear, norm_linear, pack_weight
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.utils.distributed import get_tp_group
from nanovllm.utils.loader import copy_weight
from nanovllm.utils.math import divide, heads_per_rank


class LinearBase(nn.Module):
    """y = x W^T + b over [..., input_size] -> [..., output_size], sizes of this rank's part."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__()
        self.tp = get_tp_group()
        self.weight = nn.Parameter(torch.empty(output_size, input_size))
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        if bias:
            self.bias = nn.Parameter(torch.empty(output_size))
            self.bias.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        else:
            self.register_parameter("bias", None)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        raise NotImplementedError

    def pack(self) -> None:
        """Once loaded: puts the weight into the device's fastest layout."""
        self.weight = nn.Parameter(pack_weight(self.weight.data), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def after_norm(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        activation: SiluAndMul | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """activation(self(norm(x + residual))) and x + residual, in fewer kernels; without a
        residual x is all there is."""
        silu = activation is not None
        return norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, silu)

    def _shard(
        self, loaded_weight: torch.Tensor, dim: int, num_parts: int | None = None
    ) -> torch.Tensor:
        """This rank's equal part of a checkpoint tensor; of fewer parts than ranks, neighbours
        have the same one."""
        num_parts = num_parts or self.tp.size
        size = divide(loaded_weight.size(dim), num_parts)
        return loaded_weight.narrow(dim, self.tp.rank * num_parts // self.tp.size * size, size)


class ReplicatedLinear(LinearBase):
    """The whole matrix on every rank."""

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        copy_weight(param.data, loaded_weight)


class ColumnParallelLinear(LinearBase):
    """Output features split over the ranks; takes a whole x, gives this rank's features."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__(input_size, divide(output_size, get_tp_group().size), bias)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        copy_weight(param.data, self._shard(loaded_weight, 0))


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel matrices of one input as one product; shard ids 0, 1, ..."""

    def __init__(self, input_size: int, output_sizes: Sequence[int], bias: bool = False) -> None:
        self.output_sizes = [divide(size, get_tp_group().size) for size in output_sizes]
        super().__init__(input_size, sum(output_sizes), bias)

    def weight_loader(  # type: ignore[override]
        self, param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: int
    ) -> None:
        start = sum(self.output_sizes[:shard_id])
        target = param.data.narrow(0, start, self.output_sizes[shard_id])
        copy_weight(target, self._shard(loaded_weight, 0))


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as one product, heads split over the ranks.

    Where ranks are more than key-value heads, each has a copy of the one that its queries use.
    The output is q, k and v side by side, [..., (heads + 2 kv_heads) * head_size] of this rank;
    shard ids "q", "k", "v".
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = False,
    ) -> None:
        total_num_kv_heads = total_num_kv_heads or total_num_heads
        tp_size = get_tp_group().size
        q_size = divide(total_num_heads, tp_size) * head_size
        kv_size = heads_per_rank(total_num_kv_heads, tp_size) * head_size
        self.num_parts = {"q": tp_size, "k": min(tp_size, total_num_kv_heads)}
        self.num_parts["v"] = self.num_parts["k"]
        self.shards = {
            "q": (0, q_size),
            "k": (q_size, kv_size),
            "v": (q_size + kv_size, kv_size),
        }
        super().__init__(hidden_size, (q_size + 2 * kv_size) * tp_size, bias)

    def weight_loader(  # type: ignore[override]
        self, param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: str
    ) -> None:
        target = param.data.narrow(0, *self.shards[shard_id])
        copy_weight(target, self._shard(loaded_weight, 0, self.num_parts[shard_id]))


class RowParallelLinear(LinearBase):
    """Input features split over the ranks; the partial products are summed by an all-reduce."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__(divide(input_size, get_tp_group().size), output_size, bias)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        is_bias = loaded_weight.dim() == 1
        copy_weight(param.data, loaded_weight if is_bias else self._shard(loaded_weight, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The bias is added once, not once per rank.
        y = linear(x, self.weight, self.bias if self.tp.rank == 0 else None)
        return self.tp.all_reduce(y)
