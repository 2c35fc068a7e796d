"""Linear layers split over the tensor-parallel ranks (Megatron-LM, arXiv:1909.08053).

A weight is [output, input]. Splitting the output needs no communication. Splitting the input leaves
partial sums, which an all-reduce adds. Each parameter's ``weight_loader`` takes a whole checkpoint
tensor and keeps this rank's shard. A ``LinearWeight`` stores the weight and chooses the kernels.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from nanovllm.quantization import new_linear_weight
from nanovllm.quantization.base import Shard
from nanovllm.utils.distributed import RankPart, get_tp_group
from nanovllm.utils.loader import check_shape
from nanovllm.utils.math import divide, heads_per_rank


class LinearBase(nn.Module):
    """y = x W^T + b: [..., input_size] -> [..., output_size]. The sizes are those of this rank.

    Attributes:
        shards: maps each shard id to a Shard: the part of the checkpoint tensor that this rank
            stores, and its rows in this rank's weight.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__()
        self.tp = get_tp_group()
        self.linear_weight = new_linear_weight(self)
        self.linear_weight.create_parameters(input_size, output_size)
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None
        self.linear_weight.bias = self.bias
        self.shards: dict[str | int | None, Shard] = {None: Shard()}
        for param in self.parameters():
            param.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: str | int | None = None
    ) -> None:
        """Copies this rank's shard of a whole checkpoint tensor into a parameter of the layer."""
        self.linear_weight.load(param, loaded_weight, self.shards[shard_id])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_weight.matmul(x)


class ReplicatedLinear(LinearBase):
    """The whole matrix on every rank."""


class ColumnParallelLinear(LinearBase):
    """Splits the output features over the ranks. Takes all input features and returns this rank's
    output features."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        tp_size = get_tp_group().size
        num_rows = divide(output_size, tp_size)
        super().__init__(input_size, num_rows, bias)
        self._split({None: (num_rows, tp_size)})

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: str | int | None = None
    ) -> None:
        if shard_id in self.shards:
            super().weight_loader(param, loaded_weight, shard_id)
            return
        # The checkpoint tensor has all shards, one above the other.
        sizes = [(s.rows.stop - s.rows.start) * s.num_parts for s in self.shards.values()]
        check_shape((sum(sizes), *loaded_weight.shape[1:]), loaded_weight)
        for shard, part in zip(self.shards, loaded_weight.split(sizes), strict=True):
            self.weight_loader(param, part, shard)

    def _split(self, sizes: dict[str | int | None, tuple[int, int]]) -> None:
        """Sets ``shards``, which lie one above the other in this rank's weight.

        Args:
            sizes: for each shard id, the number of rows, and the number of parts into which the
                checkpoint tensor is split. With fewer parts than ranks, neighbouring ranks have the
                same part.
        """
        start, self.shards = 0, {}
        for shard_id, (num_rows, num_parts) in sizes.items():
            part = self.tp.rank * num_parts // self.tp.size
            self.shards[shard_id] = Shard(slice(start, start + num_rows), 0, part, num_parts)
            start += num_rows


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel matrices with the same input as one matmul. Shard ids: 0, 1, ..., and
    None for all."""

    def __init__(self, input_size: int, output_sizes: Sequence[int], bias: bool = False) -> None:
        super().__init__(input_size, sum(output_sizes), bias)
        tp_size = self.tp.size
        self._split({i: (divide(size, tp_size), tp_size) for i, size in enumerate(output_sizes)})


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as one matmul, with the heads split over the ranks.

    With more ranks than key-value heads, each rank has a copy of the head that its queries use.
    The output is q, k and v concatenated, [..., (num_heads + 2 num_kv_heads) * head_size], with the
    heads of this rank. The shard ids are "q", "k" and "v", and None for all three.

    Args:
        head_order: how to reorder the rows of each query and key head of a checkpoint: row i of a
            head is the checkpoint's row ``head_order[i]`` (see ``RopeConfig.head_order``). None
            keeps the order.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = False,
        head_order: Sequence[int] | None = None,
    ) -> None:
        total_num_kv_heads = total_num_kv_heads or total_num_heads
        tp_size = get_tp_group().size
        self.num_heads = divide(total_num_heads, tp_size)
        self.num_kv_heads = heads_per_rank(total_num_kv_heads, tp_size)
        q_size, kv_size = self.num_heads * head_size, self.num_kv_heads * head_size
        super().__init__(hidden_size, (q_size + 2 * kv_size) * tp_size, bias)
        # On the layer's device, so that loading a tensor from there does not wait for the host.
        self.head_order = None if head_order is None else torch.tensor(head_order)
        kv = kv_size, min(tp_size, total_num_kv_heads)
        self._split({"q": (q_size, tp_size), "k": kv, "v": kv})

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: str | int | None = None
    ) -> None:
        if self.head_order is not None and shard_id in ("q", "k"):
            num_heads = divide(loaded_weight.size(0), len(self.head_order))
            heads = loaded_weight.unflatten(0, (num_heads, -1))
            loaded_weight = heads[:, self.head_order.to(heads.device)].flatten(0, 1)
        super().weight_loader(param, loaded_weight, shard_id)


class RowParallelLinear(LinearBase):
    """Splits the input features over the ranks. An all-reduce adds the partial sums."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__(divide(input_size, get_tp_group().size), output_size, bias)
        self.shards = {None: Shard(dim=1, part=self.tp.rank, num_parts=self.tp.size)}
        if self.tp.rank > 0:  # the bias is added once, not once per rank
            self.linear_weight.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(self.linear_weight.matmul(x))

    def forward_add(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor | RankPart, torch.Tensor | None]:
        """Computes transform(self(x)), and adds the residual if a fused kernel can.

        Args:
            transform: None for the identity. Otherwise no kernel adds the residual.

        Returns:
            (result + residual, None), in which case the residual may be overwritten. Otherwise
            (result, residual), which the next ``LinearWeight.norm_matmul`` adds. The former may be
            a ``RankPart``, or parts of a sum as ``LinearWeight.matmul_add`` returns them.
        """
        if transform is not None:
            return transform(self(x)), residual
        if self.tp.size > 1:
            return self.tp.all_reduce_before_norm(self.linear_weight.matmul(x)), residual
        return self.linear_weight.matmul_add(x, residual)
