"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467)."""

import torch
from torch import nn

from nanovllm.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32. Inputs are not modified.

    With a residual, returns the norm of x + residual. To get the sum as well, call
    ``LinearWeight.norm_matmul``.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, residual)[0]
