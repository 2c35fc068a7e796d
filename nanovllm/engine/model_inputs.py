"""Turns a scheduled batch into tensors, without changing it.

All tensors are int32 (a cache of 2^31 slots would fill terabytes), so that a step's inputs are one
buffer and one copy to the device.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.utils.context import Context
from nanovllm.utils.math import cdiv

ALIGNMENT = 4  # in int32: kernels are compiled for pointers at multiples of 16 bytes
# Tensors of ModelInputs that are not the context's.
OWN_TENSORS = ("input_ids", "positions", "sampling_rows", "table_width")
LAST = (
    "block_tables"  # last in the buffer, so that a captured step finds all others at fixed offsets
)


class GraphSize(NamedTuple):
    """The size of a captured step: the most new tokens and the most sequences that it fits."""

    is_prefill: bool
    num_tokens: int
    num_seqs: int


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The inputs of one step.

    Attributes:
        input_ids: int32 [N]; -1 - row for the token that the last step sampled in this row.
        positions: int32 [N].
        context: the metadata for attention and the output head.
        sampling_rows: int32 [num_seqs, ROW_WORDS], how to sample the next tokens, and padding rows.
            None for a step that ends with logits.
        table_width: int32 [1], the number of columns of the block tables; for a captured step only.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    context: Context
    sampling_rows: torch.Tensor | None = None
    table_width: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by field name, in the buffer's order."""
        values = {field.name: getattr(self.context, field.name) for field in fields(Context)}
        values |= {name: getattr(self, name) for name in OWN_TENSORS}
        values[LAST] = values.pop(LAST)
        return {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}

    def pack(self, graph_size: GraphSize | None = None, pin_memory: bool = False) -> "PackedInputs":
        """Concatenates all tensors in one buffer on the host."""
        tensors = self.tensors()
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        size = sum(map(_space, shapes.values()))
        buffer = torch.empty(size, dtype=torch.int32, pin_memory=pin_memory)
        for name, place in _views(buffer.numpy(), shapes).items():
            place[...] = tensors[name].numpy()
        no_tensors: dict[str, Any] = dict.fromkeys(tensors.keys() - OWN_TENSORS)
        return PackedInputs(shapes, replace(self.context, **no_tensors), buffer, graph_size)


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """ModelInputs in one buffer, for one copy to the device and one message to other ranks.

    Attributes:
        shapes: the shape of each tensor, in the buffer's order.
        context: the context's fields that are not tensors.
        buffer: int32, on the host.
        graph_size: the captured step that they are padded for, if any.
    """

    shapes: dict[str, tuple[int, ...]]
    context: Context
    buffer: torch.Tensor
    graph_size: GraphSize | None = None

    @property
    def tables_start(self) -> int:
        """The offset of the block tables in the buffer."""
        return sum(_space(shape) for name, shape in self.shapes.items() if name != LAST)

    def unpack(self, buffer: torch.Tensor | None = None) -> ModelInputs:
        """Returns the inputs as views of the buffer, or of a copy of it."""
        views = _views(self.buffer if buffer is None else buffer, self.shapes)
        own = {name: views.pop(name, None) for name in OWN_TENSORS}
        return ModelInputs(context=replace(self.context, **views), **own)

    def to(self, device: torch.device) -> ModelInputs:
        if device.type == "cpu":
            return self.unpack()
        return self.unpack(self.copy_to(torch.empty_like(self.buffer, device=device)))

    def copy_to(self, buffer: torch.Tensor) -> torch.Tensor:
        """Starts a copy to the beginning of a device buffer. Returns that buffer."""
        pinned = self.buffer
        if buffer.is_cuda and not pinned.is_pinned():  # received from rank 0
            pinned = pinned.pin_memory()
        buffer[: len(pinned)].copy_(pinned, non_blocking=True)
        return buffer

    def __reduce__(self) -> tuple[Any, ...]:
        # A numpy array is pickled out of band, without a copy.
        return _from_array, (self.shapes, self.context, self.buffer.numpy(), self.graph_size)


