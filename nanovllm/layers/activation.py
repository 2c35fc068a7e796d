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

    @property
    def is_plain_swiglu(self) -> bool:
        """Whether the kernels that fuse SwiGLU with a matmul compute the same."""
        return self.output_format is PLAIN

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_format.silu_and_mul(x)


class GeluTanhAndMul(SiluAndMul):
    """gelu(gate) * up, with the tanh approximation of GELU. Otherwise like ``SiluAndMul``."""

    is_plain_swiglu = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_format.gelu_tanh_and_mul(x)


ACTIVATIONS = {"silu": SiluAndMul, "gelu_tanh": GeluTanhAndMul}  # by name in MLPSpec
