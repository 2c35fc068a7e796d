"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from typing import Any

import torch
from torch import nn

from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.utils.loader import copy_weight


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32. Inputs are not modified.

    With a residual, returns the norm of x + residual, where x may also be a ``RankPart``. To get
    the sum as well, call ``LinearWeight.norm_matmul``.

    Args:
        dtype: the weight's dtype. With an fp32 weight, the result is rounded once, after the
            multiplication by the weight. Otherwise it is also rounded before.
        offset: added to the checkpoint's weight when it is loaded. The weight should then be fp32,
            because the sum loses digits in bf16.
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

    def forward(self, x: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, residual)[0]
