"""RMSNorm over all heads of a token, as in OLMo 2 (arXiv:2501.00656)."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.quantization.base import is_batch_invariant
from nanovllm.utils.distributed import get_tp_group
from nanovllm.utils.loader import check_shape, copy_weight
from nanovllm.utils.math import divide, next_power_of_2


def mean_of_halves(x: torch.Tensor) -> torch.Tensor:
    """Computes the mean over the last dimension: [N, width] -> [N, 1]. Adds one half to the other
    until one column is left, because the order in which torch.mean adds depends on N."""
    width = x.size(-1)
    x = F.pad(x, (0, next_power_of_2(width) - width))
    while x.size(-1) > 1:
        first, second = x.chunk(2, -1)
        x = first + second
    return x / width


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
        self.is_batch_invariant = is_batch_invariant()
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
        square = x32.square()
        mean = mean_of_halves(square) if self.is_batch_invariant else square.mean(-1, keepdim=True)
        mean_square = self.tp.all_reduce(mean) / self.tp.size
        return (x32 * torch.rsqrt(mean_square + self.eps) * self.weight).to(x.dtype).view(x.shape)
