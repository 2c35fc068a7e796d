"""Draws the next tokens from logits."""

import torch
from torch import nn


class Sampler(nn.Module):
    """Gumbel-max sampling: argmax of probabilities over exponential noise.

    p_i / E_i with E_i ~ Exp(1) is largest at i with probability p_i (the exponential race), so
    one argmax draws from the softmax with no sort, no cumulative sum and no host sync.
    """

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """logits [N, V]; temperatures fp32 [N], 0 for greedy, None if all are greedy.

        Returns int64 [N] token ids.
        """
        greedy = logits.argmax(-1)
        if temperatures is None:
            return greedy
        # Rows that are greedy keep temperature 1 here and are overruled below.
        scale = torch.where(temperatures == 0, 1.0, temperatures).unsqueeze(-1)
        probs = torch.softmax(logits.float() / scale, dim=-1)
        noise = torch.empty_like(probs).exponential_(generator=generator)
        # The noise can round to 0; its smallest normal stands in for it.
        noise.clamp_(min=torch.finfo(torch.float32).tiny)
        return torch.where(temperatures == 0, greedy, probs.div_(noise).argmax(-1))
