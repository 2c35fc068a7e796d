"""What holds of the block manager and the scheduler between any two steps."""

from collections import Counter
from collections.abc import Iterable

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus


def check_blocks(manager: BlockManager, holders: Iterable[Sequence]) -> None:
    """Asserts that reference counts, queues, hashes and rows agree with the block tables of all
    sequences that hold blocks."""
    holders = list(holders)
    refs = Counter(block_id for seq in holders for block_id in seq.block_table)
    free, used = set(manager.free_block_ids), manager.used_block_ids
    assert not free & used and free | used == set(range(len(manager.blocks)))
    assert used == set(refs)
    for block in manager.blocks:
        assert block.ref_count == refs[block.block_id]
        shareable = block.hash is not None or not manager.enable_prefix_caching
        assert shareable or block.ref_count <= 1, "an open block is shared"
        assert (block.hash is None) == (not block.token_ids)
    for hash_, block_id in manager.hash_to_block_id.items():
        assert manager.blocks[block_id].hash == hash_, "a stale hash entry"
    for seq in holders:
        assert len(set(seq.block_table)) == len(seq.block_table)
        assert 0 <= seq.num_sent_blocks <= len(seq.block_table)
        for i, block_id in enumerate(seq.block_table):
            block = manager.blocks[block_id]
            assert block.hash is None or block.token_ids == seq.block(i)
    rows = [seq.table_row for seq in holders if seq.block_table] + manager.free_table_rows
    assert sorted(rows) == list(range(manager.num_table_rows)), "a row is shared or lost"


def check_scheduler(scheduler: Scheduler) -> None:
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert all(seq.status is SequenceStatus.RUNNING for seq in scheduler.running)
    assert all(seq.status is SequenceStatus.WAITING for seq in scheduler.waiting)
    assert all(not seq.block_table for seq in scheduler.waiting)
    for seq in scheduler.running:
        assert len(seq.block_table) in (seq.num_blocks, seq.num_blocks - 1)
        assert len(seq) < scheduler.max_len
    check_blocks(scheduler.block_manager, scheduler.running)
