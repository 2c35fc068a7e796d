"""Admission when many requests are known at once: equal prefixes together, the longest first."""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator
from heapq import heappop, heappush

from nanovllm.engine.policy import FirstComeFirstServed
from nanovllm.engine.prefix_cache import chain_hash
from nanovllm.engine.sequence import Sequence

POOL_SIZE = 2**14  # sequences that are ordered together
NUM_RECENT = 16  # prefixes that later sequences with the same prefix can join


class OfflineOrder(FirstComeFirstServed):
    """Puts the sequences with ``may_reorder`` into the order that needs the least time.

    - Sequences with equal first blocks are admitted one after the other, while these blocks are in
      the prefix cache.
    - Otherwise, the sequence that may generate the most tokens is admitted first, with those that
      share its first blocks. So the last sequences to finish are short ones, and few steps run
      with few sequences.

    Sequences without ``may_reorder`` and preempted ones are admitted before, first come, first
    served. No sequence waits forever: later ones overtake it only until its pool is full.

    Args:
        shares_prefixes: whether sequences can share blocks.
    """

    def __init__(self, shares_prefixes: bool = True) -> None:
        super().__init__()
        self.shares_prefixes = shares_prefixes
        self.pools: deque[_Pool] = deque()  # only the last one takes new sequences
        # The pool of each waiting sequence, oldest sequence first. Ordered: the first key of a dict
        # is slow to find after many removals.
        self.pool_of: OrderedDict[Sequence, _Pool] = OrderedDict()

    @property
    def head(self) -> Sequence:
        return self[0] if super().__len__() else self.pools[0].head

    def add(self, seq: Sequence) -> None:
        if not seq.may_reorder:
            self.append(seq)
            return
        if not self.pools or self.pools[-1].num_added >= POOL_SIZE:
            self.pools.append(_Pool(self.shares_prefixes))
        # First, so that ``remove`` can undo an interrupted call.
        self.pool_of[seq] = self.pools[-1]
        self.pools[-1].add(seq)

    def popleft(self) -> Sequence:
        if super().__len__():
            return super().popleft()
        seq, was_grouped = self.pools[0].admit()
        if seq is not next(iter(self.pool_of)):  # it overtakes an earlier one
            self.num_grouped += was_grouped
            self.num_longest_first += not was_grouped
        self.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        pool = self.pool_of.pop(seq, None)
        if pool is None:
            super().remove(seq)
            return
        pool.remove(seq)
        if pool.is_empty:
            self.pools.remove(pool)

    def clear(self) -> None:
        super().clear()
        self.pools.clear()
        self.pool_of.clear()

    def __len__(self) -> int:
        return super().__len__() + len(self.pool_of)

    def __iter__(self) -> Iterator[Sequence]:
        yield from super().__iter__()
        yield from self.pool_of

    def __contains__(self, seq: object) -> bool:
        return seq in self.pool_of or super().__contains__(seq)


class _Group:
    """Sequences with the same first blocks: a node of a radix tree.

    Attributes:
        hashes: the chain hash of each of these blocks, and maybe of later ones.
        num_blocks: the number of these blocks.
        members: the groups and single sequences that differ in the next block, by its chain hash.
            A sequence without another full block has a negative key of its own.
        heap: a tuple (-length, sequence id, key) for each sequence added, and maybe for sequences
            that have left. The length is the number of tokens that it may generate.
        recent: the keys of the members admitted last, oldest first.
    """

    __slots__ = ("hashes", "heap", "members", "num_blocks", "recent")

    def __init__(self, hashes: list[int], num_blocks: int) -> None:
        self.hashes = hashes
        self.num_blocks = num_blocks
        self.members: dict[int, _Group | Sequence] = {}
        self.heap: list[tuple[int, int, int]] = []
        self.recent: dict[int, None] = {}

    def next_key(self) -> tuple[int, bool]:
        """Returns the key of the member to admit next, and whether one with this key has been
        admitted recently."""
        for key in reversed(self.recent):
            if key in self.members:
                return key, True
        while (key := self.heap[0][2]) not in self.members:
            heappop(self.heap)
        return key, False


class _Pool:
    """Sequences that are ordered together, in a radix tree of their blocks."""

    def __init__(self, shares_prefixes: bool) -> None:
        self.shares_prefixes = shares_prefixes
        self.root = _Group([], 0)
        self.num_added = 0
        # The groups from the root to the head, each with its member's key, and whether a member
        # with this key was admitted recently. Empty if the head is not known.
        self.path: list[tuple[_Group, int, bool]] = []

    @property
    def is_empty(self) -> bool:
        return not self.root.members

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
            heappush(group.heap, (seq.num_tokens - seq.max_len, seq.seq_id, key))
            member = group.members.get(key)
            if member is None:
                group.members[key] = seq
                return
            num_equal = self._count_equal_blocks(seq, member, group.num_blocks + 1)
            if isinstance(member, _Group) and num_equal == member.num_blocks:
                group = member
                continue
            # The member moves into a new group, to which the sequence is added next.
            split = _Group(seq.block_hashes, num_equal)
            if isinstance(member, _Group):
                other, item = member.hashes[num_equal], member.heap[0]
            else:
                other = self._key(member, num_equal)
                item = member.num_tokens - member.max_len, member.seq_id, other
            split.members[other], split.heap = member, [(*item[:2], other)]
            group.members[key] = group = split

    def admit(self) -> tuple[Sequence, bool]:
        """Records that the head is admitted. Returns it, and whether it begins with the same blocks
        as a sequence admitted recently."""
        seq = self.head
        for group, key, _ in self.path:
            if key >= 0:
                group.recent.pop(key, None)
                group.recent[key] = None
                if len(group.recent) > NUM_RECENT:
                    del group.recent[next(iter(group.recent))]
        return seq, any(was_recent for _, _, was_recent in self.path)

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence, if it is here, and the groups that are then empty."""
        self.path = []
        path: list[tuple[_Group, int]] = []
        member: _Group | Sequence | None = self.root
        while isinstance(member, _Group):
            key = self._key(seq, member.num_blocks)
            path.append((member, key))
            member = member.members.get(key)
        if member is not seq:
            return
        for group, key in reversed(path):
            del group.members[key]
            if group.members:
                break

    def _num_blocks(self, seq: Sequence) -> int:
        """Returns the number of full blocks that other sequences may share."""
        return seq.num_tokens // seq.block_size if self.shares_prefixes else 0

    def _key(self, seq: Sequence, i: int) -> int:
        """Returns the chain hash of full block i, or a negative number if there is none."""
        return chain_hash(seq, i) if i < self._num_blocks(seq) else -1 - seq.seq_id

    def _count_equal_blocks(self, seq: Sequence, member: _Group | Sequence, start: int) -> int:
        """Returns how many first blocks are equal, if the first ``start`` of them are."""
        if isinstance(member, _Group):
            limit, hashes = min(self._num_blocks(seq), member.num_blocks), member.hashes
        else:
            limit, hashes = min(map(self._num_blocks, (seq, member))), member.block_hashes
            chain_hash(member, limit - 1)
        chain_hash(seq, limit - 1)
        # A hash covers all blocks before it, so hashes differ from the first different block on.
        return bisect_left(
            range(limit), True, start, key=lambda i: seq.block_hashes[i] != hashes[i]
        )
