"""Samples the next tokens from logits that are split over the ranks."""

import torch

from nanovllm.kernels.sampling.pipeline import SamplingInputs
from nanovllm.kernels.sampling.sample import sample_shard, unpack_token_ids
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.sampler import Sampler


class ParallelSampler(Sampler):
    """A Sampler for several ranks.

    Rank 0 gathers the logits of all ranks and samples from them. If the temperature is the only
    sampling parameter in use, the gather is not needed (``per_shard``): each rank samples from its
    shard of the vocabulary, and an all-reduce takes the maximum of the ranks' Gumbel-max scores.

    Args:
        head: the LM head that computes the logits.
    """

    def __init__(self, head: ParallelLMHead) -> None:
        super().__init__()
        self.tp, self.vocab_start, self.vocab_size = head.tp, head.vocab_start, head.num_embeddings
        end = min(head.vocab_start + head.num_embeddings_per_rank, head.num_embeddings)
        self.shard_size = max(end - head.vocab_start, 0)

    def gather(self, logits: torch.Tensor) -> torch.Tensor | None:
        parts = self.tp.gather(logits)
        return torch.cat(parts, -1)[:, : self.vocab_size].contiguous() if parts else None

    def forward(
        self, logits: torch.Tensor, inputs: SamplingInputs | None, per_shard: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if per_shard:
            assert inputs is not None
            packed = sample_shard(logits, inputs.rows, self.shard_size, self.vocab_start)
            return unpack_token_ids(self.tp.all_reduce_max(packed)), None
        all_logits = self.gather(logits)
        if all_logits is None or inputs is None:
            # Less than any of rank 0's tokens.
            no_token = torch.full((len(logits),), -2, dtype=torch.int64, device=logits.device)
            return self.tp.all_reduce_max(no_token), None
        token_ids, logprobs = super().forward(all_logits, inputs)
        return self.tp.all_reduce_max(token_ids), logprobs
