"""Allocates KV-cache blocks and keeps the prefix cache. Works with ids and hashes, not tensors."""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import xxhash

from nanovllm.config import MAX_INT32
from nanovllm.engine.batch import Batch
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.math import cdiv


class Block:
    """One physical block: ``block_size`` consecutive token slots of the KV cache of a group's
    layers. All groups take their blocks from one pool.

    A full block with a hash is cached: other sequences may share it. A block whose ``hash`` is None
    belongs to one sequence, which fills it. A freed block keeps its content until it is allocated
    again.
    """

    __slots__ = ("block_id", "hash", "ref_count", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash: int | None = None
        self.token_ids: list[int] = []

    def update(self, hash: int, token_ids: list[int]) -> None:
        """Sets the hash and the content of a full block."""
        self.hash = hash
        self.token_ids = token_ids

    def reset(self) -> None:
        """Makes the block empty, with no hash and one owner."""
        self.ref_count = 1
        self.hash = None
        self.token_ids = []


class BlockManager:
    """Owner of all blocks: each is either free, in a queue, or used, with a reference count.

    The prefix cache follows vLLM's: a full block's hash covers its tokens and the hash of the
    block before it, so equal hashes mean equal prefixes. Every operation is O(1) per block.

    A sequence has a block table for each group of layers. When a step that fills a block has been
    launched, a group with a window frees the blocks that are now outside of the window. Steps run
    in order, so the next owner of such a block writes to it in a later step. The group keeps the
    last ``window_blocks`` full blocks, which suffice even to recompute the last token. For a
    long prompt, the group has blocks for the next chunk only. It takes as many new blocks as leave
    the window. They are freed unless other sequences share them, so a chunk may lack blocks.

    Args:
        windows: the window of each group.
        max_chunk: maximum number of tokens of a sequence in one step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        windows: Seq[int | None] = (None,),
        max_chunk: int = 1,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.windows = windows
        # Number of full blocks that each group keeps. Without a window, no sequence has as many.
        self.window_blocks = [cdiv(window or MAX_INT32, block_size) for window in windows]
        # Number of blocks after the full ones that a chunk needs at most.
        self.num_chunk_blocks = 1 + cdiv(max_chunk - 1, block_size)
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        # Least recently freed first. Ordered, with O(1) removal from the middle for cache hits.
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.used_block_ids: set[int] = set()
        self.free_table_rows: list[int] = []
        self.num_table_rows = 0  # rows of the device's block tables that have ever been in use

    @staticmethod
    def compute_hash(token_ids: list[int], prefix: int | None = None) -> int:
        """xxh64 of the previous block's hash (8 bytes, little endian; absent for a first
        block) followed by the token ids (8 bytes each, little endian)."""
        h = xxhash.xxh64()
        if prefix is not None:
            h.update(prefix.to_bytes(8, "little"))
        h.update(np.asarray(token_ids, dtype="<i8").tobytes())
        return h.intdigest()

    def count_cached_tokens(self, seq: Sequence) -> int:
        """Returns how many tokens of a waiting sequence are cached, in full blocks."""
        return len(self._cached_prefix(seq)[0]) * self.block_size

    def can_allocate(self, seq: Sequence, num_spare_blocks: int = 0) -> bool:
        """Whether there are free blocks for a waiting sequence, and ``num_spare_blocks`` more for
        each group."""
        tables = self._cached_prefix(seq)
        num_hits = len(tables[0])
        needed = sum(self._table_lens(seq, num_hits)) + (num_spare_blocks - num_hits) * len(tables)
        hits = self._held(tables, num_hits)
        needed += sum(block_id not in self.used_block_ids for block_id in hits)
        return needed <= len(self.free_block_ids)

    def allocate(self, seq: Sequence) -> None:
        """Gives a waiting sequence the blocks of its cached prefix, then new ones for its other
        tokens. Groups with a window get new ones for the next chunk only.

        Sets ``num_cached_tokens`` to the length of the cached prefix.
        """
        assert not seq.block_tables
        seq.block_tables = self._cached_prefix(seq)
        seq.num_full_blocks = len(seq.block_tables[0])
        seq.num_cached_tokens = seq.num_full_blocks * self.block_size
        for block_id in self._held(seq.block_tables, seq.num_full_blocks):
            if block_id in self.used_block_ids:
                self.blocks[block_id].ref_count += 1
            else:
                del self.free_block_ids[block_id]
                self.used_block_ids.add(block_id)
                self.blocks[block_id].ref_count = 1
        self._take_row(seq)
        self._extend(seq)

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]]:
        """Gives a waiting child the blocks of a parent whose tokens begin with the child's. These
        blocks hold the keys and values of all the child's tokens but the last. Full blocks are
        shared. A partly filled last block is copied. If a group has a window, the parent must have
        computed no more tokens than the child has.

        Returns:
            The pairs (source, target) of blocks to copy before the next step.
        """
        assert not child.block_tables and len(self.free_block_ids) >= len(self.windows)
        num_shared = (len(child) - 1) // self.block_size
        child.block_tables = [table[:num_shared] for table in parent.block_tables]
        child.block_hashes = parent.block_hashes[:num_shared]
        child.num_cached_tokens = len(child) - 1
        child.num_full_blocks = parent.num_full_blocks
        for block_id in self._held(child.block_tables, child.num_full_blocks):
            self.blocks[block_id].ref_count += 1
        self._take_row(child)
        self._extend(child)
        copies = child.num_cached_tokens % self.block_size > 0
        tables = zip(parent.block_tables, child.block_tables, strict=True)
        return [(old[num_shared], new[num_shared]) for old, new in tables if copies]

    def can_append(self, seq: Sequence) -> bool:
        """Whether the sequence's last token has slots, or there are free blocks to append."""
        has_slots = seq.num_tokens <= seq.table_len * self.block_size
        return has_slots or len(self.free_block_ids) >= len(self.windows)

    def may_append(self, seq: Sequence) -> None:
        """Appends a block in each group if the sequence's last token has no slots yet."""
        if seq.num_tokens > seq.table_len * self.block_size:
            self._extend(seq)

    def mark_computed(self, batch: Batch) -> None:
        """Records what a launched step computes: its tokens count as computed, its block tables as
        sent to the device. The blocks that it fills are cached, and those that a window has left
        are freed. Skips finished sequences."""
        for seq, start, end, _ in batch.items:
            if not seq.is_finished:
                if end > seq.num_cached_tokens:
                    seq.num_cached_tokens = end
                seq.num_sent_blocks = seq.table_len
                # A decode fills a block only if its token takes the last slot.
                if batch.is_prefill or end % self.block_size == 0:
                    self.cache_blocks(seq, start, end)
                    self.free_left_blocks(seq, end)

    def cache_blocks(self, seq: Sequence, start: int, end: int) -> None:
        """Adds to the prefix cache the blocks that tokens [start, end) fill. Their keys and values
        are already computed, or are computed before any other sequence reads them."""
        if not self.enable_prefix_caching or seq.is_isolated:
            return
        for i in range(start // self.block_size, end // self.block_size):
            for group, table in enumerate(seq.block_tables):
                block = self.blocks[table[i]]
                if block.hash is None:
                    hash_ = self._hash(seq, i, group)
                    block.update(hash_, seq.block(i))
                    # If an equal block is already cached, later sequences share that one.
                    self.hash_to_block_id.setdefault(hash_, block.block_id)

    def free_left_blocks(self, seq: Sequence, end: int) -> None:
        """Frees the blocks that no window reaches after token ``end`` - 1 is computed, and gives
        the sequence blocks for its next chunk, as far as there are free ones."""
        if (num_full := end // self.block_size) > seq.num_full_blocks:
            for table, window in zip(seq.block_tables, self.window_blocks, strict=True):
                held = max(0, seq.num_full_blocks - window)
                for block_id in table[held : max(0, num_full - window)]:
                    self._release(block_id)
            seq.num_full_blocks = num_full
            self._extend(seq)

    def prepare_chunk(self, seq: Sequence) -> bool:
        """Gives a partly computed prompt the blocks that its next chunk still lacks, as far as
        there are free ones. Returns whether its next token has slots."""
        self._extend(seq)
        return seq.num_cached_tokens < seq.table_len * self.block_size

    def uncache_blocks(self, seq: Sequence, end: int) -> None:
        """Rolls back ``cache_blocks`` for tokens up to ``end``, because the step that should have
        computed them failed. No other sequence may hold these blocks."""
        for i in range(seq.num_cached_tokens // self.block_size, end // self.block_size):
            for table in seq.block_tables:
                self._reset_block(self.blocks[table[i]])

    def evict(self, seq: Sequence) -> None:
        """Removes the sequence's blocks from the prefix cache, because their contents may be
        corrupt."""
        for hash_ in seq.block_hashes:
            for group in range(len(self.windows)):
                self.hash_to_block_id.pop(hash_ + (group << 64), None)

    def deallocate(self, seq: Sequence) -> None:
        """Frees the sequence's blocks, last to first, so that prefixes are evicted last."""
        if seq.block_tables:
            self.free_table_rows.append(seq.table_row)
        for block_id in reversed(self._held(seq.block_tables, seq.num_full_blocks)):
            self._release(block_id)
        seq.block_tables = []
        seq.num_cached_tokens = seq.num_full_blocks = seq.table_len = 0

    def _cached_prefix(self, seq: Sequence) -> list[list[int]]:
        """Returns the first entries of each group's block table, for the sequence's longest cached
        prefix. Only the entries that ``_held`` selects are sure to be cached blocks. No other is
        needed."""
        tables: list[list[int]] = [[] for _ in range(len(self.windows))]
        limit = min(len(seq), seq.num_reusable_tokens) // self.block_size
        num_hits, next_hit = 0, 0  # next_hit: the shortest prefix that may be a hit after a miss
        for i in range(limit if self.enable_prefix_caching else 0):
            token_ids = seq.block(i)
            for group, table in enumerate(tables):
                block_id = self.hash_to_block_id.get(self._hash(seq, i, group))
                if block_id is None or self.blocks[block_id].token_ids != token_ids:
                    block_id, next_hit = 0, max(next_hit, i + 1 + self.window_blocks[group])
                table.append(block_id)
            if next_hit > limit:
                break
            if i + 1 >= next_hit:
                num_hits = i + 1
        return [table[:num_hits] for table in tables]

    def _held(self, tables: list[list[int]], num_full: int) -> list[int]:
        """Returns the blocks in all groups' tables that the windows still need, if ``num_full``
        full blocks are computed."""
        windowed = zip(tables, self.window_blocks, strict=False)  # none before allocation
        return [i for table, window in windowed for i in table[max(0, num_full - window) :]]

    def _table_lens(self, seq: Sequence, num_full: int) -> Iterator[int]:
        """Yields the length of each group's table, if ``num_full`` full blocks are computed."""
        for window in self.window_blocks:
            yield min(seq.num_blocks, max(num_full, window) + self.num_chunk_blocks)

    def _extend(self, seq: Sequence) -> None:
        """Appends free blocks to the sequence's tables, as far as its next step needs them."""
        lengths = self._table_lens(seq, seq.num_full_blocks)
        for table, length in zip(seq.block_tables, lengths, strict=True):
            while len(table) < length and self.free_block_ids:
                table.append(self._take_block())
        seq.table_len = min(map(len, seq.block_tables))

    def _hash(self, seq: Sequence, i: int, group: int) -> int:
        """Returns the hash of a group's full block i. Its lower 64 bits are the chain hash, which
        is computed once per sequence. The bits above are the group's index."""
        while len(seq.block_hashes) <= i:
            prefix = seq.block_hashes[-1] if seq.block_hashes else None
            seq.block_hashes.append(self.compute_hash(seq.block(len(seq.block_hashes)), prefix))
        return seq.block_hashes[i] + (group << 64)

    def _take_row(self, seq: Sequence) -> None:
        if not self.free_table_rows:
            self.free_table_rows.append(self.num_table_rows)
            self.num_table_rows += 1
        seq.table_row, seq.num_sent_blocks = self.free_table_rows.pop(), 0

    def _take_block(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        self._reset_block(self.blocks[block_id])
        self.used_block_ids.add(block_id)
        return block_id

    def _release(self, block_id: int) -> None:
        """Drops a reference to a block, and frees the block if it was the last one."""
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            self.used_block_ids.remove(block_id)
            self.free_block_ids[block_id] = None

    def _reset_block(self, block: Block) -> None:
        """Removes a block from the prefix cache, and makes it an empty block with one owner."""
        if block.hash is not None and self.hash_to_block_id.get(block.hash) == block.block_id:
            del self.hash_to_block_id[block.hash]
        block.reset()
