"""Turns what the sequences of a batch ask of the sampler into tensors. Pure, like model_inputs."""

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.engine.sampling_state import SamplingState
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.sampling.logit_edits import add_bias, apply_mask, penalise
from nanovllm.kernels.sampling.sampling_row import ROW_WORDS, SAMPLING_ROW
from nanovllm.layers.sampler import SamplingInputs

Row = tuple[int, Sequence, SamplingState]
Edits = dict[Callable[..., None], tuple[np.ndarray, ...]]  # LogitEdits, but for the tensors


def prepare_sample(batch: Batch) -> SamplingInputs:
    """How to sample the batch's next tokens, on the host. All tokens before them must have been
    applied. Tokens sampled for sequences that have finished are dropped."""
    kinds = batch.sampling_kinds
    edits: Edits = {}
    if any(kind.edits for kind in kinds):
        sampled = [item.seq for item in batch.sampled]
        rows = [
            (i, seq, seq.completion.sampling)
            for i, seq in enumerate(sampled)
            if seq.completion.sampling.kind.edits and not seq.is_finished
        ]
        edits = _masks(rows) | _biases(rows) | _penalties(rows, len(sampled))
    counts = [kind.num_logprobs for kind in kinds if kind.num_logprobs is not None]
    return SamplingInputs(
        rows=sampling_rows(batch.sampled),
        truncates=any(kind.truncates for kind in kinds),
        edits={edit: tuple(map(torch.from_numpy, arrays)) for edit, arrays in edits.items()},
        num_logprobs=max(counts, default=None),
        processed_logprobs=any(kind.processed_logprobs for kind in kinds),
    )


def sampling_rows(sampled: list[ScheduledSequence], num_rows: int = 0) -> torch.Tensor:
    """int32 [sampled or more, ROW_WORDS], a SAMPLING_ROW each; rows of zeros up to num_rows."""
    known = bytearray().join([item.seq.completion.sampling.row for item in sampled])
    rows = np.frombuffer(known.ljust(num_rows * SAMPLING_ROW.itemsize, b"\0"), SAMPLING_ROW)
    rows["position"][: len(sampled)] = [item.end for item in sampled]
    return torch.from_numpy(rows.view(np.int32).reshape(-1, ROW_WORDS))


def _masks(rows: list[Row]) -> Edits:
    masked = [(i, state) for i, _, state in rows if state.has_mask]
    if not masked:
        return {}
    mask = np.empty((len(masked), masked[0][1].mask_words), np.int32)
    for row, (_, state) in zip(mask, masked, strict=True):
        state.fill_mask(row)
    return {apply_mask: (np.array([i for i, _ in masked], np.int32), mask)}


def _biases(rows: list[Row]) -> Edits:
    found = [(i, *state.biases(seq.token_ids)) for i, seq, state in rows if state.has_bias]
    lens = [len(token_ids) for _, token_ids, _ in found]
    if not any(lens):
        return {}
    indices, token_ids, values = zip(*found, strict=True)
    bias_rows = np.repeat(np.array(indices, np.int32), lens)
    return {add_bias: (bias_rows, np.concatenate(token_ids), np.concatenate(values))}


def _penalties(rows: list[Row], num_sampled: int) -> Edits:
    penalised = [(i, s, np.frombuffer(s.history, np.int32)) for i, _, s in rows if s.history]
    if not penalised:
        return {}
    indices, states, histories = zip(*penalised, strict=True)
    penalties = np.tile(np.array([1, 0, 0], np.float32), (num_sampled, 1))
    penalties[list(indices)] = [state.penalties for state in states]
    lens = np.array([len(history) for history in histories])
    starts = np.cumsum(lens) - lens
    first_generated = starts + [state.num_prompt_tokens for state in states]
    generated = np.arange(lens.sum()) >= np.repeat(first_generated, lens)
    history_rows = np.repeat(np.array(indices, np.int32), lens)
    return {penalise: (penalties, history_rows, np.concatenate(histories), generated)}
