"""BlockManager against a brute-force model of plain dicts and lists."""

import struct
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from nanovllm.engine.block_manager import BlockCache, BlockManager
from nanovllm.engine.parallel_sampling import fork
from nanovllm.engine.prefix_cache import Block, PrefixCache
from nanovllm.engine.sequence import Sequence
from tests.conftest import needs_asserts
from tests.invariants import check_blocks, held_blocks, prefix_cache

Tokens = tuple[int, ...]
Windows = tuple[int | None, ...]
MAX_CHUNK = 4
# Uneven, so that prefixes meet and equal blocks are computed twice.
BITS = st.sampled_from([0, 0, 0, 0, 1])


def chain_hash(tokens: Tokens, block_size: int) -> int:
    """The hash of the last of some full blocks, straight from its definition."""
    prefix = b""
    for i in range(0, len(tokens), block_size):
        block = tokens[i : i + block_size]
        data = prefix + struct.pack(f"<{len(block)}q", *block)
        prefix = struct.pack("<Q", xxhash.xxh64(data).intdigest())
    return struct.unpack("<Q", prefix)[0]


def admit(manager: BlockManager, tokens: list[int]) -> Sequence:
    """A sequence with blocks, all its tokens computed."""
    seq = Sequence(tokens, block_size=manager.block_size)
    manager.allocate(seq)
    manager.prefix_cache.register(seq, min(seq.num_cached_tokens, len(seq) - 1), len(seq))
    seq.num_cached_tokens = len(seq)
    return seq


