"""What holds of the block manager and the scheduler between any two steps."""

from collections import Counter
from collections.abc import Iterable, Iterator

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.prefix_cache import PrefixCache
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus


def held_blocks(manager: BlockManager, seq: Sequence) -> Iterator[tuple[int, int, int]]:
    """The blocks that a sequence holds: group, index in the block table, block."""
    for group, (table, window) in enumerate(
        zip(seq.block_tables, manager.window_blocks, strict=True)
    ):
        for i in range(max(0, seq.num_full_blocks - window), len(table)):
            yield group, i, table[i]


def prefix_cache(manager: BlockManager) -> PrefixCache:
    """The manager's prefix cache; an empty one if it has none."""
    cache = manager.prefix_cache
    return cache if isinstance(cache, PrefixCache) else PrefixCache(manager.window_blocks)


def check_blocks(manager: BlockManager, holders: Iterable[Sequence]) -> None:
    """Asserts that reference counts, queues, hashes and rows agree with the block tables of all
    sequences that hold blocks."""
    holders = [seq for seq in holders if seq.block_tables]
    held = {seq: list(held_blocks(manager, seq)) for seq in holders}
    refs = Counter(block_id for blocks in held.values() for *_, block_id in blocks)
    free, used = set(manager.free_block_ids), set(manager.used_block_ids)
    assert not free & used and free | used == set(range(manager.num_blocks))
    assert dict(manager.used_block_ids) == dict(refs)
    cache = prefix_cache(manager)
    for block_id, num_holders in refs.items():
        shareable = block_id in cache.blocks or cache is not manager.prefix_cache
        assert shareable or num_holders == 1, "an open block is shared"
    assert all(len(block.token_ids) == manager.block_size for block in cache.blocks.values())
    for hash_, block_id in cache.hash_to_block_id.items():
        assert block_id in cache.blocks, "a stale hash entry"
        assert cache.blocks[block_id].hash == hash_, "a stale hash entry"
    for seq, blocks in held.items():
        assert len({block_id for *_, block_id in blocks}) == len(blocks)
        assert seq.table_len == min(map(len, seq.block_tables))
        assert seq.last_blocks == [table[-1] for table in seq.block_tables]
        assert 0 <= seq.num_sent_blocks <= seq.table_len
        # One more for a sibling that computes again the last token of a block.
        assert (
            not any(manager.windows)
            or seq.num_full_blocks <= seq.num_cached_tokens // manager.block_size + 1
        )
        for group, i, block_id in blocks:
            if (block := cache.blocks.get(block_id)) is not None:
                assert block.token_ids == seq.block(i)
                assert block.hash >> 64 == group, "a block of another group"
    rows = [seq.table_row for seq in holders] + manager.free_table_rows
    assert sorted(rows) == list(range(manager.num_table_rows)), "a row is shared or lost"


def check_scheduler(scheduler: Scheduler) -> None:
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert all(seq.status is SequenceStatus.RUNNING for seq in scheduler.running)
    assert all(seq.status is SequenceStatus.WAITING for seq in scheduler.waiting)
    assert all(not seq.block_tables for seq in scheduler.waiting)
    for seq in scheduler.running:
        decodes = seq.num_uncached_tokens <= 1
        # The next chunk of a prompt has slots, unless blocks that left its window are shared.
        if not decodes and scheduler.block_manager.free_block_ids:
            chunk = seq.num_cached_tokens + scheduler.max_num_batched_tokens
            assert seq.table_len * seq.block_size >= min(chunk, len(seq))
        for table, window in zip(
            seq.block_tables, scheduler.block_manager.window_blocks, strict=True
        ):
            if decodes or window > seq.num_blocks:
                assert len(table) in (seq.num_blocks, seq.num_blocks - 1)
        assert len(seq) < scheduler.max_len
    check_blocks(scheduler.block_manager, scheduler.running)
