"""Turns a scheduled batch into tensors, without changing it.

All tensors are int32, so that one buffer holds them. This is enough for slot indices, because a KV
cache has fewer than 2^31 slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.kernels.attention.block_tables import BlockTableUpdate
from nanovllm.utils.context import Context
from nanovllm.utils.math import cdiv
from nanovllm.utils.packed_tensors import ALIGNMENT, PackedTensors

# The tensors of ModelInputs outside ``context`` and ``tables``.
OWN_TENSORS = ("input_ids", "positions", "sampling_rows")
CONTEXT_FIELDS = tuple(field.name for field in fields(Context))


class GraphSize(NamedTuple):
    """The size of a captured step: its maximum number of new tokens and of sequences, and whether
    it is a decode that reads shared prefixes once."""

    is_prefill: bool
    num_tokens: int
    num_seqs: int
    shares_prefixes: bool = False


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The inputs of one step.

    Attributes:
        input_ids: int32 [N]. A token that the last step sampled may not be on the host yet. Its
            entry is then -1 - row, where row is its row among the sampled tokens.
        positions: int32 [N].
        context: the metadata for attention and the output head, of all groups of layers, without
            the block tables.
        tables: the update of the block tables.
        reads_cache: whether attention reads keys and values of earlier steps.
        sampling_rows: int32 [num_seqs, ROW_WORDS], the SAMPLING_ROW of each sampled sequence, then
            padding rows. None if the forward pass does not sample.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    context: Context
    tables: BlockTableUpdate
    reads_cache: bool
    sampling_rows: torch.Tensor | None = None

    def pack(self, graph_size: GraphSize | None = None, pin_memory: bool = False) -> "PackedInputs":
        """Copies all tensors to one buffer on the host. The new blocks come last, because only
        their number varies in a captured step. All other tensors have fixed offsets."""
        context = {name: getattr(self.context, name) for name in CONTEXT_FIELDS}
        own = {name: getattr(self, name) for name in OWN_TENSORS}
        values = {**context, **own, **self.tables._asdict()}
        tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
        others = {name: x for name, x in context.items() if name not in tensors}
        packed = PackedTensors.pack(tensors, pin_memory)
        return PackedInputs(packed, Context(**others), self.reads_cache, graph_size)


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """ModelInputs in one buffer.

    Attributes:
        tensors: all tensors of the inputs, the context and the block tables, by field name.
        context: the context's fields that are not tensors.
        reads_cache: see ModelInputs.
        graph_size: the captured step that they are padded for, if any.
    """

    tensors: PackedTensors
    context: Context
    reads_cache: bool
    graph_size: GraphSize | None = None

    def unpack(self, buffer: torch.Tensor | None = None) -> ModelInputs:
        """Returns the inputs as views of ``buffer``, a copy of the packed tensors; by default as
        views of the packed tensors themselves."""
        views = self.tensors.views(self.tensors.buffer if buffer is None else buffer)
        own = {name: views.pop(name, None) for name in OWN_TENSORS}
        tables = BlockTableUpdate(*[views.pop(name) for name in BlockTableUpdate._fields])
        context = replace(self.context, **views)
        return ModelInputs(context=context, tables=tables, reads_cache=self.reads_cache, **own)

    def to(self, device: torch.device) -> ModelInputs:
        if device.type == "cpu":
            return self.unpack()
        buffer = torch.empty_like(self.tensors.buffer, device=device)
        return self.unpack(self.tensors.copy_to(buffer))


def prepare_prefill(
    batch: Batch, block_size: int, num_tokens: int = 0, num_seqs: int = 0, max_context: int = 0
) -> ModelInputs:
    """Builds the inputs of a prefill. The new tokens of all sequences are concatenated.

    There are as many rows of logits as sequences. The first rows are the last tokens of the
    sequences that sample. The other rows are padding: the step's first token again. The last layer
    computes only these tokens, unless a sequence needs the log-probabilities of its prompt.

    The last three arguments are for a captured step, whose contexts have up to ``max_context``
    tokens and whose attention always reads the cache. All shapes depend only on these arguments,
    except for the number of new blocks. Padding tokens, up to ``num_tokens``, belong to no
    sequence, and their keys and values are not stored (slot -1). Padding sequences, up to
    ``num_seqs``, have no tokens.
    """
    items = batch.items
    positions = [np.arange(item.start, item.end, dtype=np.int32) for item in items]
    tokens = [np.asarray(item.seq.token_ids[item.start : item.end], np.int32) for item in items]
    lens_q, lens_k = [item.num_tokens for item in items], [item.end for item in items]
    num_tokens, num_seqs = num_tokens or sum(lens_q), num_seqs or len(items)
    cu_seqlens_q, slot_mapping = _cumsum(lens_q, num_seqs), _no_slots(batch, num_tokens)
    for item, pos, start in zip(items, positions, cu_seqlens_q, strict=False):
        slot_mapping[:, start : start + len(pos)] = _slots(item, pos, block_size)
    samples = _padded([item.samples for item in items], num_seqs)
    rows = _padded(cu_seqlens_q[1:][samples == 1] - 1, num_seqs)
    outputs = {"output_indices": rows, "cu_num_outputs": _cumsum(samples, num_seqs)}
    if any(item.seq.wants_prompt_logprobs for item in items):
        outputs = {"logits_indices": rows}
    return ModelInputs(
        input_ids=torch.from_numpy(_concatenated(tokens, num_tokens)),
        positions=torch.from_numpy(_concatenated(positions, num_tokens)),
        context=Context(
            is_prefill=True,
            slot_mapping=torch.from_numpy(slot_mapping),
            cu_seqlens_q=torch.from_numpy(cu_seqlens_q),
            cu_seqlens_k=torch.from_numpy(_cumsum(lens_k, num_seqs)),
            max_seqlen_q=num_tokens if max_context else max(lens_q),
            max_seqlen_k=max_context or max(lens_k),
            num_keys=0 if max_context else sum(lens_k),
            **{name: torch.from_numpy(indices) for name, indices in outputs.items()},
        ),
        tables=prepare_block_tables(batch, num_seqs),
        reads_cache=bool(max_context) or any(item.start for item in items),
    )


def prepare_decode(
    batch: Batch,
    block_size: int,
    padded_size: int = 0,
    split_kv: Callable[[np.ndarray, Any], np.ndarray | None] | None = None,
) -> ModelInputs:
    """Builds the inputs of a decode, which computes each sequence's last token.

    For a captured step, padding rows are added up to ``padded_size``. Their keys and values are not
    stored (slot -1), and their context length is 0. ``split_kv`` computes the split-KV schedules
    from the context lengths and the batch's shared prefixes.
    """
    seqs, num_seqs = batch.seqs, len(batch)
    size = max(num_seqs, padded_size)
    input_ids, positions, context_lens = (np.zeros(size, dtype=np.int32) for _ in range(3))
    input_ids[:num_seqs] = [seq.last_token for seq in seqs]
    context_lens[:num_seqs] = batch.ends
    positions[:num_seqs] = context_lens[:num_seqs] - 1
    offsets, slot_mapping = positions[:num_seqs] % block_size, _no_slots(batch, size)
    last_blocks = np.fromiter(chain.from_iterable([seq.last_blocks for seq in seqs]), np.int32)
    slot_mapping[:, :num_seqs] = last_blocks.reshape(-1, batch.num_groups).T * block_size + offsets
    schedule = None if split_kv is None else split_kv(context_lens, batch.prefixes)
    return ModelInputs(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions),
        context=Context(
            slot_mapping=torch.from_numpy(slot_mapping),
            max_seqlen_k=int(context_lens.max()),
            context_lens=torch.from_numpy(context_lens),
            split_kv_schedule=None if schedule is None else torch.from_numpy(schedule),
        ),
        tables=prepare_block_tables(batch, size),
        reads_cache=True,
    )


def prepare_block_tables(batch: Batch, num_rows: int) -> BlockTableUpdate:
    """Builds the update of the block tables, with the blocks that the device does not have. They
    are ordered by sequence, then by group."""
    seqs, num_seqs = batch.seqs, len(batch)
    entries = np.zeros((batch.num_groups, num_rows, 4), np.int32)
    rows, lens, first_new, num_new = entries[0].T
    rows[num_seqs:] = -1
    rows[:num_seqs] = [seq.table_row for seq in seqs]
    lens[:num_seqs] = [seq.table_len for seq in seqs]
    num_new[:num_seqs] = [seq.num_sent_blocks for seq in seqs]  # the old blocks
    np.subtract(lens, num_new, out=num_new)
    new_blocks: list[int] = []
    for i in np.flatnonzero(num_new):
        first_new[i] = len(new_blocks)
        for table in seqs[i].block_tables:
            new_blocks += table[seqs[i].num_sent_blocks : seqs[i].table_len]
    for group in range(1, batch.num_groups):
        entries[group] = entries[0]
        entries[group, :, 2] += group * num_new
    return BlockTableUpdate(*map(torch.from_numpy, (entries, np.array(new_blocks, np.int32))))


def _slots(item: ScheduledSequence, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Returns the KV slots of the new tokens, [groups, tokens]; -1 for a cached token, which is
    computed only for its logits."""
    length = item.seq.table_len
    blocks = np.array([table[:length] for table in item.seq.block_tables], np.int32)
    slots = blocks[:, positions // block_size] * block_size + positions % block_size
    slots[:, positions < item.seq.num_cached_tokens] = -1
    return slots


def _no_slots(batch: Batch, num_tokens: int) -> np.ndarray:
    """Returns int32 [groups, num_tokens or more], all -1. Its rows are aligned."""
    return np.full((batch.num_groups, cdiv(num_tokens, ALIGNMENT) * ALIGNMENT), -1, np.int32)


def _padded(values: Any, size: int) -> np.ndarray:
    """Returns int32 [size]: the values, then zeros."""
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out


def _concatenated(parts: list[np.ndarray], size: int) -> np.ndarray:
    """Returns int32 [size]: the concatenated parts, then zeros."""
    return _padded(np.concatenate(parts) if parts else (), size)


def _cumsum(counts: Any, size: int) -> np.ndarray:
    """Returns int32 [size + 1], the cumulative sums of the counts, starting with 0."""
    return np.append(np.int32(0), np.cumsum(_padded(counts, size), dtype=np.int32))
