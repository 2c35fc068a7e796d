"""Draws the next tokens from logits."""

import torch
from torch import nn

from nanovllm.kernels.sampling import sample


class Sampler(nn.Module):
    """Temperature, then Gumbel-max; temperature 0 is argmax."""

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """logits [N, V]; temperatures fp32 [N], 0 for greedy, None if all are greedy.

        Returns int64 [N] token ids.
        """
        if temperatures is None:
            return logits.argmax(-1)
        return sample(logits, temperatures, generator)