class Model:
    """What the manager must do, by exhaustive bookkeeping.

    ``key`` maps a prefix of full blocks to what its last block is looked up by: prefixes of
    equal keys collide.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        caching: bool,
        key: Callable[[Tokens], int],
        windows: Windows,
    ) -> None:
        self.block_size = block_size
        self.caching = caching
        self.key = key
        self.windows = windows
        self.free = list(range(num_blocks))  # least recently freed first
        self.refs = dict.fromkeys(range(num_blocks), 0)
        # block -> group, and all tokens from the sequence's first
        self.full: dict[int, tuple[int, Tokens]] = {}
        self.shared: dict[tuple[int, int], int] = {}  # group, key -> block
        # Of each group, the blocks held, by their place in the sequence.
        self.tables: dict[int, list[dict[int, int]]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.reusable: dict[int, int] = {}  # where not all tokens may come from the cache

    def prefix(self, seq_id: int, i: int) -> Tokens:
        return tuple(self.tokens[seq_id][: (i + 1) * self.block_size])

    def start(self, group: int, num_computed: int) -> int:
        """The first block that a group needs: that of the first token in the window of the last
        token of the last full block."""
        window = self.windows[group]
        end = num_computed // self.block_size * self.block_size
        return 0 if window is None else max(0, end - window) // self.block_size

    def end(self, seq_id: int, group: int, num_computed: int) -> int:
        """Of a window, a group has blocks for as many as it will ever have beside a chunk."""
        num_blocks, window = -(-len(self.tokens[seq_id]) // self.block_size), self.windows[group]
        if window is None:
            return num_blocks
        past = max(num_computed // self.block_size, -(-window // self.block_size))
        return min(num_blocks, past - (-(MAX_CHUNK - 1) // self.block_size) + 1)

    def hit(self, seq_id: int, group: int, i: int) -> int | None:
        prefix = self.prefix(seq_id, i)
        block = self.shared.get((group, self.key(prefix)))
        return None if block is None or self.full[block] != (group, prefix) else block

    def cached(self, seq_id: int) -> list[dict[int, int]]:
        """The longest prefix of which the cache holds all that is needed to go on."""
        limit = self.reusable.get(seq_id, len(self.tokens[seq_id]))
        for length in range(limit // self.block_size if self.caching else 0, 0, -1):
            hits = [
                {
                    i: self.hit(seq_id, group, i)
                    for i in range(self.start(group, length * self.block_size), length)
                }
                for group in range(len(self.windows))
            ]
            if not any(block is None for blocks in hits for block in blocks.values()):
                return hits
        return [{} for _ in self.windows]

    def num_hits(self, seq_id: int) -> int:
        return max(self.cached(seq_id)[0], default=-1) + 1

    def num_missing(self, seq_id: int) -> int:
        """Free blocks that allocating takes, revived ones included."""
        num_hits, cached = self.num_hits(seq_id), self.cached(seq_id)
        return sum(
            self.end(seq_id, group, num_hits * self.block_size)
            - num_hits
            + sum(self.refs[block] == 0 for block in cached[group].values())
            for group in range(len(self.windows))
        )

    def allocate(self, seq_id: int) -> None:
        self.computed[seq_id] = self.num_hits(seq_id) * self.block_size
        self.tables[seq_id] = self.cached(seq_id)
        for block in (block for table in self.tables[seq_id] for block in table.values()):
            self.refs[block] += 1
            if block in self.free:
                self.free.remove(block)
        self.extend(seq_id)

    def extend(self, seq_id: int) -> None:
        num_computed = self.computed[seq_id]
        for group, table in enumerate(self.tables[seq_id]):
            first = max(table, default=num_computed // self.block_size - 1) + 1
            for i in range(first, self.end(seq_id, group, num_computed)):
                if self.free:
                    table[i] = self.open()

    def open(self) -> int:
        block = self.free.pop(0)
        self.full.pop(block, None)
        self.shared = {key: b for key, b in self.shared.items() if b != block}
        self.refs[block] = 1
        return block

    def fork(self, parent_id: int, child_id: int) -> list[tuple[int, int]]:
        """All blocks but the last are shared; that is the child's own, and filled by a copy."""
        last = len(self.tokens[child_id]) - 1
        copied = last // self.block_size
        self.tables[child_id] = [
            {i: block for i, block in table.items() if i < copied}
            for table in self.tables[parent_id]
        ]
        for block in (block for table in self.tables[child_id] for block in table.values()):
            self.refs[block] += 1
        for table in self.tables[child_id]:
            table[copied] = self.open()
        self.computed[child_id] = last
        if last % self.block_size == 0:
            return []
        both = zip(self.tables[parent_id], self.tables[child_id], strict=True)
        return [(parent[copied], child[copied]) for parent, child in both]

    def compute(self, seq_id: int, end: int) -> None:
        """All tokens before ``end`` have their keys and values."""
        for i in range(end // self.block_size if self.caching else 0):
            for group, table in enumerate(self.tables[seq_id]):
                if i in table and table[i] not in self.full:
                    self.full[table[i]] = group, self.prefix(seq_id, i)
                    self.shared.setdefault((group, self.key(self.prefix(seq_id, i))), table[i])
        self.computed[seq_id] = max(end, self.computed[seq_id])
        for group, table in enumerate(self.tables[seq_id]):
            for i in sorted(table):
                if i < self.start(group, self.computed[seq_id]):
                    self.drop(table.pop(i))
        self.extend(seq_id)

    def deallocate(self, seq_id: int) -> None:
        for table in reversed(self.tables.pop(seq_id)):
            for i in sorted(table, reverse=True):
                self.drop(table[i])

    def drop(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            self.free.append(block)


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences come, are computed in chunks, grow, are preempted, come back and go."""

    colliding = False
    preempted = Bundle("preempted")
    partial = Bundle("partial")  # hold blocks for all tokens, some maybe not computed
    decoding = Bundle("decoding")  # all tokens computed

    @initialize(
        num_blocks=st.integers(1, 9),
        block_size=st.integers(1, 3),
        caching=st.sampled_from([True, True, True, False]),
        windows=st.sampled_from([(None,), (None,), (None, 3), (2, None, 2), (1,), (4, 2)]),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool, windows: Windows) -> None:
        num_blocks *= len(windows)
        self.manager = BlockManager(num_blocks, block_size, caching, windows, MAX_CHUNK)

        def key(prefix: Tokens) -> int:
            return prefix[-1] % 2 if self.colliding else chain_hash(prefix, block_size)

        if self.colliding:
            hashes = staticmethod(lambda tokens, prefix=None: tokens[-1] % 2)
            self.patches.enter_context(mock.patch.object(PrefixCache, "compute_hash", hashes))
        self.model = Model(num_blocks, block_size, caching, key, windows)
        self.holders: dict[int, Sequence] = {}

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()

    def teardown(self) -> None:
        self.patches.close()

    def append(self, tokens: list[int], bit: int) -> int:
        """Equal blocks lie under different prefixes; where hashes collide, a token is the number
        of its prefix, so that they do not."""
        tokens.append((tokens[-1] if tokens else 1) * 2 + bit if self.colliding else bit)
        return tokens[-1]

    @rule(
        target=partial,
        bits=st.lists(BITS, min_size=1, max_size=7),
        spare=st.integers(0, 2),
        known=st.none() | st.integers(0, 6),
    )
    def arrive(self, bits: list[int], spare: int, known: int | None):
        """``known``: it needs the logits of its prompt, and has those of so many tokens."""
        tokens: list[int] = []
        for bit in bits:
            self.append(tokens, bit)
        seq = Sequence(tokens, block_size=self.manager.block_size)
        self.model.tokens[seq.seq_id] = tokens
        if known is not None:
            seq.wants_prompt_logprobs = True
            seq.num_prompt_logprobs = min(known, len(tokens) - 1)
            if known < len(tokens) - 1:
                self.model.reusable[seq.seq_id] = known
        return self.admit(seq, spare)

    @rule(target=partial, seq=consumes(preempted), spare=st.integers(0, 2))
    def come_back(self, seq: Sequence, spare: int):
        return self.admit(seq, spare)

    @rule(seq=partial, num_tokens=st.integers(1, 4))
    def compute_chunk(self, seq: Sequence, num_tokens: int) -> None:
        if seq.seq_id in self.holders:
            self.compute(seq, min(seq.num_cached_tokens + num_tokens, len(seq)))

    @rule(target=decoding, seq=consumes(partial))
    def compute_rest(self, seq: Sequence):
        if seq.seq_id not in self.holders:
            return multiple()
        for end in range(seq.num_cached_tokens + MAX_CHUNK, len(seq), MAX_CHUNK):
            self.compute(seq, end)
        self.compute(seq, len(seq))
        return seq

    @rule(seq=decoding, bits=st.lists(BITS, min_size=1, max_size=4))
    def decode(self, seq: Sequence, bits: list[int]) -> None:
        for bit in bits:
            if seq.seq_id not in self.holders:
                return
            opens = len(seq) % self.manager.block_size == 0
            fits = len(self.model.free) >= len(self.model.windows)
            seq.append_token(self.append(self.model.tokens[seq.seq_id], bit))
            assert self.manager.allocate_next(seq) == (not opens or fits)
            self.model.extend(seq.seq_id)
            if opens and not fits:
                self.release(seq)
                return
            self.compute(seq, len(seq))

    @rule(target=partial, parent=decoding, length=st.integers(1, 9))
    def fork(self, parent: Sequence, length: int):
        """Another sequence goes on from some of the parent's tokens."""
        windows = self.model.windows
        if parent.seq_id not in self.holders or len(self.model.free) < len(windows):
            return multiple()
        if any(windows):
            length = len(parent)  # all of them, as after a prompt
        tokens = self.model.tokens[parent.seq_id][:length]
        child = Sequence(tokens, block_size=self.manager.block_size)
        self.model.tokens[child.seq_id] = tokens
        copy = fork(self.manager, parent, child)
        assert copy == self.model.fork(parent.seq_id, child.seq_id)
        assert child.num_cached_tokens == len(tokens) - 1
        self.holders[child.seq_id] = child
        return child

    @rule(target=preempted, seq=st.one_of(consumes(partial), consumes(decoding)))
    def preempt(self, seq: Sequence):
        if seq.seq_id not in self.holders:
            return multiple()
        self.release(seq)
        return seq

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.release(self.holders[data.draw(st.sampled_from(sorted(self.holders)))])

    def admit(self, seq: Sequence, spare: int):
        """Allocates if there is room; a sequence that finds none goes away."""
        num_missing = self.model.num_missing(seq.seq_id)
        for n in (0, spare):
            fits = num_missing + n * len(self.model.windows) <= len(self.model.free)
            assert self.manager.can_allocate(seq, num_spare_blocks=n) == fits
        if num_missing > len(self.model.free):
            return multiple()
        num_hits = self.model.num_hits(seq.seq_id)
        self.manager.allocate(seq)
        self.model.allocate(seq.seq_id)
        assert seq.num_cached_tokens == num_hits * self.manager.block_size
        self.holders[seq.seq_id] = seq
        return seq

    def compute(self, seq: Sequence, end: int) -> None:
        start = min(seq.num_cached_tokens, len(seq) - 1)
        self.manager.prefix_cache.register(seq, start, end)
        seq.num_cached_tokens = max(end, seq.num_cached_tokens)
        self.manager.slide_windows(seq, end)
        self.model.compute(seq.seq_id, end)

    def release(self, seq: Sequence) -> None:
        del self.holders[seq.seq_id]
        self.manager.deallocate(seq)
        self.model.deallocate(seq.seq_id)
        assert seq.block_tables == []
        assert seq.num_cached_tokens == 0

    @invariant()
    def agrees_with_the_model(self) -> None:
        manager, model = self.manager, self.model
        check_blocks(manager, self.holders.values())
        assert list(manager.free_block_ids) == model.free
        assert manager.used_block_ids == {block: n for block, n in model.refs.items() if n}
        tables: dict[int, list[dict[int, int]]] = {}
        for seq in self.holders.values():
            tables[seq.seq_id] = [{} for _ in model.windows]
            for group, i, block_id in held_blocks(manager, seq):
                tables[seq.seq_id][group][i] = block_id
        assert tables == model.tables
        cache = prefix_cache(manager)
        assert cache.hash_to_block_id == {
            key + 2**64 * group: block for (group, key), block in model.shared.items()
        }
        assert cache.blocks == {
            block_id: (model.key(prefix) + 2**64 * group, list(prefix[-model.block_size :]))
            for block_id, (group, prefix) in model.full.items()
        }


class CollidingMachine(BlockManagerMachine):
    """The same where blocks have one of two hashes, so only token ids keep prefixes apart."""

    colliding = True


TestAgainstModel = BlockManagerMachine.TestCase
TestAgainstModel.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestAgainstModelWithCollisions = CollidingMachine.TestCase
TestAgainstModelWithCollisions.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


def test_hash_is_xxh64_of_the_previous_hash_and_the_token_ids():
    first = PrefixCache.compute_hash([1, -2, 2**40])
    assert first == xxhash.xxh64_intdigest(struct.pack("<3q", 1, -2, 2**40))
    second = PrefixCache.compute_hash([4], first)
    assert second == xxhash.xxh64_intdigest(struct.pack("<Qq", first, 4))
    assert PrefixCache.compute_hash([4], 0) != PrefixCache.compute_hash([4])


def test_equal_content_under_another_prefix_is_not_shared():
    manager = BlockManager(8, 2)
    a, b = admit(manager, [1, 1, 5, 5]), admit(manager, [2, 2, 5, 5])
    assert not set(a.block_tables[0]) & set(b.block_tables[0])
    c = admit(manager, [5, 5, 5, 5])
    assert not set(c.block_tables[0]) & set(a.block_tables[0] + b.block_tables[0])
    check_blocks(manager, [a, b, c])


def test_equal_blocks_within_a_sequence_get_a_block_each():
    manager = BlockManager(4, 2)
    seq = admit(manager, [7] * 8)
    assert len(set(seq.block_tables[0])) == 4
    check_blocks(manager, [seq])


def test_used_blocks_are_shared_up_to_the_first_miss():
    manager = BlockManager(8, 2)
    a = admit(manager, [1, 2, 3, 4, 5, 6])
    b = Sequence([1, 2, 9, 9, 5, 6], block_size=2)
    manager.allocate(b)
    assert b.block_tables[0][0] == a.block_tables[0][0]
    assert not set(b.block_tables[0][1:]) & set(a.block_tables[0])
    assert b.num_cached_tokens == 2
    assert [manager.used_block_ids[i] for i in a.block_tables[0]] == [2, 1, 1]
    check_blocks(manager, [a, b])


def test_a_miss_makes_all_later_blocks_misses():
    """Guards a hit behind a miss. Of two sequences that decode the same tokens, one's first
    block is registered and the other's second; then the first is evicted."""
    manager = BlockManager(5, 2)
    a, b = admit(manager, [1]), admit(manager, [1])
    for seq in (a, b):
        seq.append_token(2)
        manager.prefix_cache.register(seq, 1, 2)
    b.append_token(3)
    b.append_token(4)
    manager.allocate_next(b)
    manager.prefix_cache.register(b, 2, 4)
    manager.deallocate(a)
    filler = admit(manager, [5] * 6)
    assert set(manager.prefix_cache.hash_to_block_id.values()) == {
        b.block_tables[0][1],
        *filler.block_tables[0],
    }
    manager.deallocate(filler)
    late = Sequence([1, 2, 3, 4], block_size=2)
    manager.allocate(late)
    assert late.num_cached_tokens == 0
    check_blocks(manager, [b, late])


def test_take_block_is_not_shared():
    manager = BlockManager(4, 4)
    a = admit(manager, [1, 2, 3])
    b = Sequence([1, 2, 3], block_size=4)
    manager.allocate(b)
    assert b.num_cached_tokens == 0
    assert a.block_tables[0] != b.block_tables[0]


def test_blocks_not_yet_computed_are_not_shared():
    manager = BlockManager(8, 2)
    a = Sequence([1, 2, 3, 4], block_size=2)
    manager.allocate(a)
    manager.prefix_cache.register(a, 0, 3)
    b = Sequence([1, 2, 3, 4], block_size=2)
    manager.allocate(b)
    assert b.num_cached_tokens == 2
    assert a.block_tables[0][0] == b.block_tables[0][0]
    assert a.block_tables[0][1] != b.block_tables[0][1]


def test_two_chunks_that_share_a_block_cache_it():
    manager = BlockManager(4, 4)
    a = Sequence([1, 2, 3, 4], block_size=4)
    manager.allocate(a)
    manager.prefix_cache.register(a, 0, 3)
    assert not manager.prefix_cache.hash_to_block_id
    manager.prefix_cache.register(a, 3, 4)
    assert list(manager.prefix_cache.hash_to_block_id.values()) == a.block_tables[0]


def test_freed_block_is_revived_with_its_content():
    manager = BlockManager(4, 2)
    a = admit(manager, [1, 2, 3, 4])
    table = a.block_tables[0]
    manager.deallocate(a)
    assert len(manager.free_block_ids) == 4
    b = Sequence([1, 2, 3, 4], block_size=2)
    manager.allocate(b)
    assert (b.block_tables[0], b.num_cached_tokens) == (table, 4)
    check_blocks(manager, [b])


def test_revived_block_is_not_free_to_others():
    """Guards a cached block that is handed out twice: as a hit and as the oldest free one."""
    manager = BlockManager(3, 2)
    a = admit(manager, [1, 2])
    manager.deallocate(a)
    b = admit(manager, [1, 2])
    c = admit(manager, [3, 4, 5, 6])
    assert sorted(b.block_tables[0] + c.block_tables[0]) == [0, 1, 2]
    assert not manager.can_allocate(Sequence([9], block_size=2))


def test_freeing_goes_from_last_to_first():
    manager = BlockManager(4, 2)
    a = admit(manager, [1, 2, 3, 4, 5, 6])
    assert a.block_tables[0] == [0, 1, 2]
    manager.deallocate(a)
    assert list(manager.free_block_ids) == [3, 2, 1, 0]


def test_eviction_takes_the_tail_before_its_prefix():
    manager = BlockManager(4, 2)
    a = admit(manager, [1, 2, 3, 4, 5, 6])
    manager.deallocate(a)
    manager.deallocate(admit(manager, [7, 7, 8, 8]))  # takes the unused block and one of a's
    b = Sequence([1, 2, 3, 4, 5, 6], block_size=2)
    manager.allocate(b)
    assert b.num_cached_tokens == 4


def test_eviction_takes_the_least_recently_freed():
    manager = BlockManager(2, 2)
    a, b = admit(manager, [1, 1]), admit(manager, [2, 2])
    manager.deallocate(b)
    manager.deallocate(a)
    admit(manager, [3, 3])
    again = Sequence([1, 1], block_size=2)
    manager.allocate(again)
    assert again.num_cached_tokens == 2


def test_handing_out_a_block_drops_its_stale_hash_entry():
    manager = BlockManager(1, 2)
    manager.deallocate(admit(manager, [1, 2]))
    assert len(manager.prefix_cache.hash_to_block_id) == 1
    seq = Sequence([3], block_size=2)
    manager.allocate(seq)
    assert manager.prefix_cache.hash_to_block_id == manager.prefix_cache.blocks == {}
    check_blocks(manager, [seq])


def test_evicting_a_duplicate_keeps_the_registered_block():
    """Guards a hash entry dropped with a block that it does not point to: two sequences that
    decode the same tokens fill equal blocks, of which one is shared."""
    manager = BlockManager(3, 2)
    a, b = admit(manager, [1]), admit(manager, [1])
    for seq in (a, b):
        seq.append_token(2)
        manager.prefix_cache.register(seq, 1, 2)
    assert list(manager.prefix_cache.hash_to_block_id.values()) == a.block_tables[0]
    manager.deallocate(b)
    filler = admit(manager, [5, 5, 6, 6])
    assert a.block_tables[0][0] in manager.prefix_cache.hash_to_block_id.values()
    check_blocks(manager, [a, filler])


def test_lookup_compares_token_ids(monkeypatch: pytest.MonkeyPatch):
    """Guards a hash collision that hands one prompt the keys and values of another."""
    monkeypatch.setattr(PrefixCache, "compute_hash", lambda self, tokens, prefix=None: 42)
    manager = BlockManager(8, 2)
    a = admit(manager, [1, 2, 3, 4])
    b = Sequence([5, 6, 7, 8], block_size=2)
    manager.allocate(b)
    assert b.num_cached_tokens == 0
    assert not set(a.block_tables[0]) & set(b.block_tables[0])
    check_blocks(manager, [a, b])


def test_without_prefix_caching_nothing_is_hashed_or_shared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(PrefixCache, "compute_hash")
    manager = BlockManager(4, 2, enable_prefix_caching=False)
    a, b = admit(manager, [1, 2, 3]), admit(manager, [1, 2, 3])
    assert not set(a.block_tables[0]) & set(b.block_tables[0])
    manager.deallocate(a)
    again = Sequence([1, 2, 3], block_size=2)
    manager.allocate(again)
    assert again.num_cached_tokens == 0
    assert type(manager.prefix_cache) is BlockCache
    check_blocks(manager, [b, again])


def test_prompt_tokens_whose_logits_are_wanted_are_computed_again():
    """Guards prompt log-probabilities that are missing where the prefix cache had the keys."""
    manager = BlockManager(8, 2)
    a = admit(manager, [1, 2, 3, 4, 5])
    b = Sequence([1, 2, 3, 4, 5], block_size=2)
    b.wants_prompt_logprobs = True
    manager.allocate(b)
    assert b.num_cached_tokens == 0
    assert not set(a.block_tables[0]) & set(b.block_tables[0])
    check_blocks(manager, [a, b])


@pytest.mark.parametrize(
    ("length", "num_shared", "copies"),
    [(1, 0, False), (3, 0, True), (4, 0, True), (5, 1, False), (7, 1, True), (8, 1, True)],
)
@pytest.mark.parametrize("caching", [True, False])
def test_fork_shares_full_blocks_and_copies_the_one_that_is_written(
    caching: bool, length: int, num_shared: int, copies: bool
):
    """The child computes its last token itself: its block is copied if it holds any before."""
    manager = BlockManager(8, 4, caching)
    parent = admit(manager, list(range(10, 10 + length)))
    child = Sequence(parent.token_ids, block_size=4)
    copy = fork(manager, parent, child)
    assert child.block_tables[0][:num_shared] == parent.block_tables[0][:num_shared]
    assert len(child.block_tables[0]) == num_shared + 1 and child.num_uncached_tokens == 1
    assert child.block_tables[0][-1] not in parent.block_tables[0]
    assert copy == [(parent.block_tables[0][-1], child.block_tables[0][-1])] * copies
    check_blocks(manager, [parent, child])
    for seq in (parent, child):
        manager.deallocate(seq)
    assert not manager.used_block_ids


def test_can_allocate_counts_shared_blocks_as_had_and_revived_ones_as_taken():
    manager = BlockManager(4, 2)
    a = admit(manager, [1, 2, 3, 4])
    twin = Sequence([1, 2, 3, 4, 5, 6, 7, 8], block_size=2)
    assert manager.can_allocate(twin)  # two shared, two free
    assert not manager.can_allocate(twin, num_spare_blocks=1)
    manager.deallocate(a)
    assert manager.can_allocate(twin)  # two revived, two free
    assert not manager.can_allocate(twin, num_spare_blocks=1)
    assert not manager.can_allocate(Sequence([9] * 9, block_size=2))


def test_append_opens_a_block_only_for_the_first_token_of_one():
    manager = BlockManager(2, 2)
    seq = admit(manager, [1])
    for token, table in [(2, [0]), (3, [0, 1]), (4, [0, 1])]:
        seq.append_token(token)
        assert manager.allocate_next(seq)
        assert seq.block_tables[0] == table
        seq.num_cached_tokens = len(seq)
    seq.append_token(5)
    assert not manager.allocate_next(seq)
    assert seq.block_tables[0] == [0, 1]


def test_each_block_is_hashed_once_in_a_sequences_life(monkeypatch: pytest.MonkeyPatch):
    """Guards prefixes hashed again for every step that a request waits (or is preempted)."""
    calls = []

    def counting(tokens: list[int], prefix: int | None = None) -> int:
        calls.append(tokens)
        return compute_hash(tokens, prefix)

    compute_hash = PrefixCache.compute_hash
    monkeypatch.setattr(PrefixCache, "compute_hash", staticmethod(counting))
    manager = BlockManager(8, 2)
    seq = Sequence(range(7), block_size=2)
    for _ in range(5):
        manager.can_allocate(seq)
        manager.allocate(seq)
        manager.prefix_cache.register(seq, 0, len(seq))
        manager.deallocate(seq)
    assert len(calls) <= 3
    seq.append_token(7)
    manager.allocate(seq)
    manager.prefix_cache.register(seq, 6, 8)
    assert calls == [[0, 1], [2, 3], [4, 5], [6, 7]]


class Corrupt:
    """One way to break each invariant, and only that one. Blocks 0 and 1, equal and cached,
    belong to ``a``; 2, open, to ``b``; 3 is free."""

    @staticmethod
    def free_and_used(manager: BlockManager, a: Sequence, b: Sequence) -> None:
        manager.free_block_ids[0] = None

    @staticmethod
    def neither_free_nor_used(manager: BlockManager, a: Sequence, b: Sequence) -> None:
        del manager.free_block_ids[3]

    @staticmethod
    def unknown_block(manager: BlockManager, a: Sequence, b: Sequence) -> None:
        manager.free_block_ids[4] = None

    @staticmethod
    def used_without_a_holder(manager: BlockManager, a: Sequence, b: Sequence) -> None:
        del manager.free_block_ids[3]
        manager.used_block_ids[3] = 1

    @staticmethod
    def wrong_reference_count(manager: BlockManager, a: Sequence, b: Sequence) -> None:
        manager.used_block_ids[0] += 1

    @staticmethod
    def shared_open_block(manager: BlockManager, a: Sequence, b: Sequence) -> None:
        a.block_tables[0].append(2)
        manager.used_block_ids[2] += 1

    @staticmethod
    def cached_without_tokens(manager: BlockManager, a: Sequence, b: Sequence) -> None:
        manager.prefix_cache.blocks[3] = Block(1, [])

    @staticmethod
    def cached_though_open(manager: BlockManager, a: Sequence, b: Sequence) -> None:
        manager.prefix_cache.blocks[2] = Block(1, b.block(0))

    @staticmethod
    def stale_hash_entry(manager: BlockManager, a: Sequence, b: Sequence) -> None:
        manager.prefix_cache.hash_to_block_id[1] = 3

    @staticmethod
    def same_block_twice_in_a_table(manager: BlockManager, a: Sequence, b: Sequence) -> None:
        del manager.used_block_ids[1]
        manager.free_block_ids[1] = None
        a.block_tables[0][1] = 0
        manager.used_block_ids[0] = 2

    @staticmethod
    def content_of_another_prompt(manager: BlockManager, a: Sequence, b: Sequence) -> None:
        a.token_ids[0] += 1


@needs_asserts
@pytest.mark.parametrize("name", [name for name in vars(Corrupt) if not name.startswith("_")])
def test_invariants_notice(name: str):
    manager = BlockManager(4, 2)
    a, b = admit(manager, [6, 6, 6, 6]), admit(manager, [8])
    check_blocks(manager, [a, b])
    getattr(Corrupt, name)(manager, a, b)
    with pytest.raises(AssertionError):
        check_blocks(manager, [a, b])


@needs_asserts
def test_invariants_notice_a_holder_left_out():
    manager = BlockManager(4, 2)
    a, b = admit(manager, [6, 6, 6, 6]), admit(manager, [8])
    with pytest.raises(AssertionError):
        check_blocks(manager, [a])
    check_blocks(manager, [a, b])
