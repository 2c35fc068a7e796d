"""The metadata of the step that is running, where attention layers and the head find it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Context:
    """One step over ``num_seqs`` sequences and N new tokens in all.

    Attributes:
        is_prefill: any number of new tokens per sequence; otherwise exactly one each.
        slot_mapping: int32 [N], KV-cache slot of each new token (block id x block_size +
            offset); -1 is not stored.
        block_tables: int32 [num_seqs, max_blocks], padded with 0; None for a prefill that
            reads no cached keys.
        cu_seqlens_q: int32 [num_seqs + 1], cumulative counts of new tokens (prefill).
        cu_seqlens_k: int32 [num_seqs + 1], cumulative context lengths (prefill).
        max_seqlen_q: most new tokens of a sequence, or more (prefill).
        max_seqlen_k: longest context of a sequence, or more.
        context_lens: int32 [num_seqs], tokens to attend to, the new one included (decode).
        decode_work: int32, how the attention backend divides a decode; None if it does not.
        output_indices: int32 [num_seqs], rows of which the last layer's output is needed: of each
            sequence its last one or none, then any, for nothing (prefill); None for all.
        cu_num_outputs: int32 [num_seqs + 1], cumulative counts of each sequence's rows in
            ``output_indices``; None if those are.
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
    context_lens: torch.Tensor | None = None
    decode_work: torch.Tensor | None = None
    output_indices: torch.Tensor | None = None
    cu_num_outputs: torch.Tensor | None = None
    logits_indices: torch.Tensor | None = None

    def of_outputs(self) -> "Context":
        """The same for queries of only the rows in ``output_indices``."""
        return replace(self, cu_seqlens_q=self.cu_num_outputs, max_seqlen_q=1)


_EMPTY = Context()
_context: ContextVar[Context] = ContextVar("nanovllm_step", default=_EMPTY)


def get_context() -> Context:
    return _context.get()


def set_context(context: Context) -> None:
    _context.set(context)


def reset_context() -> None:
    _context.set(_EMPTY)


@contextmanager
def step_context(context: Context) -> Iterator[None]:
    """Makes ``context`` current for one forward pass, also if that raises."""
    set_context(context)
    try:
        yield
    finally:
        reset_context()
