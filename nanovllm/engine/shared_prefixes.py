"""Finds the prefixes that the sequences of a decode share, so that attention reads them once."""

from dataclasses import replace
from itertools import takewhile

import numpy as np

from nanovllm.engine.batch import Batch
from nanovllm.kernels.attention.prefix_schedule import (
    MAX_LEVELS,
    MIN_SEQS,
    PREFIX_GROUP,
    SharedPrefixes,
)

# A shared prefix costs every sequence some more partial results, about as many bytes as 16 tokens.
MIN_TOKENS = 128
# Minimum bytes that sharing must save per layer: about what the additional kernel launch costs.
MIN_SAVED_BYTES = 32 << 20


class PrefixFinder:
    """Finds the shared prefixes of decodes. It searches only if a batch differs from the last one.

    Args:
        block_size: tokens per KV block.
        group: a group of layers without a window. Sequences that share a block of this group have
            equal tokens up to the end of this block. So in all other groups without a window, their
            blocks up to there have equal contents, even if they are different blocks. The kernel
            reads the blocks of any one of the sequences.
        token_bytes: bytes of a token's keys and values in one layer on one rank.

    Attributes:
        num_steps: the number of steps with shared prefixes.
    """

    def __init__(self, block_size: int, group: int, token_bytes: int) -> None:
        self.block_size = block_size
        self.group = group
        self.min_saved_tokens = MIN_SAVED_BYTES // token_bytes
        self.num_steps = 0
        self._tables: list[list[int]] = []
        self._prefixes: SharedPrefixes | None = None

    def add_prefixes(self, batch: Batch) -> Batch:
        """Returns a decode with the prefixes that it should read once. Returns the batch itself if
        it is a prefill, or if sharing would save too little."""
        if batch.is_prefill:
            return batch
        tables = [seq.block_tables[self.group] for seq in batch.seqs]
        # A running sequence's table is only appended to, with private blocks. So while the batch
        # has the same tables, the result of the last search is still valid. Comparing is fast,
        # because the lists are usually the same objects.
        if tables != self._tables:
            self._tables = tables
            self._prefixes = find_shared_prefixes(tables, self.block_size, self.min_saved_tokens)
        if self._prefixes is None:
            return batch
        self.num_steps += 1
        return replace(batch, prefixes=self._prefixes)


def find_shared_prefixes(
    tables: list[list[int]], block_size: int, min_saved_tokens: int
) -> SharedPrefixes | None:
    """Returns the shared prefixes of block tables; None if sharing saves less than
    ``min_saved_tokens`` tokens of keys and values.

    Each table ends with a block of its own, into which the new token is written.
    """
    if len(tables) - len({table[0] for table in tables}) < MIN_SEQS - 1:
        return None
    groups: list[tuple[int, int, int, int, int]] = []
    members: list[int] = []

    def visit(seqs: list[int], depth: int, level: int, parent: int) -> None:
        """Adds the groups among ``seqs``. Adds all of ``seqs`` to ``members`` if they are in a
        group.

        All ``seqs`` have equal tables up to and including block ``depth``. The parent group covers
        the blocks before ``depth``.
        """
        # The least and the greatest table in lexicographic order have the shortest common prefix.
        tables_of_seqs = [tables[seq] for seq in seqs]
        least, greatest = min(tables_of_seqs), max(tables_of_seqs)
        num_equal = num_common_blocks(least, greatest)
        index, first = parent, len(members)
        if (num_equal - depth) * block_size >= MIN_TOKENS:
            index, level = len(groups), level + 1
            groups.append((depth * block_size, num_equal * block_size, first, len(seqs), parent))
            depth = num_equal
        if level < MAX_LEVELS:
            for child in group_by_block(seqs, num_equal):
                visit(child, depth, level, index)
        if index >= 0:
            added = set(members[first:])
            members.extend(seq for seq in seqs if seq not in added)

    def group_by_block(seqs: list[int], i: int) -> list[list[int]]:
        """Returns the sets of at least MIN_SEQS sequences that have the same block i."""
        sharing: dict[int, list[int]] = {}
        for seq in seqs:
            if i < len(tables[seq]):
                sharing.setdefault(tables[seq][i], []).append(seq)
        return [seqs for seqs in sharing.values() if len(seqs) >= MIN_SEQS]

    for seqs in group_by_block([*range(len(tables))], 0):
        visit(seqs, 0, 0, -1)
    prefixes = SharedPrefixes(np.array(groups, PREFIX_GROUP), np.array(members, np.int32))
    lens = prefixes.groups["end"] - prefixes.groups["begin"]
    saved = (lens * (prefixes.groups["num_members"] - 1)).sum()
    return prefixes if groups and saved >= min_saved_tokens else None


def num_common_blocks(table: list[int], other: list[int]) -> int:
    """Returns the number of leading blocks that are equal in two block tables."""
    pairs = zip(table, other, strict=False)  # up to the end of the shorter one
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
