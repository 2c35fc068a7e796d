"""The metadata of the current step, which attention layers and the LM head read.

Layers with the same window are in one or more groups, and the layers of a group share block tables.
Each group has a context. The contexts differ only in ``slot_mapping``, ``block_tables`` and
``split_kv_schedule``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Context:
    """The metadata of one step with ``num_seqs`` sequences and N new tokens in total.

    Attributes:
        is_prefill: whether sequences may have any number of new tokens. In a decode step each has
            exactly one.
        slot_mapping: int32 [N], KV-cache slot of each new token: block id x block_size + offset in
            the block. A token with slot -1 is not stored.
        block_tables: int32 [num_seqs, max_blocks]; None for a prefill that reads no cached keys.
            Entries after a sequence's last block are ids of any blocks, and those of blocks outside
            of the group's window are undefined.
        cu_seqlens_q: int32 [num_seqs + 1], cumulative counts of new tokens (prefill).
        cu_seqlens_k: int32 [num_seqs + 1], cumulative context lengths (prefill).
        max_seqlen_q: an upper bound of new tokens per sequence (prefill).
        max_seqlen_k: an upper bound of context lengths.
        num_keys: the sum of context lengths (prefill); 0 in a captured step, in which it varies.
        context_lens: int32 [num_seqs], tokens to attend to, the new one included (decode).
        split_kv_schedule: int32, made by the attention backend's ``split_kv`` (decode); None if
            the backend uses none.
        output_indices: int32 [num_seqs], rows that the last layer must compute (prefill); None for
            all rows. They are the last rows of the sequences that need an output, then padding.
        cu_num_outputs: int32 [num_seqs + 1], cumulative counts of each sequence's rows in
            ``output_indices``; None if ``output_indices`` is None.
        logits_indices: int32 [num_seqs], rows of the last layer's output that need logits; None for
            all.
    """

    is_prefill: bool = False
    slot_mapping: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    num_keys: int = 0
    context_lens: torch.Tensor | None = None
    split_kv_schedule: torch.Tensor | None = None
    output_indices: torch.Tensor | None = None
    cu_num_outputs: torch.Tensor | None = None
    logits_indices: torch.Tensor | None = None

    def of_groups(
        self, windows: Sequence[int | None], num_tokens: int, tables: torch.Tensor | None
    ) -> "list[Context]":
        """Splits a context of all groups of layers into one for each group. In ``self``,
        ``slot_mapping`` is int32 [groups, N or more], and ``split_kv_schedule`` has a row for each
        distinct window.

        Args:
            windows: the window of each group.
            num_tokens: N.
            tables: int32 [groups, num_seqs, max_blocks], the block tables; None if no cached keys
                are read.
        """
        distinct, schedules = [*dict.fromkeys(windows)], self.split_kv_schedule
        assert self.slot_mapping is not None
        return [
            replace(
                self,
                slot_mapping=self.slot_mapping[group, :num_tokens],
                block_tables=None if tables is None else tables[group],
                split_kv_schedule=None if schedules is None else schedules[distinct.index(window)],
            )
            for group, window in enumerate(windows)
        ]

    def for_output_rows(self) -> "Context":
        """Returns the context of a step whose only queries are the rows in ``output_indices``."""
        return replace(self, cu_seqlens_q=self.cu_num_outputs, max_seqlen_q=1)


_EMPTY = (Context(),)
_contexts: ContextVar[tuple[Context, ...]] = ContextVar("nanovllm_step", default=_EMPTY)


def get_context(group: int = 0) -> Context:
    """Returns the context of a group of attention layers."""
    return _contexts.get()[group]


@contextmanager
def step_context(*contexts: Context) -> Iterator[None]:
    """Sets each group's context for one forward pass, and resets them even if that raises."""
    token = _contexts.set(contexts)
    try:
        yield
    finally:
        _contexts.reset(token)
