"""Schedule of shared-prefix decode attention: which programs read the prefixes that sequences of a
decode share.

Sequences whose block tables begin with the same blocks are a group. The keys and values of these
blocks are read once for a tile of the group's queries, as in Hydragen (arXiv:2402.05099) and in
FlashInfer's cascade attention. A program gets a prefix split: some tokens of the prefix, for the
queries of some of the group's sequences. The KV splits of split_kv.py cover the rest of each
context. Partial results of both kinds are combined in the same way.

Groups form up to MAX_LEVELS levels. For example, all sequences of a batch may share a system
prompt, and the completions of each prompt may share that prompt too. A child's prefix begins where
that of its parent ends.
"""

from typing import NamedTuple

import numpy as np

from nanovllm.kernels.attention.split_kv import (
    KV_SPLIT,
    KV_SPLIT_WORDS,
    PrefixParts,
    make_split_kv_schedule,
    max_partial_slots,
)
from nanovllm.utils.math import cdiv

MAX_LEVELS = 2
MIN_SEQS = 4  # of a group
MIN_SPLIT = 128  # tokens of a prefix split: shorter ones cost more for partial results

# Tokens [begin, end) of the contexts of sequences, which have the same blocks there.
PREFIX_GROUP = np.dtype(
    [
        ("begin", "<i4"),
        ("end", "<i4"),
        ("first_member", "<i4"),
        ("num_members", "<i4"),
        ("parent", "<i4"),  # index of the group whose prefix ends at ``begin``; -1 for begin 0
    ]
)

# One prefix split: tokens [begin, end) of the contexts of a tile of a group's members. Each split
# has one tile of queries per KV head.
PREFIX_SPLIT = np.dtype(
    [
        ("first_member", "<i4"),
        ("num_members", "<i4"),
        ("begin", "<i4"),
        ("end", "<i4"),
        ("split", "<i4"),  # index among the splits of each of these sequences
        ("num_prefix_splits", "<i4"),  # of the schedule, the same in each row
        ("padding", "<i4", 2),
    ]
)
PREFIX_SPLIT_WORDS = PREFIX_SPLIT.itemsize // 4
assert PREFIX_SPLIT_WORDS == KV_SPLIT_WORDS  # rows of both kinds are in one array
MEMBER_WORDS = 2  # int32 words per member: sequence index, first slot


class SharedPrefixes(NamedTuple):
    """The prefixes that sequences of a decode share.

    Attributes:
        groups: PREFIX_GROUP [num_groups], parents before their children.
        members: int32 [num_members], indices of sequences in the batch. Those of a group are
            consecutive.
    """

    groups: np.ndarray
    members: np.ndarray


NO_PREFIXES = SharedPrefixes(np.zeros(0, PREFIX_GROUP), np.zeros(0, np.int32))


class PrefixTile(NamedTuple):
    """Tile and launch sizes of the kernel for shared prefixes.

    Attributes:
        num_rows: rows of queries: sequences times query heads that share a KV head, where the
            number of heads is rounded up to a power of two.
        num_seqs: sequences per tile.
        num_keys: keys per iteration.
        num_warps: warps per program.
        num_stages: pipeline stages.
        num_programs: number of programs. Each computes every num_programs-th tile of queries.
    """

    num_rows: int
    num_seqs: int
    num_keys: int
    num_warps: int
    num_stages: int
    num_programs: int


class ScheduleLayout(NamedTuple):
    """The parts of a schedule with shared prefixes, by their first row.

    Attributes:
        prefix_splits: the row of the first prefix split. The rows before it are KV splits.
        members: the row in which the members begin.
        num_rows: the number of all rows.
    """

    prefix_splits: int
    members: int
    num_rows: int


def schedule_layout(
    num_seqs: int, kv_heads: int, num_kv_splits: int, tile: PrefixTile
) -> ScheduleLayout:
    """Returns the layout of a schedule with shared prefixes, which suffices for any prefixes.

    Args:
        num_kv_splits: number of rows of the schedule without shared prefixes.
    """
    # A sequence is in at most one group of each level, and a group has at most one partial tile.
    num_tiles = MAX_LEVELS * (cdiv(num_seqs, MIN_SEQS) + cdiv(num_seqs, tile.num_seqs))
    members = num_kv_splits + num_tiles + cdiv(tile.num_programs, kv_heads)
    num_rows = members + cdiv(num_seqs * MEMBER_WORDS, KV_SPLIT_WORDS)
    return ScheduleLayout(num_kv_splits, members, num_rows)


