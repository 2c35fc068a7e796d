"""Activations of the gated MLP."""

import torch
from torch import nn

from nanovllm.quantization.base import PLAIN, InputFormat


class SiluAndMul(nn.Module):
    """silu(gate) * up, with gate and up concatenated in the input: [N, 2 I] -> [N, I].

    Attributes:
        function: computes it, in the format that the next linear layer takes.
    """

    name = "silu_and_mul"  # the function's field in InputFormat

    def __init__(self, output_format: InputFormat = PLAIN) -> None:
        super().__init__()
        self.function = getattr(output_format, self.name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class GeluTanhAndMul(SiluAndMul):
    """gelu(gate) * up, with the tanh approximation of GELU. Otherwise like ``SiluAndMul``."""

    name = "gelu_tanh_and_mul"


ACTIVATIONS = {"silu": SiluAndMul, "gelu_tanh": GeluTanhAndMul}  # by name in MLPSpec
