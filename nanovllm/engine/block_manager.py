"""Allocates KV-cache blocks. Works with ids and counts, not tensors."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from nanovllm.config import MAX_INT32
from nanovllm.engine.batch import Batch
from nanovllm.engine.sequence import FINISHED, Sequence
from nanovllm.utils.math import cdiv


class BlockCache:
    """The interface of the prefix cache. This base class caches nothing; ``PrefixCache`` does.

    Args:
        window_blocks: number of full blocks that each group of layers needs (see BlockManager).
    """

    def __init__(self, window_blocks: Seq[int]) -> None:
        self.window_blocks = window_blocks

    def lookup(self, seq: Sequence) -> list[list[int]]:
        """Returns the first entries of each group's block table, for the sequence's longest cached
        prefix."""
        return [[] for _ in self.window_blocks]

    def register(self, seq: Sequence, start: int, end: int) -> None:
        """Adds the blocks that tokens [start, end) fill. Their keys and values are already
        computed, or are computed before any other sequence reads them."""

    def forget(self, block_id: int) -> None:
        """Removes a block, if it is cached."""

    def evict(self, seq: Sequence) -> None:
        """Removes the sequence's blocks from the cache, because their contents may be corrupt."""


class BlockManager:
    """Owner of all blocks: each is either free, in a queue, or used, with a reference count. A
    block has ``block_size`` token slots of the KV cache of a group's layers. All groups take their
    blocks from one pool. Every operation is O(1) per block.

    A sequence has a block table for each group of layers. When a step that fills a block has been
    launched, a group with a window frees the blocks that are now outside of the window. Steps run
    in order, so the next owner of such a block writes to it in a later step. The group keeps the
    last ``window_blocks`` full blocks, which suffice even to recompute the last token.

    While a long prompt is prefilled, a group with a window has blocks for the next chunk only.
    After each chunk it gets about as many new blocks as have left the window. A block that other
    sequences share is not free when it leaves, so there may be too few free blocks. Then the next
    chunk is shorter, or the sequence is preempted.

    Args:
        windows: the window of each group, in tokens; None for all tokens.
        max_chunk: maximum number of tokens of a sequence in one step.

    Attributes:
        free_block_ids: the free blocks, least recently freed first. A freed block keeps its
            content until it is allocated again.
        used_block_ids: for each used block, the number of sequences that hold it.
        prefix_cache: finds the blocks that sequences can share.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        windows: Seq[int | None] = (None,),
        max_chunk: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        # Number of full blocks that each group keeps. Without a window, no sequence has as many.
        self.window_blocks = [cdiv(window or MAX_INT32, block_size) for window in windows]
        # Number of blocks after the full ones that a chunk needs at most.
        self.num_chunk_blocks = 1 + cdiv(max_chunk - 1, block_size)
        # Ordered, with O(1) removal from the middle for cache hits.
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.used_block_ids = Counter[int]()
        self.free_table_rows: list[int] = []
        self.num_table_rows = 0  # rows of the device's block tables that have ever been in use
        self.prefix_cache = BlockCache(self.window_blocks)
        if enable_prefix_caching:
            from nanovllm.engine.prefix_cache import PrefixCache

            self.prefix_cache = PrefixCache(self.window_blocks)

    def can_allocate(self, seq: Sequence, num_spare_blocks: int = 0) -> bool:
        """Whether there are free blocks for a waiting sequence, and ``num_spare_blocks`` more for
        each group."""
        tables = self.prefix_cache.lookup(seq)
        num_hits = len(tables[0])
        needed = sum(self._table_lens(seq, num_hits)) + (num_spare_blocks - num_hits) * len(tables)
        # A cached block that no sequence holds is among the free ones.
        needed += sum(block_id in self.free_block_ids for block_id in self._held(tables, num_hits))
        return needed <= len(self.free_block_ids)

    def allocate(self, seq: Sequence) -> None:
        """Gives a waiting sequence the blocks of its cached prefix, then new ones for its other
        tokens. Groups with a window get new ones for the next chunk only.

        Sets ``num_cached_tokens`` to the length of the cached prefix.
        """
        tables = self.prefix_cache.lookup(seq)
        num_hits = len(tables[0])
        self.start_with(seq, tables, num_hits, num_cached_tokens=num_hits * self.block_size)

    def start_with(
        self, seq: Sequence, tables: list[list[int]], num_full_blocks: int, num_cached_tokens: int
    ) -> None:
        """Gives a waiting sequence blocks that have been computed, which it may share with others,
        then new ones.

        Args:
            tables: the first entries of each group's block table, which the sequence keeps.
            num_full_blocks: number of blocks computed so far. Only those of them are held that a
                window needs.
            num_cached_tokens: number of tokens with keys and values.
        """
        assert not seq.block_tables
        seq.block_tables, seq.num_full_blocks = tables, num_full_blocks
        seq.num_cached_tokens = num_cached_tokens
        for block_id in self._held(tables, num_full_blocks):
            self._hold(block_id)
        if not self.free_table_rows:
            self.free_table_rows.append(self.num_table_rows)
            self.num_table_rows += 1
        seq.table_row, seq.num_sent_blocks = self.free_table_rows.pop(), 0
        self._extend(seq)

    def mark_computed(self, batch: Batch) -> None:
        """Records what a launched step computes: its tokens count as computed, and its block tables
        as sent to the device. The blocks that it fills are registered in the prefix cache, and
        those that are now outside of their window are freed. Skips finished sequences."""
        for seq, start, end in zip(batch.seqs, batch.starts, batch.ends, strict=True):
            if seq.status is not FINISHED:
                seq.num_cached_tokens = end
                seq.num_sent_blocks = seq.table_len
                # A decode fills a block only if its token takes the last slot.
                if batch.is_prefill or end % self.block_size == 0:
                    self.prefix_cache.register(seq, start, end)
                    self.slide_windows(seq, end)

    def slide_windows(self, seq: Sequence, end: int) -> None:
        """Frees the blocks that leave their group's window when tokens up to ``end`` are computed,
        and gives the sequence blocks for its next chunk, as far as there are free ones."""
        if (num_full := end // self.block_size) > seq.num_full_blocks:
            for table, window in zip(seq.block_tables, self.window_blocks, strict=True):
                held = max(0, seq.num_full_blocks - window)
                for block_id in table[held : max(0, num_full - window)]:
                    self._release(block_id)
            seq.num_full_blocks = num_full
            self._extend(seq)

    def allocate_next(self, seq: Sequence) -> bool:
        """Gives a running sequence the blocks that its next token or chunk still lacks, as far as
        there are free ones. Returns whether the next token has slots."""
        self._extend(seq)
        return seq.num_cached_tokens < seq.table_len * self.block_size

    def deallocate(self, seq: Sequence) -> None:
        """Frees the sequence's blocks, last to first, so that prefixes are evicted last."""
        if seq.block_tables:
            self.free_table_rows.append(seq.table_row)
        for block_id in reversed(self._held(seq.block_tables, seq.num_full_blocks)):
            self._release(block_id)
        seq.block_tables, seq.last_blocks = [], []
        seq.num_cached_tokens = seq.num_full_blocks = seq.table_len = 0

    def _held(self, tables: list[list[int]], num_full: int) -> list[int]:
        """Returns the blocks in all groups' tables that the windows still need, if ``num_full``
        full blocks are computed."""
        windowed = zip(tables, self.window_blocks, strict=False)  # no tables: no blocks
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
                block_id = next(iter(self.free_block_ids))
                self.prefix_cache.forget(block_id)
                self._hold(block_id)
                table.append(block_id)
        seq.table_len = min(map(len, seq.block_tables))
        seq.last_blocks = [table[-1] for table in seq.block_tables]

    def _hold(self, block_id: int) -> None:
        """Adds a reference to a block."""
        self.free_block_ids.pop(block_id, None)
        self.used_block_ids[block_id] += 1

    def _release(self, block_id: int) -> None:
        """Drops a reference to a block, and frees the block if it was the last one."""
        self.used_block_ids[block_id] -= 1
        if self.used_block_ids[block_id] == 0:
            del self.used_block_ids[block_id]
            self.free_block_ids[block_id] = None
