"""Admission when many requests are known at once: equal prefixes together, the longest first."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from nanovllm.engine.policy import FirstComeFirstServed
from nanovllm.engine.prefix_cache import chain_hash
from nanovllm.engine.sequence import Sequence

POOL_SIZE = 2**14  # maximum number of sequences that are ordered together
# Sequences that begin with one of this many recently admitted prefixes are admitted next, because
# the prefix is probably still in the prefix cache.
NUM_RECENT = 16


class OfflineOrder(FirstComeFirstServed):
    """Reorders the sequences with ``may_reorder`` so that the whole job takes less time.

    - Sequences with equal first blocks are admitted one after the other, so that these blocks are
      still in the prefix cache.
    - Among sequences with different first blocks, the one that may generate the most tokens, a
      rounded number, is admitted first, and then those that share its first blocks. So short
      sequences finish last, and few steps run with small batches.

    Preempted sequences and those without ``may_reorder`` are admitted before all of these, first
    come, first served. Sequences are reordered within pools of POOL_SIZE, and the pools are
    admitted in order, so at most POOL_SIZE - 1 reordered sequences overtake an earlier one.

    Args:
        shares_prefixes: whether sequences can share blocks.
    """

    def __init__(self, shares_prefixes: bool = True) -> None:
        super().__init__()
        self.shares_prefixes = shares_prefixes
        self.pools: deque[_Pool] = deque()  # only the last one takes new sequences
        self.pool_of: dict[Sequence, _Pool] = {}  # of each waiting sequence, oldest first
        # The same sequences, and some that no longer wait. A deque, because finding the first key
        # of a dict is slow after many removals.
        self.arrivals: deque[Sequence] = deque()

    @property
    def head(self) -> Sequence:
        return self[0] if deque.__len__(self) else self.pools[0].head

    def add(self, seq: Sequence) -> None:
        if not seq.may_reorder:
            self.append(seq)
            return
        if not self.pools or self.pools[-1].num_added >= POOL_SIZE:
            self.pools.append(_Pool(self.shares_prefixes))
        pool = self.pools[-1]
        self.pool_of[seq] = pool  # first, so that ``remove`` can undo an interrupted call
        self.arrivals.append(seq)
        pool.add(seq)

    def popleft(self) -> Sequence:
        if deque.__len__(self):
            return super().popleft()
        seq, was_grouped = self.pools[0].admit()
        while self.arrivals[0] not in self.pool_of:
            self.arrivals.popleft()
        if seq is not self.arrivals[0]:  # it overtakes an earlier one
            self.num_grouped += was_grouped
            self.num_longest_first += not was_grouped
        del self.pool_of[seq]
        if not self.pools[0].root.members:
            self.pools.popleft()
        return seq

    def remove(self, seq: Sequence) -> None:
        pool = self.pool_of.pop(seq, None)
        if pool is None:
            super().remove(seq)
            return
        pool.remove(seq)
        if not pool.root.members:
            self.pools.remove(pool)
        if not self.pool_of:
            self.arrivals.clear()

    def clear(self) -> None:
        super().clear()
        self.pools.clear()
        self.pool_of.clear()
        self.arrivals.clear()

    def __len__(self) -> int:
        return deque.__len__(self) + len(self.pool_of)

    def __iter__(self) -> Iterator[Sequence]:
        yield from super().__iter__()
        yield from self.pool_of

    def __contains__(self, seq: object) -> bool:
        return seq in self.pool_of or super().__contains__(seq)


def _rank(seq: Sequence) -> tuple[int, int]:
    """Returns the sort key of a sequence among those with other first blocks.

    Sequences that may generate more tokens come first, then older ones. Only the two leading bits
    of the number of tokens count. If sequences that start together also ended together, many
    prompts would start in one large prefill, and the device would wait for their results.
    """
    num_new_tokens = seq.max_len - seq.num_tokens
    shift = max(0, num_new_tokens.bit_length() - 2)
    return -(num_new_tokens >> shift << shift), seq.seq_id


class _Group:
    """Sequences with the same first blocks: a node of a radix tree.

    Attributes:
        hashes: the chain hashes of the shared blocks, possibly followed by those of later blocks of
            one sequence.
        num_blocks: the number of shared blocks.
        members: the node's children: subgroups and single sequences. The key is the chain hash of
            the first block after the shared ones, or a unique negative number for a sequence that
            has no such full block.
        heap: entries (*_rank(sequence), key), at least one for each member. Entries of removed
            sequences may remain.
        recent: the last NUM_RECENT distinct keys of admitted members, oldest first.
    """

    __slots__ = ("hashes", "heap", "members", "num_blocks", "recent")

    def __init__(self, hashes: list[int], num_blocks: int) -> None:
        self.hashes = hashes
        self.num_blocks = num_blocks
        self.members: dict[int, _Group | Sequence] = {}
        self.heap: list[tuple[int, int, int]] = []
        self.recent: dict[int, None] = {}

    def next_key(self) -> tuple[int, bool]:
        """Returns the key of the member to admit from next, and whether the key is a recent one."""
        if not self.recent.keys().isdisjoint(self.members.keys()):
            return next(key for key in reversed(self.recent) if key in self.members), True
        while (key := self.heap[0][2]) not in self.members:
            heappop(self.heap)
        return key, False


class _Pool:
    """Sequences that are ordered together, in a radix tree of their blocks."""

    def __init__(self, shares_prefixes: bool) -> None:
        self.shares_prefixes = shares_prefixes
        self.root = _Group([], 0)
        self.num_added = 0
        # The groups from the root to the head, each with the key of the next member on the path and
        # whether this key is a recent one. Empty if the head must be determined again.
        self.path: list[tuple[_Group, int, bool]] = []

    @property
    def head(self) -> Sequence:
        """The sequence to admit next."""
        if not self.path:
            member: _Group | Sequence = self.root
            while isinstance(member, _Group):
                key, was_recent = member.next_key()
                self.path.append((member, key, was_recent))
                member = member.members[key]
        group, key, _ = self.path[-1]
        seq = group.members[key]
        assert isinstance(seq, Sequence)
        return seq

    def add(self, seq: Sequence) -> None:
        self.num_added += 1
        self.path = []
        group = self.root
        while True:
            key = self._key(seq, group.num_blocks)
            heappush(group.heap, (*_rank(seq), key))
            member = group.members.setdefault(key, seq)
            if member is seq:
                return
            num_equal = self._count_equal_blocks(seq, member, group.num_blocks + 1)
            if isinstance(member, _Group) and num_equal == member.num_blocks:
                group = member
                continue
            # The member moves into a new group, to which the next iteration adds the sequence.
            split = _Group(seq.block_hashes, num_equal)
            if isinstance(member, _Group):
                member_key, rank = member.hashes[num_equal], member.heap[0][:2]
            else:
                member_key = self._key(member, num_equal)
                rank = _rank(member)
            split.members[member_key], split.heap = member, [(*rank, member_key)]
            group.members[key] = group = split

    def admit(self) -> tuple[Sequence, bool]:
        """Removes the head, and marks its prefixes as recent. Returns the head, and whether one of
        its prefixes was recent before."""
        seq, was_grouped = self.head, False
        for group, key, was_recent in self.path:
            was_grouped |= was_recent
            if key >= 0:
                group.recent.pop(key, None)
                group.recent[key] = None
                if len(group.recent) > NUM_RECENT:
                    del group.recent[next(iter(group.recent))]
        self._remove_member(self.path)
        return seq, was_grouped

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence, if the tree has it, and the groups that this leaves empty."""
        path: list[tuple[_Group, int, bool]] = []
        member: _Group | Sequence | None = self.root
        while isinstance(member, _Group):
            key = self._key(seq, member.num_blocks)
            path.append((member, key, False))
            member = member.members.get(key)
        if member is seq:
            self._remove_member(path)

    def _remove_member(self, path: list[tuple[_Group, int, bool]]) -> None:
        """Removes the member at the end of a path, and the groups that this leaves empty."""
        for group, key, _ in reversed(path):
            del group.members[key]
            if group.members:
                break
        self.path = []

    def _num_blocks(self, seq: Sequence) -> int:
        """Returns the number of full blocks that other sequences may share."""
        return seq.num_tokens // seq.block_size if self.shares_prefixes else 0

    def _key(self, seq: Sequence, i: int) -> int:
        """Returns the chain hash of full block i, or, if there is none, a negative number that only
        this sequence has."""
        return chain_hash(seq, i) if i < self._num_blocks(seq) else -1 - seq.seq_id

    def _count_equal_blocks(self, seq: Sequence, member: _Group | Sequence, start: int) -> int:
        """Returns how many first blocks a sequence and a member have in common. The first ``start``
        blocks are known to be equal."""
        if isinstance(member, _Group):
            limit, hashes = min(self._num_blocks(seq), member.num_blocks), member.hashes
        else:
            limit, hashes = min(map(self._num_blocks, (seq, member))), member.block_hashes
            chain_hash(member, limit - 1)
        chain_hash(seq, limit - 1)
        # Binary search: a chain hash covers all earlier blocks, so all hashes from the first
        # different block on are different.
        return bisect_left(
            range(limit), True, start, key=lambda i: seq.block_hashes[i] != hashes[i]
        )
