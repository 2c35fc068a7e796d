"""Draws the next tokens from logits."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.logit_edits import add_bias, apply_mask, penalise
from nanovllm.kernels.logprobs import top_logprobs
from nanovllm.kernels.sampling import best_of_shard, sample, winning_token
from nanovllm.layers.embed_head import ParallelLMHead


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How to draw the next tokens of N sequences. What nobody asks for is None and costs nothing.

    Attributes:
        rows: int32 [N, 8], a SAMPLING_ROW each.
        truncates: whether any row has top_k, top_p or min_p set.
        mask_rows: int32 [M], the rows that may draw only some of the tokens.
        mask: int32 [M, ceil(vocab_size / 32)], a bit for each token.
        bias_rows, bias_tokens: int32 [B], the single logits to change.
        bias_values: fp32 [B], what to add.
        penalties: fp32 [N, 3], repetition, frequency and presence penalty of each row.
        history_rows, history_tokens: int32 [H], the tokens so far of the rows with penalties.
        history_generated: bool [H], false for the prompt's.
        num_logprobs: how many most likely tokens to report besides the one drawn.
    """

    rows: torch.Tensor
    truncates: bool = False
    mask_rows: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    bias_rows: torch.Tensor | None = None
    bias_tokens: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None
    penalties: torch.Tensor | None = None
    history_rows: torch.Tensor | None = None
    history_tokens: torch.Tensor | None = None
    history_generated: torch.Tensor | None = None
    num_logprobs: int | None = None

    @property
    def edits_logits(self) -> bool:
        return not (self.mask is None and self.bias_rows is None and self.penalties is None)

    def to(self, device: torch.device) -> "SamplingInputs":
        if device.type == "cpu":
            return self
        named: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                named[name] = value.pin_memory().to(device, non_blocking=True)
        return SamplingInputs(**named)


class Sampler(nn.Module):
    """Masks, biases and penalties; then temperature, truncation and Gumbel-max.

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
        token is allowed; and, if asked for, their logprobs (see ``pack_logprobs``) by the logits
        as they came. Unless ``each_rank`` draws, ``inputs`` is rank 0's alone."""
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
    edited = logits
    if inputs.edits_logits:
        edited = logits.to(torch.float32, copy=True)
        edit_logits(edited, inputs)
    token_ids = sample(edited, inputs.rows, inputs.truncates)
    if inputs.num_logprobs is None:
        return token_ids, None
    return token_ids, pack_logprobs(logits, token_ids.clamp(min=0), inputs.num_logprobs)


def edit_logits(logits: torch.Tensor, inputs: SamplingInputs) -> None:
    """Applies what ``inputs`` asks for to fp32 logits, in place."""
    if inputs.mask is not None:
        assert inputs.mask_rows is not None
        apply_mask(logits, inputs.mask_rows, inputs.mask)
    if inputs.bias_rows is not None:
        assert inputs.bias_tokens is not None and inputs.bias_values is not None
        add_bias(logits, inputs.bias_rows, inputs.bias_tokens, inputs.bias_values)
    if inputs.penalties is not None:
        assert inputs.history_rows is not None and inputs.history_tokens is not None
        assert inputs.history_generated is not None
        penalise(
            logits,
            inputs.penalties,
            inputs.history_rows,
            inputs.history_tokens,
            inputs.history_generated,
        )


def pack_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [N, 1 + 2 * (1 + k)] on the logits' device, one buffer to copy to the host: the rank
    of each row's token (int64 [N]), then pairs of token id and fp32 logprob, its own and the k
    best."""
    ids, logprobs, ranks = top_logprobs(logits, token_ids, k)
    pairs = torch.stack((ids.int(), logprobs.contiguous().view(torch.int32)), dim=-1).flatten(1)
    return torch.cat((ranks.int().unsqueeze(1), pairs), dim=1)
