"""Samples the next tokens from logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from nanovllm.kernels.sampling.sample import sample, sample_shard, unpack_token_ids
from nanovllm.layers.embed_head import ParallelLMHead

# Functions that edit logits in place, in calling order, with their arguments after the logits.
LogitEdits = Mapping[Callable[..., None], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The sampling parameters of N sequences. Features that no sequence uses cost nothing.

    Attributes:
        rows: int32 [N, 8], a SAMPLING_ROW each.
        truncates: whether any row has top_k, top_p or min_p set.
        edits: penalties, biases and masks to apply to the logits first.
        num_logprobs: number of most likely tokens to report besides the sampled one; None for no
            log-probabilities at all.
        processed_logprobs: report log-probabilities after edits, temperature and truncation,
            instead of those of the model.
    """

    rows: torch.Tensor
    truncates: bool = False
    edits: LogitEdits = field(default_factory=dict)
    num_logprobs: int | None = None
    processed_logprobs: bool = False

    def to(self, device: torch.device) -> "SamplingInputs":
        """Copies the tensors to a device, asynchronously."""
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        edits = {edit: tuple(map(move, tensors)) for edit, tensors in self.edits.items()}
        return replace(self, rows=move(self.rows), edits=edits)


class Sampler(nn.Module):
    """Applies masks, biases and penalties, then samples with temperature and truncation.

    With tensor parallelism, rank 0 gathers the logits of all ranks and samples from them. If no
    request uses anything but a temperature, the gather is not needed: each rank samples from its
    shard of the vocabulary, and an all-reduce takes the maximum of the ranks' Gumbel-max scores.
    """

    def __init__(self, head: ParallelLMHead) -> None:
        super().__init__()
        self.tp, self.gather, self.vocab_start = head.tp, head.gather, head.vocab_start
        end = min(head.vocab_start + head.num_embeddings_per_rank, head.num_embeddings)
        self.shard_size = max(end - head.vocab_start, 0)

    def forward(
        self, logits: torch.Tensor, inputs: SamplingInputs | None, per_shard: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Samples one token per row. All ranks call it, with the same ``per_shard``.

        Args:
            logits: [N, shard of the vocabulary], of this rank.
            inputs: the sampling parameters. Only rank 0 needs them, unless ``per_shard``.
            per_shard: whether each rank samples from its shard instead of rank 0 from the gathered
                logits. Only temperatures take effect then, not truncation, edits or logprobs.

        Returns:
            int64 [N] token ids on all ranks, -1 where no token is allowed. On rank 0 also the
            log-probabilities if requested, as ``pack_logprobs`` returns them, else None.
        """
        if per_shard and self.tp.size > 1:
            assert inputs is not None
            packed = sample_shard(logits, inputs.rows, self.shard_size, self.vocab_start)
            return unpack_token_ids(self.tp.all_reduce(packed)), None
        all_logits = self.gather(logits)
        if all_logits is None or inputs is None:
            # The all-reduce takes the maximum, so -2 leaves rank 0's token.
            no_token = torch.full((len(logits),), -2, dtype=torch.int64, device=logits.device)
            return self.tp.all_reduce(no_token), None
        token_ids, logprobs = sample_with_logprobs(all_logits, inputs)
        return self.tp.all_reduce(token_ids), logprobs


def sample_with_logprobs(
    logits: torch.Tensor, inputs: SamplingInputs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Samples from logits [N, vocab_size] of the whole vocabulary. See ``Sampler.forward``."""
    edited = edit_logits(logits, inputs.edits)
    token_ids = sample(edited, inputs.rows, inputs.truncates)
    if inputs.num_logprobs is None:
        return token_ids, None
    from nanovllm.kernels.sampling.logprobs import pack_logprobs
    from nanovllm.kernels.sampling.processed_logits import processed_logits

    valid_ids = token_ids.clamp(min=0)
    if inputs.processed_logprobs:
        logits = processed_logits(edited, inputs.rows, valid_ids, inputs.truncates)
    return token_ids, pack_logprobs(logits, valid_ids, inputs.num_logprobs)


def edit_logits(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """Returns an fp32 copy of the logits with all edits applied, or ``logits`` itself if there are
    none."""
    edited = logits.to(torch.float32, copy=True) if edits else logits
    for edit, tensors in edits.items():
        edit(edited, *tensors)
    return edited
