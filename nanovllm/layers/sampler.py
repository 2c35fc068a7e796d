"""Draws the next tokens from logits."""

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from nanovllm.kernels.sampling.logit_edits import LogitEdits, edit_logits
from nanovllm.kernels.sampling.logprobs import pack_logprobs
from nanovllm.kernels.sampling.processed_logits import processed_logits
from nanovllm.kernels.sampling.sample import best_of_shard, sample, winning_token
from nanovllm.layers.embed_head import ParallelLMHead


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How to draw the next tokens of N sequences. What nobody asks for costs nothing.

    Attributes:
        rows: int32 [N, 8], a SAMPLING_ROW each.
        truncates: whether any row has top_k, top_p or min_p set.
        edits: how to change the logits before a draw.
        num_logprobs: how many most likely tokens to report besides the one sampled.
        processed_logprobs: report log-probabilities of the logits that tokens are sampled from,
            instead of the model's own.
    """

    rows: torch.Tensor
    truncates: bool = False
    edits: LogitEdits = field(default_factory=dict)
    num_logprobs: int | None = None
    processed_logprobs: bool = False

    def to(self, device: torch.device) -> "SamplingInputs":
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        edits = {edit: tuple(map(move, tensors)) for edit, tensors in self.edits.items()}
        return replace(self, rows=move(self.rows), edits=edits)


class Sampler(nn.Module):
    """Masks, biases and penalties; then temperature, truncation and a draw (``kernels.sampling``).

    Of several ranks, rank 0 draws from the logits of all. Where nothing but temperature is asked
    for, each can draw from its own instead: the best of the ranks' best is the token.
    """

    def __init__(self, head: ParallelLMHead) -> None:
        super().__init__()
        self.tp, self.gather, self.vocab_start = head.tp, head.gather, head.vocab_start
        end = min(head.vocab_start + head.num_embeddings_per_rank, head.num_embeddings)
        self.num_own_tokens = max(end - head.vocab_start, 0)

    def forward(
        self, logits: torch.Tensor, inputs: SamplingInputs | None, each_rank: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's logits [N, its part of the vocabulary] -> int64 [N] token ids, -1 where no
        token is allowed; and, if asked for, their logprobs (see ``pack_logprobs``).
        Unless ``each_rank`` samples, ``inputs`` is rank 0's alone."""
        if each_rank and self.tp.size > 1:
            assert inputs is not None
            best = best_of_shard(logits, inputs.rows, self.num_own_tokens, self.vocab_start)
            return winning_token(self.tp.all_reduce(best)), None
        all_logits = self.gather(logits)
        if all_logits is None or inputs is None:
            nothing = torch.full((len(logits),), -2, dtype=torch.int64, device=logits.device)
            return self.tp.all_reduce(nothing), None
        token_ids, logprobs = draw(all_logits, inputs)
        return self.tp.all_reduce(token_ids), logprobs


def draw(logits: torch.Tensor, inputs: SamplingInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draws from logits [N, vocab_size]; see ``Sampler.forward``."""
    edited = edit_logits(logits, inputs.edits)
    token_ids = sample(edited, inputs.rows, inputs.truncates)
    if inputs.num_logprobs is None:
        return token_ids, None
    known = token_ids.clamp(min=0)
    if inputs.processed_logprobs:
        logits = processed_logits(edited, inputs.rows, known, inputs.truncates)
    return token_ids, pack_logprobs(logits, known, inputs.num_logprobs)
