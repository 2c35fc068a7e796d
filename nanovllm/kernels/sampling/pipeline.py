"""Turns logits of the whole vocabulary into tokens and log-probabilities."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from nanovllm.kernels.sampling.sample import sample

# Functions that edit logits in place, in calling order, with their arguments after the logits.
LogitEdits = Mapping[Callable[..., None], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The sampling parameters of N sequences. Features that no sequence uses cost nothing.

    Attributes:
        rows: int32 [N, 8], a SAMPLING_ROW each.
        truncates: whether rows may have top_k, top_p or min_p set.
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


def sample_with_logprobs(
    logits: torch.Tensor, inputs: SamplingInputs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Samples from logits [N, vocab_size] of the whole vocabulary. See the layer ``Sampler``."""
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