def max_shared_slots(num_seqs: int, kv_heads: int, num_programs: int, tile: PrefixTile) -> int:
    """Returns the number of slots for partial results that suffices for any prefixes.

    A sequence with a shared prefix needs a slot for each group that it is in, and one for the rest
    of its context. Slots for further splits are bounded by the target numbers of programs.
    """
    num_more = cdiv(tile.num_programs, kv_heads) * tile.num_seqs
    return (MAX_LEVELS + 1) * num_seqs + num_more + max_partial_slots(kv_heads, num_programs)


def make_shared_schedule(
    context_lens: np.ndarray,
    kv_heads: int,
    num_keys: int,
    num_programs: int,
    window: int | None,
    prefixes: SharedPrefixes,
    tile: PrefixTile,
) -> np.ndarray:
    """Makes a split-KV schedule in which shared prefixes are read once for a tile of sequences.

    Args:
        context_lens: int32 [num_seqs], longer than the shared prefixes.
        kv_heads, num_keys, num_programs, window: as for ``make_split_kv_schedule``.
        prefixes: none if there is a window, because it may not reach back to them.

    Returns:
        int32 [num_rows, KV_SPLIT_WORDS], in the layout of ``schedule_layout``. The number of
        rows depends only on the number of sequences.
    """
    num_seqs = len(context_lens)
    prefix_splits, parts = divide_prefixes(prefixes, num_seqs, kv_heads, tile)
    assert (parts.ends < np.maximum(context_lens, 1)).all()
    kv_splits = make_split_kv_schedule(
        context_lens, kv_heads, num_keys, num_programs, window, parts
    )
    layout = schedule_layout(num_seqs, kv_heads, len(kv_splits), tile)
    schedule = np.zeros((layout.num_rows, KV_SPLIT_WORDS), np.int32)
    schedule[: len(kv_splits)] = kv_splits
    rows = schedule[layout.prefix_splits : layout.members].view(PREFIX_SPLIT)[:, 0]
    rows[: len(prefix_splits)] = prefix_splits
    used = kv_splits.view(KV_SPLIT)[:, 0]
    used = used[used["num_splits"] > 0]
    first_slots = np.zeros(num_seqs, np.int32)
    first_slots[used["seq"]] = used["first_slot"]
    members = schedule[layout.members :].reshape(-1, MEMBER_WORDS)[: len(prefixes.members)]
    members[:, 0], members[:, 1] = prefixes.members, first_slots[prefixes.members]
    return schedule


def divide_prefixes(
    prefixes: SharedPrefixes, num_seqs: int, kv_heads: int, tile: PrefixTile
) -> tuple[np.ndarray, PrefixParts]:
    """Divides prefixes among programs.

    Returns:
        PREFIX_SPLIT [number of splits], the longest first, and what they cover of each sequence.
    """
    groups, members = prefixes
    lens, sizes = groups["end"] - groups["begin"], groups["num_members"]
    num_tiles = -(-sizes // tile.num_seqs)
    target = max((num_tiles * lens).sum() / cdiv(tile.num_programs, kv_heads), MIN_SPLIT)
    # Rounded to the nearest, because one more round of programs costs more than longer splits.
    num_splits = np.maximum(np.rint(lens / target), 1).astype(np.int32)
    length = -(-lens // (num_splits * tile.num_keys)) * tile.num_keys
    num_splits = -(-lens // length)
    assert MAX_LEVELS == 2  # so that a parent has no parent
    num_before = np.where(groups["parent"] < 0, 0, num_splits[groups["parent"]])

    group, index = _ranges(num_tiles * num_splits)
    tile_index, split = np.divmod(index, num_splits[group])
    splits = np.zeros(len(group), PREFIX_SPLIT)
    first = tile_index * tile.num_seqs
    splits["first_member"] = groups["first_member"][group] + first
    splits["num_members"] = np.minimum(sizes[group] - first, tile.num_seqs)
    splits["begin"] = groups["begin"][group] + split * length[group]
    splits["end"] = np.minimum(splits["begin"] + length[group], groups["end"][group])
    splits["split"] = num_before[group] + split
    splits["num_prefix_splits"] = len(splits)
    splits = splits[np.argsort(splits["begin"] - splits["end"], kind="stable")]

    group, index = _ranges(sizes)
    seqs = members[groups["first_member"][group] + index]
    counts = np.bincount(seqs, num_splits[group], num_seqs).astype(np.int32)
    ends = np.zeros(num_seqs, np.int32)
    ends[seqs] = groups["end"][group]  # of a parent, then overwritten by that of its child
    return splits, PrefixParts(ends, counts)


def _ranges(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns i and j for all pairs (i, j) with j < counts[i], in order."""
    i = np.repeat(np.arange(len(counts)), counts)
    return i, np.arange(len(i)) - np.repeat(counts.cumsum() - counts, counts)
