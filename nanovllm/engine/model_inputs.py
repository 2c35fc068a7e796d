"""Turns a scheduled batch into tensors. Pure: reads sequences, changes nothing, no device."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.utils.context import Context


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What one forward pass takes: int64 [N] token ids and positions, and the step's metadata."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    context: Context

    def to(self, device: torch.device) -> "ModelInputs":
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(Context)
            if isinstance(value := getattr(self.context, field.name), torch.Tensor)
        }
        return ModelInputs(
            self.input_ids.to(device, non_blocking=True),
            self.positions.to(device, non_blocking=True),
            replace(self.context, **moved),
        )


def prepare_prefill(batch: Batch, block_size: int) -> ModelInputs:
    """All new tokens of all sequences end to end, with the bounds of each sequence's part.

    Block tables are given only if some sequence has cached keys to read.
    """
    items = batch.items
    positions = [np.arange(item.start, item.end) for item in items]
    lens_q = [item.num_tokens for item in items]
    lens_k = [item.end for item in items]
    cu_seqlens_q = _cumulative(lens_q)
    slots = [_slots(item, pos, block_size) for item, pos in zip(items, positions, strict=True)]
    samples = np.array([item.samples for item in items])
    reads_cache = any(item.start for item in items)
    tokens = [item.seq.token_ids[item.start : item.end] for item in items]
    return ModelInputs(
        input_ids=torch.from_numpy(np.concatenate([np.asarray(t, np.int64) for t in tokens])),
        positions=torch.from_numpy(np.concatenate(positions)),
        context=Context(
            is_prefill=True,
            slot_mapping=torch.from_numpy(np.concatenate(slots)),
            block_tables=prepare_block_tables(batch) if reads_cache else None,
            cu_seqlens_q=torch.from_numpy(cu_seqlens_q),
            cu_seqlens_k=torch.from_numpy(_cumulative(lens_k)),
            max_seqlen_q=max(lens_q),
            max_seqlen_k=max(lens_k),
            logits_indices=torch.from_numpy(cu_seqlens_q[1:][samples].astype(np.int64) - 1),
        ),
    )


def prepare_decode(batch: Batch, block_size: int) -> ModelInputs:
    """Each sequence's last token."""
    seqs = [item.seq for item in batch.items]
    context_lens = np.array([len(seq) for seq in seqs], dtype=np.int32)
    positions = context_lens.astype(np.int64) - 1
    last_blocks = np.array([seq.block_table[-1] for seq in seqs], dtype=np.int64)
    return ModelInputs(
        input_ids=torch.tensor([seq.last_token for seq in seqs], dtype=torch.int64),
        positions=torch.from_numpy(positions),
        context=Context(
            slot_mapping=torch.from_numpy(last_blocks * block_size + positions % block_size),
            block_tables=prepare_block_tables(batch),
            max_seqlen_k=int(context_lens.max()),
            context_lens=torch.from_numpy(context_lens),
        ),
    )


def prepare_block_tables(batch: Batch) -> torch.Tensor:
    """int32 [num_seqs, longest table], short ones padded with block 0, which is never read."""
    tables = [item.seq.block_table for item in batch.items]
    out = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return torch.from_numpy(out)


def prepare_sample(batch: Batch) -> torch.Tensor | None:
    """fp32 [num_sampled] temperatures; None if every one is 0."""
    temperatures = [item.seq.sampling_params.temperature for item in batch.sampled]
    return torch.tensor(temperatures, dtype=torch.float32) if any(temperatures) else None


def _slots(item: ScheduledSequence, positions: np.ndarray, block_size: int) -> np.ndarray:
    """KV slot of each new token; -1 for one that is computed only for its logits."""
    blocks = np.asarray(item.seq.block_table, dtype=np.int64)
    slots = blocks[positions // block_size] * block_size + positions % block_size
    slots[positions < item.seq.num_cached_tokens] = -1
    return slots


def _cumulative(lens: list[int]) -> np.ndarray:
    """int32 [len(lens) + 1], from 0."""
    return np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
