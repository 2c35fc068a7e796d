"""Activations of the gated MLP."""

import torch
from torch import nn

from nanovllm.kernels.silu_and_mul import silu_and_mul


class SiluAndMul(nn.Module):
    """silu(gate) * up, with gate and up concatenated in the input: [N, 2 I] -> [N, I]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)
