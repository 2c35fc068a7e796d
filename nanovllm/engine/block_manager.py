"""Allocates KV-cache blocks and keeps the prefix cache. Works with ids and hashes, not tensors."""

from collections import OrderedDict

import numpy as np
import xxhash

from nanovllm.engine.batch import Batch
from nanovllm.engine.sequence import Sequence


class Block:
    """One physical block: ``block_size`` consecutive token slots of every layer's KV cache.

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
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
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
        """How many of a waiting sequence's tokens the cache holds, in full blocks."""
        return len(self._cached_prefix(seq)) * self.block_size

    def can_allocate(self, seq: Sequence, num_spare_blocks: int = 0) -> bool:
        """Whether there are free blocks for all tokens of a waiting sequence, and
        ``num_spare_blocks`` more."""
        num_shared = sum(block_id in self.used_block_ids for block_id in self._cached_prefix(seq))
        return seq.num_blocks - num_shared + num_spare_blocks <= len(self.free_block_ids)

    def allocate(self, seq: Sequence) -> None:
        """Gives a waiting sequence blocks for all its tokens, its cached prefix first.

        Sets ``num_cached_tokens`` to what the cache already holds.
        """
        assert not seq.block_table
        prefix = self._cached_prefix(seq)
        for block_id in prefix:
            if block_id in self.used_block_ids:
                self.blocks[block_id].ref_count += 1
            else:
                del self.free_block_ids[block_id]
                self.used_block_ids.add(block_id)
                self.blocks[block_id].ref_count = 1
        seq.block_table = prefix
        seq.num_cached_tokens = len(prefix) * self.block_size
        self._take_row(seq)
        while len(seq.block_table) < seq.num_blocks:
            seq.block_table.append(self._take_block())

    def fork(self, parent: Sequence, child: Sequence) -> tuple[int, int] | None:
        """Gives a waiting child the blocks of a parent whose tokens begin with the child's. These
        blocks hold the keys and values of all the child's tokens but the last. Full blocks are
        shared. A partly filled last block is copied.

        Returns:
            The pair (source, target) of blocks to copy before the next step; None if there is none.
        """
        assert not child.block_table and self.free_block_ids
        num_shared = (len(child) - 1) // self.block_size
        child.block_table = parent.block_table[:num_shared]
        child.block_hashes = parent.block_hashes[:num_shared]
        child.num_cached_tokens = len(child) - 1
        for block_id in child.block_table:
            self.blocks[block_id].ref_count += 1
        child.block_table.append(self._take_block())
        self._take_row(child)
        if child.num_cached_tokens % self.block_size == 0:
            return None
        return parent.block_table[num_shared], child.block_table[num_shared]

    def can_append(self, seq: Sequence) -> bool:
        """Whether the sequence's last token has a slot, or there is a free block to append."""
        has_slot = seq.num_tokens <= len(seq.block_table) * self.block_size
        return has_slot or bool(self.free_block_ids)

    def may_append(self, seq: Sequence) -> None:
        """Appends a block if the sequence's last token has no slot yet."""
        if seq.num_tokens > len(seq.block_table) * self.block_size:
            seq.block_table.append(self._take_block())

    def mark_computed(self, batch: Batch) -> None:
        """Records what a launched step computes: its tokens count as computed, its block tables as
        sent to the device. The blocks that it fills are cached. Skips finished sequences."""
        for seq, start, end, _ in batch.items:
            if not seq.is_finished:
                if end > seq.num_cached_tokens:
                    seq.num_cached_tokens = end
                seq.num_sent_blocks = len(seq.block_table)
                # A decode fills a block only if its token takes the last slot.
                if batch.is_prefill or end % self.block_size == 0:
                    self.cache_blocks(seq, start, end)

    def cache_blocks(self, seq: Sequence, start: int, end: int) -> None:
        """Adds to the prefix cache the blocks that tokens [start, end) fill. Their keys and values
        are already computed, or are computed before any other sequence reads them."""
        if not self.enable_prefix_caching or seq.is_isolated:
            return
        for i in range(start // self.block_size, end // self.block_size):
            block = self.blocks[seq.block_table[i]]
            if block.hash is None:
                block.update(self._hash(seq, i), seq.block(i))
                # If an equal block is already cached, later sequences share that one.
                self.hash_to_block_id.setdefault(self._hash(seq, i), block.block_id)

    def uncache_blocks(self, seq: Sequence, end: int) -> None:
        """Rolls back ``cache_blocks`` for tokens up to ``end``, because the step that should have
        computed them failed. No other sequence may hold these blocks."""
        for i in range(seq.num_cached_tokens // self.block_size, end // self.block_size):
            self._reset_block(self.blocks[seq.block_table[i]])

    def evict(self, seq: Sequence) -> None:
        """Removes the sequence's blocks from the prefix cache, because their contents may be
        corrupt."""
        for hash_ in seq.block_hashes:
            self.hash_to_block_id.pop(hash_, None)

    def deallocate(self, seq: Sequence) -> None:
        """Frees the sequence's blocks, last to first, so that prefixes are evicted last."""
        if seq.block_table:
            self.free_table_rows.append(seq.table_row)
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids[block_id] = None
        seq.block_table = []
        seq.num_cached_tokens = 0

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """Blocks that hold the sequence's longest cached prefix; the first miss ends it."""
        block_ids: list[int] = []
        if not self.enable_prefix_caching:
            return block_ids
        for i in range(min(len(seq), seq.num_reusable_tokens) // self.block_size):
            block_id = self.hash_to_block_id.get(self._hash(seq, i))
            if block_id is None or self.blocks[block_id].token_ids != seq.block(i):
                break
            block_ids.append(block_id)
        return block_ids

    def _hash(self, seq: Sequence, i: int) -> int:
        """Returns the chain hash of full block i, computed once per sequence."""
        while len(seq.block_hashes) <= i:
            prefix = seq.block_hashes[-1] if seq.block_hashes else None
            seq.block_hashes.append(self.compute_hash(seq.block(len(seq.block_hashes)), prefix))
        return seq.block_hashes[i]

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

    def _reset_block(self, block: Block) -> None:
        """Removes a block from the prefix cache, and makes it an empty block with one owner."""
        if block.hash is not None and self.hash_to_block_id.get(block.hash) == block.block_id:
            del self.hash_to_block_id[block.hash]
        block.reset()
