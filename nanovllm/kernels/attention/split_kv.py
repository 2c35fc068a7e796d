"""Split-KV schedule of a decode step (Flash-Decoding): divides contexts among a kernel's programs.

With one program per sequence and KV head, contexts of unequal length leave multiprocessors idle at
the end, and a small batch never fills the GPU. So long contexts are split, such that each
multiprocessor gets a few splits, and the longest splits start first. FlashInfer's scheduler
(arXiv:2501.01005) does the same. Layers with the same window share a schedule. The host knows the
lengths, so it computes the schedules before the launch.
"""

from functools import lru_cache
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
MAX_TARGETS = 32  # lengths of splits that are compared
MAX_CACHED_SEQS = 32  # with more, some length in tiles changes in most steps


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
    """Splits contexts at multiples of ``tile``, for ``num_programs`` programs, which run at once.
    There may be some more, which start when others end.

    Args:
        context_lens: int32 [num_seqs]. A sequence without tokens has one empty split.
        kv_heads: number of programs per split.
        tile: tokens that a program reads at a time.
        num_programs: number of programs that run at once.
        window: the number of tokens that are read, at the end of each context; None for all. The
            first split begins at the start of the tile that has the window's first token.
        prefix_parts: what other programs read of each context; None for nothing.

    Returns:
        int32 [max_num_splits, KV_SPLIT_WORDS], a KV_SPLIT per row, the longest first.
        The number of rows depends only on that of sequences, so a CUDA graph can replay the launch.
    """
    num_seqs, first = len(context_lens), np.zeros_like(context_lens)
    if window is not None:
        first = np.maximum(context_lens - window, 0) // tile * tile
    first_splits = np.zeros_like(first)
    if prefix_parts is not None:
        first, first_splits = np.maximum(first, prefix_parts.ends), prefix_parts.num_splits
    num_rows = max_num_splits(num_seqs, kv_heads, num_programs)
    arrays = -(-(context_lens - first) // tile), first, first_splits
    settings = tile, max(num_programs // kv_heads, 1), num_rows
    if num_seqs > MAX_CACHED_SEQS:
        schedule, ends = _split_tiles(*arrays, *settings)
    else:
        schedule, ends = _split_few(*(x.astype(np.int32).tobytes() for x in arrays), *settings)
        schedule = schedule.copy()
    used = schedule[: len(ends)]
    np.minimum(ends, context_lens[used["seq"]], out=used["end"])
    used[:] = used[np.argsort(used["begin"] - used["end"], kind="stable")]
    return schedule.view(np.int32).reshape(-1, KV_SPLIT_WORDS)


@lru_cache(maxsize=16)
def _split_few(
    lens: bytes, first: bytes, first_splits: bytes, tile: int, num_splits: int, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Computes ``_split_tiles`` of arrays that are given as the bytes of int32. In tiles, the
    lengths of few contexts seldom change from one step to the next."""
    a, b, c = (np.frombuffer(x, np.int32) for x in (lens, first, first_splits))
    return _split_tiles(a, b, c, tile, num_splits, num_rows)


def _target_length(lens: np.ndarray, num_splits: int) -> int:
    """Chooses the largest length of a split, in tiles: the one with which the last split probably
    ends first.

    ``num_splits`` splits are computed at once, the longest ones, and the others after them. If all
    have the same length, longer splits are better than a few that start late.
    """
    lens = lens[lens > 0]  # without the rows that pad a CUDA graph
    least = max(cdiv(int(lens.sum()), num_splits), 1)
    if not 0 < len(lens) <= num_splits:  # some start late with any target
        return least
    targets = np.arange(least, 2 * least, cdiv(least, MAX_TARGETS))
    counts = -(-lens // targets[:, None])
    lengths = -(-lens // counts)
    order = np.argsort(-lengths, axis=1)
    lengths = np.take_along_axis(lengths, order, axis=1)
    num_started = np.take_along_axis(counts, order, axis=1).cumsum(axis=1)
    late = (lengths * (num_started > num_splits)).max(axis=1)
    # A late split ends after this many times its length. The fewer are late, the more bandwidth
    # each one has. Fitted to times on an H200.
    late_end = 1.3 + 0.6 * (num_started[:, -1] / num_splits - 1)
    return int(targets[np.maximum(lengths[:, 0], late_end * late).argmin()])


def _split_tiles(
    lens: np.ndarray,
    first: np.ndarray,
    first_splits: np.ndarray,
    tile: int,
    num_splits: int,
    num_rows: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the schedule of contexts whose lengths are known in tiles.

    Args:
        lens: [num_seqs], the number of tiles of each context, from ``first`` on.
        first: [num_seqs], the first token of each context that is read.
        first_splits: [num_seqs], the number of each context's splits of a shared prefix.
        num_splits: number of splits that are computed at once.
        num_rows: of the schedule.

    Returns:
        The schedule, KV_SPLIT [num_rows], and, for each used row, the end of its last tile.
    """
    target = _target_length(lens, num_splits)
    counts = np.maximum(-(-lens // target), 1)
    length = np.maximum(-(-lens // counts), 1)
    # Rounding has made splits longer, so fewer may suffice.
    counts = np.maximum(-(-lens // length), 1)
    seq = np.repeat(np.arange(len(lens)), counts)
    split = np.arange(len(seq)) - np.repeat(counts.cumsum() - counts, counts)
    begin = first[seq] + split * length[seq] * tile
    end = np.minimum(begin + length[seq] * tile, first[seq] + lens[seq] * tile)
    counts = counts + first_splits
    num_slots = np.where(counts > 1, counts, 0)
    schedule = np.zeros(num_rows, KV_SPLIT)
    used = schedule[: len(seq)]
    used["seq"], used["split"], used["num_splits"] = seq, split + first_splits[seq], counts[seq]
    used["first_slot"] = (num_slots.cumsum() - num_slots)[seq]
    used["begin"] = begin
    return schedule, end.astype(np.int32)
