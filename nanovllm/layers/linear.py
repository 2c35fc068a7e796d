"""Linear layers split over the tensor-parallel ranks (Megatron-LM, arXiv:1909.08053).

A weight is [output, input]. Splitting the output needs no communication; splitting the input
leaves partial sums, added by an all-reduce. Each parameter's ``weight_loader`` takes a whole
checkpoint tensor and keeps this rank's part.
"""

from collections.abc import Sequence

import torch
from torch import nn

from nanovllm.kernels.gemm.linear import linear, linear_add, norm_linear, pack_weight
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
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None
        for param in self.parameters():
            param.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """The whole tensor; other layers take this rank's part of it."""
        copy_weight(param.data, loaded_weight)

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

    def _shard(self, loaded_weight: torch.Tensor, dim: int, num_parts: int) -> torch.Tensor:
        """This rank's equal part of a checkpoint tensor; of fewer parts than ranks, neighbours
        have the same one."""
        size = divide(loaded_weight.size(dim), num_parts)
        return loaded_weight.narrow(dim, self.tp.rank * num_parts // self.tp.size * size, size)


class ReplicatedLinear(LinearBase):
    """The whole matrix on every rank."""


class ColumnParallelLinear(LinearBase):
    """Output features split over the ranks; takes a whole x, gives this rank's features.

    Attributes:
        shards: by shard id, where a checkpoint tensor goes: its first row in the parameter, how
            many there are, and into how many parts the ranks split the tensor.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        tp_size = get_tp_group().size
        num_rows = divide(output_size, tp_size)
        super().__init__(input_size, num_rows, bias)
        self.shards: dict[str | int | None, tuple[int, int, int]] = {None: (0, num_rows, tp_size)}

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: str | int | None = None
    ) -> None:
        start, num_rows, num_parts = self.shards[shard_id]
        shard = self._shard(loaded_weight, 0, num_parts)
        copy_weight(param.data.narrow(0, start, num_rows), shard)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel matrices of one input as one product; shard ids 0, 1, ..."""

    def __init__(self, input_size: int, output_sizes: Sequence[int], bias: bool = False) -> None:
        super().__init__(input_size, sum(output_sizes), bias)
        start, self.shards = 0, {}
        for shard_id, size in enumerate(output_sizes):
            num_rows = divide(size, self.tp.size)
            self.shards[shard_id] = start, num_rows, self.tp.size
            start += num_rows


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as one product, heads split over the ranks.

    Where ranks are more than key-value heads, each has a copy of the one that its queries use.
    The output is q, k and v side by side, [..., (num_heads + 2 num_kv_heads) * head_size] of this
    rank; shard ids "q", "k", "v".
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
        self.num_heads = divide(total_num_heads, tp_size)
        self.num_kv_heads = heads_per_rank(total_num_kv_heads, tp_size)
        q_size, kv_size = self.num_heads * head_size, self.num_kv_heads * head_size
        super().__init__(hidden_size, (q_size + 2 * kv_size) * tp_size, bias)
        kv_parts = min(tp_size, total_num_kv_heads)
        self.shards = {
            "q": (0, q_size, tp_size),
            "k": (q_size, kv_size, kv_parts),
            "v": (q_size + kv_size, kv_size, kv_parts),
        }


class RowParallelLinear(LinearBase):
    """Input features split over the ranks; the partial products are summed by an all-reduce."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__(divide(input_size, get_tp_group().size), output_size, bias)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        is_bias = loaded_weight.dim() == 1
        part = loaded_weight if is_bias else self._shard(loaded_weight, 1, self.tp.size)
        copy_weight(param.data, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The bias is added once, not once per rank.
        y = linear(x, self.weight, self.bias if self.tp.rank == 0 else None)
        return self.tp.all_reduce(y)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """self(x) and the residual that it is to be added to, for ``after_norm``; or their sum and
        None. The residual may be written over."""
        if self.tp.size > 1:
            return self(x), residual
        return linear_add(x, self.weight, self.bias, residual)
