"""The prefix cache: full KV blocks by the hash of all tokens up to their end."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import xxhash

from nanovllm.engine.block_manager import BlockCache
from nanovllm.engine.sequence import Sequence


class Block(NamedTuple):
    """The hash and the token ids of a cached block."""

    hash: int
    token_ids: list[int]


class PrefixCache(BlockCache):
    """Finds full blocks that other sequences have computed, and that a sequence can share.

    As in vLLM, a block's hash covers its tokens and the hash of the block before it, so equal
    hashes mean equal prefixes. Every operation is O(1) per block. A freed block stays in the cache
    until it is allocated again.

    Attributes:
        blocks: the cached blocks, by block id.
        hash_to_block_id: for each hash, the block that sequences share: of several equal blocks,
            the one registered first.
    """

    def __init__(self, window_blocks: Seq[int]) -> None:
        super().__init__(window_blocks)
        self.blocks: dict[int, Block] = {}
        self.hash_to_block_id: dict[int, int] = {}

    @staticmethod
    def compute_hash(token_ids: list[int], prefix: int | None = None) -> int:
        """Returns the xxh64 of the previous block's hash (8 bytes, little endian; absent for a
        first block) followed by the token ids (8 bytes each, little endian)."""
        h = xxhash.xxh64()
        if prefix is not None:
            h.update(prefix.to_bytes(8, "little"))
        h.update(np.asarray(token_ids, dtype="<i8").tobytes())
        return h.intdigest()

    def lookup(self, seq: Sequence) -> list[list[int]]:
        # In a group with a window, only the last ``window_blocks`` entries are sure to be cached
        # blocks. The others lie outside of the window and are never read.
        tables: list[list[int]] = [[] for _ in self.window_blocks]
        limit = num_reusable_tokens(seq) // seq.block_size
        num_hits = 0  # length of the longest prefix found so far, in blocks
        next_hit = 0  # length from which no window reaches back to a block that is not cached
        for i in range(limit):
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

    def register(self, seq: Sequence, start: int, end: int) -> None:
        if seq.shares_no_blocks:
            return
        for i in range(start // seq.block_size, end // seq.block_size):
            for group, table in enumerate(seq.block_tables):
                if table[i] not in self.blocks:
                    hash_ = self._hash(seq, i, group)
                    self.blocks[table[i]] = Block(hash_, seq.block(i))
                    # If an equal block is already cached, later sequences share that one.
                    self.hash_to_block_id.setdefault(hash_, table[i])

    def forget(self, block_id: int) -> None:
        block = self.blocks.pop(block_id, None)
        if block is not None and self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]

    def evict(self, seq: Sequence) -> None:
        for hash_ in seq.block_hashes:
            for group in range(len(self.window_blocks)):
                self.hash_to_block_id.pop(hash_ + (group << 64), None)

    def _hash(self, seq: Sequence, i: int, group: int) -> int:
        """Returns the hash of a group's full block i. Its lower 64 bits are the chain hash. The
        bits above are the group's index."""
        return chain_hash(seq, i) + (group << 64)


def chain_hash(seq: Sequence, i: int) -> int:
    """Returns the hash of all tokens up to the end of full block i. It is computed once per
    sequence."""
    while len(seq.block_hashes) <= i:
        prefix = seq.block_hashes[-1] if seq.block_hashes else None
        block = seq.block(len(seq.block_hashes))
        seq.block_hashes.append(PrefixCache.compute_hash(block, prefix))
    return seq.block_hashes[i]


def num_reusable_tokens(seq: Sequence) -> int:
    """Returns how many leading tokens of a waiting sequence may come from the cache."""
    if seq.shares_no_blocks:
        return 0
    if seq.wants_prompt_logprobs and seq.num_prompt_logprobs < seq.num_prompt_tokens - 1:
        return seq.num_prompt_logprobs  # the next position's logits must be computed
    return len(seq)
