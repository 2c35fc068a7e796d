"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467)."""

import torch
from torch import nn

from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.utils.loader import copy_weight


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
