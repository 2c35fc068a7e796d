"""Samples the next tokens from logits."""

import torch
from torch import nn

from nanovllm.kernels.sampling.pipeline import SamplingInputs, sample_with_logprobs


class Sampler(nn.Module):
    """Applies masks, biases and penalties, then samples with temperature and truncation. With
    several ranks, ``ParallelSampler`` takes its place."""

    def forward(
        self, logits: torch.Tensor, inputs: SamplingInputs | None, per_shard: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Samples one token per row. All ranks call it, with the same ``per_shard``.

        Args:
            logits: [N, shard of the vocabulary], of this rank.
            inputs: the sampling parameters. Only rank 0 needs them, unless ``per_shard``.
            per_shard: whether each rank samples from its shard instead of rank 0 from the gathered
                logits. Only temperatures take effect then, not truncation, edits or logprobs. A
                single rank ignores it.

        Returns:
            int64 [N] token ids on all ranks, -1 where no token is allowed. On rank 0 also the
            log-probabilities if requested, as ``pack_logprobs`` returns them, else None.
        """
        assert inputs is not None
        return sample_with_logprobs(logits, inputs)
