"""Builds the sampler's inputs for a batch. Grammars' masks are computed here. If that fails, the
edit's ``error`` is set."""

import numpy as np
import torch

from nanovllm.engine.batch import Batch
from nanovllm.kernels.sampling.pipeline import LogitEdits, SamplingInputs
from nanovllm.kernels.sampling.sampling_row import EDITS, ROW_WORDS, SAMPLING_ROW, TRUNCATES


def prepare_sample(batch: Batch, processed_logprobs: bool = False) -> SamplingInputs:
    """Builds the inputs to sample the batch's next tokens, on the host. All earlier tokens must
    have been applied. Finished sequences have rows too, whose tokens are dropped later. With
    ``processed_logprobs``, log-probabilities are those of the logits that tokens are sampled
    from."""
    features = batch.sampling_features
    edits: LogitEdits = {}
    if features & EDITS:
        from nanovllm.engine.logit_edits import step_edits

        edits = step_edits(batch.sampled)
    counts = [seq.completion.sampling.num_logprobs for seq in batch.sampled]
    return SamplingInputs(
        rows=pad_rows(batch.sampling_rows),
        truncates=bool(features & TRUNCATES),
        edits=edits,
        num_logprobs=max((count for count in counts if count is not None), default=None),
        processed_logprobs=processed_logprobs,
    )


def pad_rows(rows: np.ndarray, num_rows: int = 0) -> torch.Tensor:
    """Returns int32 [max(len(rows), num_rows), ROW_WORDS]: SAMPLING_ROWs, then zeros as padding."""
    padded = np.zeros(max(len(rows), num_rows), SAMPLING_ROW)
    padded[: len(rows)] = rows
    return torch.from_numpy(padded.view(np.int32).reshape(-1, ROW_WORDS))
