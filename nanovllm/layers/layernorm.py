"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467)."""

import torch
from torch import nn

from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.utils.distributed import get_tp_group
from nanovllm.utils.loader import copy_weight
from nanovllm.utils.math import divide


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32. Inputs are not modified.

    With a residual, returns the norm of x + residual. To get the sum as well, call
    ``LinearWeight.norm_matmul``.

    Args:
        dtype: the weight's dtype. If it is fp32, the norm is rounded once, after it is multiplied
            by the weight; otherwise also before.
        offset: is added to the weight of a checkpoint. An fp32 weight keeps the sum exact enough.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        copy_weight(param, loaded_weight)
        if self.offset:
            param.add_(self.offset)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, residual)[0]


class AllHeadsRMSNorm(nn.Module):
    """RMSNorm over all of a token's query heads or key heads, [N, heads, head_dim], which are split
    over the tensor-parallel ranks. An fp32 weight [heads * head_dim]: see ``RMSNorm``.

    Args:
        num_heads: the heads of all ranks. With more ranks than heads, neighbouring ranks have
            copies of one.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.tp = eps, get_tp_group()
        self.num_parts = min(num_heads, self.tp.size)
        size = divide(num_heads, self.num_parts) * head_dim
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32))
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        part = self.tp.rank * self.num_parts // self.tp.size
        copy_weight(param, loaded_weight.tensor_split(self.num_parts)[part])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.flatten(1)
        if self.tp.size == 1:
            return rms_norm(heads.contiguous(), self.weight, self.eps, None)[0].view(x.shape)
        x32 = heads.float()
        mean_square = self.tp.all_reduce(x32.square().mean(-1, keepdim=True)) / self.tp.size
        return (x32 * torch.rsqrt(mean_square + self.eps) * self.weight).to(x.dtype).view(x.shape)
