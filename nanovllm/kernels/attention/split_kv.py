"""Split-KV schedule of a decode step (Flash-Decoding): divides contexts among a kernel's programs.

With one program per sequence and KV head, contexts of unequal length leave multiprocessors idle at
the end, and a small batch never fills the GPU. So long contexts are split, such that each
multiprocessor gets a few splits, and the longest splits start first. FlashInfer's scheduler
(arXiv:2501.01005) does the same. Layers with the same window share a schedule. The host knows the
lengths, so it computes the schedules before the launch.
"""

from typing import NamedTuple

import numpy as np

from nanovllm.utils.math import cdiv

# One KV split: tokens [begin, end) of one sequence. Each split has one program per KV head.
KV_SPLIT = np.dtype(
    [
        ("seq", "<i4"),
        ("begin", "<i4"),
        ("end", "<i4"),
        # number of the sequence's splits, including prefix splits; 0 marks an unused row
        ("num_splits", "<i4"),
        ("split", "<i4"),  # index among the sequence's splits
        ("first_slot", "<i4"),  # slot of the partial result of the sequence's split 0
        ("padding", "<i4", 2),
    ]
)
KV_SPLIT_WORDS = KV_SPLIT.itemsize // 4


class PrefixParts(NamedTuple):
    """The part of each context that the prefix kernel reads (prefix_schedule.py).

    Attributes:
        ends: int32 [num_seqs], the number of leading tokens.
        num_splits: int32 [num_seqs], the number of splits. They are a sequence's first ones.
    """

    ends: np.ndarray
    num_splits: np.ndarray


def max_num_splits(num_seqs: int, kv_heads: int, num_programs: int) -> int:
    """Returns the number of rows of a schedule, which suffices for any context lengths."""
    return num_seqs + cdiv(num_programs, kv_heads)


def max_window_splits(window: int, tile: int) -> int:
    """Returns the largest number of splits of one sequence in a layer with a window: the number of
    tiles of ``tile`` tokens that ``window`` consecutive tokens can overlap."""
    return cdiv(window - 1, tile) + 1


def max_partial_slots(kv_heads: int, num_programs: int) -> int:
    """Returns the number of slots for partial results that suffices for any batch.

    Only sequences with several splits need slots, one per split. Such a sequence is longer than the
    target length of a split. So it has at most ceil(length / target length) splits, which is less
    than 2 * length / target length.
    """
    return 2 * cdiv(num_programs, kv_heads)


def make_split_kv_schedule(
    context_lens: np.ndarray,
    kv_heads: int,
    tile: int,
    num_programs: int,
    window: int | None = None,
    prefix_parts: PrefixParts | None = None,
) -> np.ndarray:
    """Splits contexts at multiples of ``tile``, so that about ``num_programs`` programs run.

    Args:
        context_lens: int32 [num_seqs]. A sequence without tokens has one empty split.
        kv_heads: number of programs per split.
        tile: tokens that a program reads at a time.
        num_programs: target number of programs.
        window: the number of tokens that are read, at the end of each context; None for all. The
            first split begins at the start of the tile that has the window's first token.
        prefix_parts: what other programs read of each context; None for nothing.

    Returns:
        int32 [max_num_splits, KV_SPLIT_WORDS], a KV_SPLIT per row, the longest first. The number of
        rows depends only on the number of sequences, so a CUDA graph can replay the launch.
    """
    num_seqs, first = len(context_lens), np.zeros_like(context_lens)
    if window is not None:
        first = np.maximum(context_lens - window, 0) // tile * tile
    if prefix_parts is not None:
        first = np.maximum(first, prefix_parts.ends)
    lens = context_lens - first
    target = max(cdiv(int(lens.sum()), cdiv(num_programs, kv_heads)), 1)
    num_splits = np.maximum(-(-lens // target), 1)
    length = np.maximum(-(-lens // (num_splits * tile)) * tile, tile)
    # Rounding has made splits longer, so fewer may suffice.
    num_splits = np.maximum(-(-lens // length), 1)
    seq = np.repeat(np.arange(num_seqs), num_splits)
    split = np.arange(len(seq)) - np.repeat(num_splits.cumsum() - num_splits, num_splits)
    begin = first[seq] + split * length[seq]
    if prefix_parts is not None:
        num_splits = num_splits + prefix_parts.num_splits
        split += prefix_parts.num_splits[seq]
    num_slots = np.where(num_splits > 1, num_splits, 0)
    schedule = np.zeros(max_num_splits(num_seqs, kv_heads, num_programs), KV_SPLIT)
    used = schedule[: len(seq)]
    used["seq"], used["split"], used["num_splits"] = seq, split, num_splits[seq]
    used["first_slot"] = (num_slots.cumsum() - num_slots)[seq]
    used["begin"] = begin
    used["end"] = np.minimum(used["begin"] + length[seq], context_lens[seq])
    used[:] = used[np.argsort(used["begin"] - used["end"], kind="stable")]
    return schedule.view(np.int32).reshape(-1, KV_SPLIT_WORDS)
