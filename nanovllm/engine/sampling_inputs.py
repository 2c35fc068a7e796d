"""Turns what the sequences of a batch ask of the sampler into tensors. Pure, like model_inputs."""

import numpy as np
import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.sampling_state import SamplingState
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.sampling import SAMPLING_ROW
from nanovllm.layers.sampler import SamplingInputs

Row = tuple[int, Sequence, SamplingState]


def prepare_sample(batch: Batch) -> SamplingInputs:
    """How to draw the batch's next tokens, on the host."""
    sampled = [item.seq for item in batch.sampled]
    states = [seq.sampling for seq in sampled]
    edits = any(state.edits for state in states)
    if all(state.is_greedy for state in states) and not edits:
        tensors: dict[str, torch.Tensor] = {}
    else:
        tensors = {"rows": _sampling_rows(sampled, states)}
    if edits:
        rows = [(i, seq, seq.sampling) for i, seq in enumerate(sampled) if seq.sampling.edits]
        tensors |= _masks(rows) | _biases(rows) | _penalties(rows, len(sampled))
    counts = [state.num_logprobs for state in states if state.num_logprobs is not None]
    return SamplingInputs(
        truncates=any(state.truncates for state in states),
        num_logprobs=max(counts, default=None),
        **tensors,
    )


def _sampling_rows(sampled: list[Sequence], states: list[SamplingState]) -> torch.Tensor:
    rows = np.frombuffer(bytearray().join([state.row for state in states]), SAMPLING_ROW)
    rows["position"] = [len(seq) for seq in sampled]
    return torch.from_numpy(rows.view(np.int32).reshape(len(rows), -1))


def _masks(rows: list[Row]) -> dict[str, torch.Tensor]:
    masked = [(i, state) for i, _, state in rows if state.has_mask]
    if not masked:
        return {}
    mask = np.empty((len(masked), masked[0][1].mask_words), np.int32)
    for row, (_, state) in zip(mask, masked, strict=True):
        state.fill_mask(row)
    return {
        "mask_rows": torch.tensor([i for i, _ in masked], dtype=torch.int32),
        "mask": torch.from_numpy(mask),
    }


def _biases(rows: list[Row]) -> dict[str, torch.Tensor]:
    entries = [
        (i, token_id, value)
        for i, seq, state in rows
        if state.has_bias
        for token_id, value in state.biases(seq.completion_token_ids).items()
    ]
    if not entries:
        return {}
    indices, token_ids, values = zip(*entries, strict=True)
    return {
        "bias_rows": torch.tensor(indices, dtype=torch.int32),
        "bias_tokens": torch.tensor(token_ids, dtype=torch.int32),
        "bias_values": torch.tensor(values, dtype=torch.float32),
    }


def _penalties(rows: list[Row], num_sampled: int) -> dict[str, torch.Tensor]:
    penalised = [
        (i, state, np.frombuffer(state.history, np.int32))
        for i, _, state in rows
        if state.history is not None
    ]
    if not penalised:
        return {}
    penalties = torch.tensor([1.0, 0.0, 0.0]).repeat(num_sampled, 1)
    for i, state, _ in penalised:
        penalties[i] = torch.tensor(state.penalties)
    histories = [history for _, _, history in penalised]
    lens = [len(history) for history in histories]
    places = np.concatenate([np.arange(n, dtype=np.int32) for n in lens])
    prompt_lens = np.repeat([state.num_prompt_tokens for _, state, _ in penalised], lens)
    rows_of_tokens = np.repeat(np.array([i for i, _, _ in penalised], np.int32), lens)
    return {
        "penalties": penalties,
        "history_rows": torch.from_numpy(rows_of_tokens),
        "history_tokens": torch.from_numpy(np.concatenate(histories)),
        "history_generated": torch.from_numpy(places >= prompt_lens),
    }
