"""Samples the next tokens from logits."""

import torch
from torch import nn

from nanovllm.kernels.sampling.pipeline import SamplingInputs, sample_with_logprobs


class Sampler(nn.Module):
    """Applies masks, biases and penalties, then samples with temperature and truncation. With
    several ranks, ``ParallelSampler`` takes its place."""

    def gather(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Gathers the logits of all ranks. Returns [N, vocabulary] on rank 0, else None."""
        return logits

    def forward(
        self, logits: torch.Tensor, inputs: SamplingInputs | None, per_shard: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Samples one token per row. All ranks call it, with the same ``per_shard``.

        Args:
            logits: [N, size of this rank's shard of the vocabulary].
            inputs: the sampling parameters. Only rank 0 needs them, unless ``per_shard``.
            per_shard: whether each rank samples from its own shard. Otherwise rank 0 samples from
                the gathered logits. With ``per_shard``, only temperatures take effect, not
                truncation, edits or logprobs. A single rank ignores it.

        Returns:
            The token ids, int64 [N] on all ranks, -1 where no token is allowed; and the
            log-probabilities as ``pack_logprobs`` returns them, or None if none are requested, and
            on ranks above 0.
        """
        assert inputs is not None
        return sample_with_logprobs(logits, inputs)
