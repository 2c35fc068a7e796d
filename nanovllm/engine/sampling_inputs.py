"""Builds the sampler's inputs for a batch. Like model_inputs, it changes nothing."""

from itertools import compress

import numpy as np
import torch

from nanovllm.engine.batch import Batch
from nanovllm.kernels.sampling.pipeline import LogitEdits, SamplingInputs
from nanovllm.kernels.sampling.sampling_row import ROW_WORDS, SAMPLING_ROW


def prepare_sample(batch: Batch, processed_logprobs: bool = False) -> SamplingInputs:
    """Builds the inputs to sample the batch's next tokens, on the host. All earlier tokens must
    have been applied. Finished sequences have rows too, whose tokens are dropped later.
    ``processed_logprobs`` is a field of the result."""
    kinds = batch.sampling_kinds
    edits: LogitEdits = {}
    if any(kind.edits for kind in kinds):
        from nanovllm.engine.logit_edits import step_edits

        edits = step_edits(batch.sampled)
    counts = [kind.num_logprobs for kind in kinds if kind.num_logprobs is not None]
    return SamplingInputs(
        rows=sampling_rows(batch),
        truncates=any(kind.truncates for kind in kinds),
        edits=edits,
        num_logprobs=max(counts, default=None),
        processed_logprobs=processed_logprobs,
    )


def sampling_rows(batch: Batch, num_rows: int = 0) -> torch.Tensor:
    """Returns int32 [max(num_sampled, num_rows), ROW_WORDS]: a SAMPLING_ROW for each sampled token,
    then zeros as padding."""
    data = bytearray().join([state.row for state in batch.sampling_states])
    rows = np.frombuffer(data.ljust(num_rows * SAMPLING_ROW.itemsize, b"\0"), SAMPLING_ROW)
    rows["position"][: len(batch.sampled)] = [*compress(batch.ends, batch.samples)]
    return torch.from_numpy(rows.view(np.int32).reshape(-1, ROW_WORDS))
