"""RMSNorm over all heads of a token, as in OLMo 2 (arXiv:2501.00656)."""

import torch
from torch import nn

from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.utils.distributed import get_tp_group
from nanovllm.utils.loader import check_shape, copy_weight
from nanovllm.utils.math import divide


class AllHeadsRMSNorm(nn.Module):
    """One RMSNorm over all query heads, or all key heads, of a token.

    The input is [N, heads, head_dim] with the heads of this rank. The mean square is computed over
    the heads of all ranks. The weight is fp32 [heads * head_dim].

    Args:
        num_heads: total number of heads. If there are more ranks than heads, neighbouring ranks
            hold copies of the same head.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.tp = eps, get_tp_group()
        self.num_parts = min(num_heads, self.tp.size)
        size = divide(num_heads, self.num_parts) * head_dim
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32))
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        check_shape((self.num_parts * len(param),), loaded_weight)
        part = self.tp.rank * self.num_parts // self.tp.size
        copy_weight(param, loaded_weight.tensor_split(self.num_parts)[part])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.flatten(1)
        if self.tp.size == 1:
            return rms_norm(heads.contiguous(), self.weight, self.eps, None)[0].view(x.shape)
        x32 = heads.float()
        mean_square = self.tp.all_reduce(x32.square().mean(-1, keepdim=True)) / self.tp.size
        return (x32 * torch.rsqrt(mean_square + self.eps) * self.weight).to(x.dtype).view(x.shape)