def prepare_prefill(
    batch: Batch, block_size: int, num_tokens: int = 0, num_seqs: int = 0, max_context: int = 0
) -> ModelInputs:
    """Builds a prefill: the new tokens of all sequences, concatenated, and each sequence's bounds.

    Block tables are included only if a sequence reads cached keys. One row for each sequence gets
    logits: the rows that sample, and row 0 as padding. The last layer computes only these rows,
    unless a sequence wants logprobs of its prompt.

    For a captured step, with contexts of up to ``max_context`` tokens, all shapes but the block
    tables' width depend on the other arguments only. Block tables are always included. Padding
    tokens, up to ``num_tokens``, belong to no sequence and store nothing (slot -1). Padding
    sequences, up to ``num_seqs``, have no tokens.
    """
    items = batch.items
    positions = [np.arange(item.start, item.end, dtype=np.int32) for item in items]
    slots = [_slots(item, pos, block_size) for item, pos in zip(items, positions, strict=True)]
    tokens = [np.asarray(item.seq.token_ids[item.start : item.end], np.int32) for item in items]
    lens_q, lens_k = [item.num_tokens for item in items], [item.end for item in items]
    num_tokens, num_seqs = num_tokens or sum(lens_q), num_seqs or len(items)
    bounds_q = _cumulated(lens_q, num_seqs)
    samples = _padded([item.samples for item in items], num_seqs)
    rows = _padded(bounds_q[1:][samples == 1] - 1, num_seqs)
    outputs = {"output_indices": rows, "cu_num_outputs": _cumulated(samples, num_seqs)}
    if any(item.seq.wants_prompt_logprobs for item in items):
        outputs = {"logits_indices": rows}
    tables = None
    if max_context or any(item.start for item in items):
        tables = prepare_block_tables(batch, num_seqs)
    return ModelInputs(
        input_ids=torch.from_numpy(_joined(tokens, num_tokens)),
        positions=torch.from_numpy(_joined(positions, num_tokens)),
        context=Context(
            is_prefill=True,
            slot_mapping=torch.from_numpy(_joined(slots, num_tokens, -1)),
            block_tables=tables,
            cu_seqlens_q=torch.from_numpy(bounds_q),
            cu_seqlens_k=torch.from_numpy(_cumulated(lens_k, num_seqs)),
            max_seqlen_q=num_tokens if max_context else max(lens_q),
            max_seqlen_k=max_context or max(lens_k),
            **{name: torch.from_numpy(indices) for name, indices in outputs.items()},
        ),
        table_width=_width(tables) if max_context else None,
    )


def prepare_decode(
    batch: Batch,
    block_size: int,
    padded_size: int = 0,
    split_kv: Callable[[np.ndarray], np.ndarray | None] | None = None,
) -> ModelInputs:
    """Builds a decode: each sequence's last token.

    For a captured step, padding rows, up to ``padded_size``, store nothing (slot -1) and attend to
    nothing (context length 0). ``split_kv`` makes the split-KV schedule for context lengths.
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
    schedule = None if split_kv is None else split_kv(context_lens)
    tables = prepare_block_tables(batch, size)
    return ModelInputs(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions),
        context=Context(
            slot_mapping=torch.from_numpy(slot_mapping),
            block_tables=tables,
            max_seqlen_k=int(context_lens.max()),
            context_lens=torch.from_numpy(context_lens),
            split_kv_schedule=None if schedule is None else torch.from_numpy(schedule),
        ),
        table_width=_width(tables) if padded_size else None,
    )


def prepare_block_tables(batch: Batch, num_rows: int = 0) -> torch.Tensor:
    """Returns int32 [num_seqs or num_rows, longest table]; padding is block 0, never read."""
    tables = [item.seq.block_table for item in batch.items]
    lens = np.array([len(table) for table in tables], np.int32)
    out = np.zeros((max(len(tables), num_rows), lens.max(initial=1)), dtype=np.int32)
    is_block = np.arange(out.shape[1]) < lens[:, None]
    out[: len(tables)][is_block] = list(chain.from_iterable(tables))
    return torch.from_numpy(out)


def _slots(item: ScheduledSequence, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Returns the KV slot of each new token; -1 for tokens computed only for their logits."""
    blocks = np.asarray(item.seq.block_table, dtype=np.int32)
    slots = blocks[positions // block_size] * block_size + positions % block_size
    slots[positions < item.seq.num_cached_tokens] = -1
    return slots.astype(np.int32)


def _width(tables: torch.Tensor | None) -> torch.Tensor:
    assert tables is not None
    return torch.from_numpy(np.full(1, tables.size(1), np.int32))


def _padded(values: Any, size: int, padding: int = 0) -> np.ndarray:
    """Returns int32 [size]: the values, then padding."""
    out = np.full(size, padding, np.int32)
    out[: len(values)] = values
    return out


def _joined(parts: list[np.ndarray], size: int, padding: int = 0) -> np.ndarray:
    """Returns int32 [size]: the concatenated parts, then padding."""
    return _padded(np.concatenate(parts) if parts else (), size, padding)


def _cumulated(counts: Any, size: int) -> np.ndarray:
    """Returns int32 [size + 1], cumulative sums from 0 on; padding counts are 0."""
    return np.append(np.int32(0), np.cumsum(_padded(counts, size), dtype=np.int32))


def _views(buffer: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns a view of the buffer, a tensor or an array, for each shape."""
    views, start = {}, 0
    for name, shape in shapes.items():
        views[name] = buffer[start : start + prod(shape)].reshape(shape)
        start += _space(shape)
    return views


def _space(shape: tuple[int, ...]) -> int:
    return cdiv(prod(shape), ALIGNMENT) * ALIGNMENT


def _from_array(shapes: Any, context: Context, buffer: np.ndarray, size: Any) -> PackedInputs:
    return PackedInputs(shapes, context, torch.from_numpy(buffer), size)
