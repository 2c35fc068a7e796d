"""Turns a scheduled batch into tensors. Pure: reads sequences, changes nothing.

Everything is int32 (a cache of 2^31 slots would fill terabytes), so that a step's inputs travel
to the device as one buffer in one copy.
"""

from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import numpy as np
import torch

from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.utils.context import Context
from nanovllm.utils.math import cdiv

ALIGNMENT = 4  # in int32: kernels are compiled for pointers at multiples of 16 bytes
CONTEXT_FIELDS = frozenset(field.name for field in fields(Context))


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What one step takes.

    Attributes:
        input_ids: int32 [N]; -1 - row for the token that the last step drew in this row.
        positions: int32 [N].
        context: the metadata.
        sampling_rows: int32 [num_sampled, ROW_WORDS], how to draw the next tokens, where no more
            than that is asked for; None for a step that ends with logits.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    context: Context
    sampling_rows: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by field name."""
        named: dict[str, Any] = {f.name: getattr(self.context, f.name) for f in fields(Context)}
        named["sampling_rows"] = self.sampling_rows
        found = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        return {"input_ids": self.input_ids, "positions": self.positions, **found}

    def pack(self, pin_memory: bool = False) -> "PackedInputs":
        """All tensors end to end in one buffer on the host."""
        tensors = self.tensors()
        size = sum(cdiv(t.numel(), ALIGNMENT) * ALIGNMENT for t in tensors.values())
        buffer = torch.empty(size, dtype=torch.int32, pin_memory=pin_memory)
        start = 0
        for tensor in tensors.values():
            buffer[start : start + tensor.numel()] = tensor.flatten()
            start += cdiv(tensor.numel(), ALIGNMENT) * ALIGNMENT
        no_tensors: dict[str, Any] = {name: None for name in tensors if name in CONTEXT_FIELDS}
        blank = replace(self.context, **no_tensors)
        return PackedInputs({n: tuple(t.shape) for n, t in tensors.items()}, blank, buffer)


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """ModelInputs as they travel: to the device in one copy, to other ranks in one message.

    Attributes:
        shapes: of each tensor, in the buffer's order.
        context: all that is no tensor.
        buffer: int32, on the host.
    """

    shapes: dict[str, tuple[int, ...]]
    context: Context
    buffer: torch.Tensor

    @property
    def batch_size(self) -> int:
        """Sequences of a decode."""
        return self.shapes["input_ids"][0]

    def unpack(self, buffer: torch.Tensor | None = None) -> ModelInputs:
        """The inputs as views of the buffer, or of a copy of it."""
        buffer = self.buffer if buffer is None else buffer
        views: dict[str, Any] = {}
        start = 0
        for name, shape in self.shapes.items():
            numel = prod(shape)
            views[name] = buffer[start : start + numel].view(shape)
            start += cdiv(numel, ALIGNMENT) * ALIGNMENT
        own = [views.pop(n, None) for n in ("input_ids", "positions", "sampling_rows")]
        return ModelInputs(own[0], own[1], replace(self.context, **views), own[2])

    def to(self, device: torch.device) -> ModelInputs:
        if device.type == "cpu":
            return self.unpack()
        return self.unpack(self.copy_to(torch.empty_like(self.buffer, device=device)))

    def copy_to(self, buffer: torch.Tensor) -> torch.Tensor:
        """Starts the copy into a buffer on the device, and returns that."""
        pinned = self.buffer
        if buffer.is_cuda and not pinned.is_pinned():  # as it came to another rank
            pinned = pinned.pin_memory()
        return buffer.copy_(pinned, non_blocking=True)

    # An array, which pickle can pass by without a copy.

    def __getstate__(self) -> tuple[Any, ...]:
        return self.shapes, self.context, self.buffer.numpy()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for field, value in zip(fields(self), state, strict=True):
            is_array = field.name == "buffer"
            object.__setattr__(self, field.name, torch.from_numpy(value) if is_array else value)


def prepare_prefill(batch: Batch, block_size: int) -> ModelInputs:
    """All new tokens of all sequences end to end, with the bounds of each sequence's part.

    Block tables are given only if some sequence has cached keys to read.
    """
    items = batch.items
    positions = [np.arange(item.start, item.end, dtype=np.int32) for item in items]
    slots = [_slots(item, pos, block_size) for item, pos in zip(items, positions, strict=True)]
    tokens = [np.asarray(item.seq.token_ids[item.start : item.end], np.int32) for item in items]
    lens_q = [item.num_tokens for item in items]
    lens_k = [item.end for item in items]
    cu_seqlens_q = _cumulative(lens_q)
    samples = np.array([item.samples for item in items])
    reads_cache = any(item.start for item in items)
    return ModelInputs(
        input_ids=torch.from_numpy(np.concatenate(tokens)),
        positions=torch.from_numpy(np.concatenate(positions)),
        context=Context(
            is_prefill=True,
            slot_mapping=torch.from_numpy(np.concatenate(slots)),
            block_tables=prepare_block_tables(batch) if reads_cache else None,
            cu_seqlens_q=torch.from_numpy(cu_seqlens_q),
            cu_seqlens_k=torch.from_numpy(_cumulative(lens_k)),
            max_seqlen_q=max(lens_q),
            max_seqlen_k=max(lens_k),
            logits_indices=torch.from_numpy(cu_seqlens_q[1:][samples] - 1),
        ),
    )


def prepare_decode(
    batch: Batch, block_size: int, padded_size: int = 0, table_width: int = 0
) -> ModelInputs:
    """Each sequence's last token.

    Padding rows, up to ``padded_size``, store nothing (slot -1) and attend to nothing (context
    length 0); block tables are padded to ``table_width``.
    """
    seqs = [item.seq for item in batch.items]
    num_seqs = len(seqs)
    size = max(num_seqs, padded_size)
    input_ids, positions, context_lens = (np.zeros(size, dtype=np.int32) for _ in range(3))
    slot_mapping = np.full(size, -1, dtype=np.int32)
    input_ids[:num_seqs] = [seq.last_token for seq in seqs]
    context_lens[:num_seqs] = [len(seq) for seq in seqs]
    positions[:num_seqs] = context_lens[:num_seqs] - 1
    last_blocks = np.array([seq.block_table[-1] for seq in seqs], dtype=np.int32)
    slot_mapping[:num_seqs] = last_blocks * block_size + positions[:num_seqs] % block_size
    return ModelInputs(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions),
        context=Context(
            slot_mapping=torch.from_numpy(slot_mapping),
            block_tables=prepare_block_tables(batch, size, table_width),
            max_seqlen_k=int(context_lens.max()),
            context_lens=torch.from_numpy(context_lens),
        ),
    )


def prepare_block_tables(batch: Batch, num_rows: int = 0, width: int = 0) -> torch.Tensor:
    """int32 [sequences, longest table] or wider, padded with block 0, which is never read."""
    tables = [item.seq.block_table for item in batch.items]
    shape = max(len(tables), num_rows), max([width, *map(len, tables)])
    out = np.zeros(shape, dtype=np.int32)
    for row, table in enumerate(tables):
        out[row, : len(table)] = table
    return torch.from_numpy(out)


def _slots(item: ScheduledSequence, positions: np.ndarray, block_size: int) -> np.ndarray:
    """KV slot of each new token; -1 for one that is computed only for its logits."""
    blocks = np.asarray(item.seq.block_table, dtype=np.int32)
    slots = blocks[positions // block_size] * block_size + positions % block_size
    slots[positions < item.seq.num_cached_tokens] = -1
    return slots.astype(np.int32)


def _cumulative(lens: list[int]) -> np.ndarray:
    """int32 [len(lens) + 1], from 0."""
    return np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
