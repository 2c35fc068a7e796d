"""Activations of the gated MLP."""

import torch
from torch import nn

from nanovllm.quantization.base import PLAIN, InputFormat


class SiluAndMul(nn.Module):
    """silu(gate) * up, with gate and up concatenated in the input: [N, 2 I] -> [N, I]. The result
    is in the format that the next linear layer takes."""

    def __init__(self, output_format: InputFormat = PLAIN) -> None:
        super().__init__()
        self.output_format = output_format

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_format.silu_and_mul(x)
