"""Several completions of one prompt: all but the first start with copies of its blocks."""

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus


def start_siblings(scheduler: Scheduler, seq: Sequence) -> None:
    """Starts the siblings of a sequence whose prompt has just been computed. Each computes only the
    prompt's last token again. Siblings that do not fit wait, and find the prompt in the prefix
    cache or recompute it."""
    manager, running = scheduler.block_manager, scheduler.running
    siblings, seq.siblings = seq.siblings, []
    num_residents = sum(1 + len(other.siblings) for other in running)
    num_free = len(manager.free_block_ids) // len(manager.windows)  # each needs one per group
    fit = max(0, min(scheduler.max_seqs_now - num_residents, num_free))
    started, others = siblings[:fit], siblings[fit:]
    for sibling in started:
        scheduler.block_copies += fork(manager, seq, sibling)
        sibling.status = SequenceStatus.RUNNING
    index = running.index(seq) + 1
    running[index:index] = started
    for sibling in reversed(others):
        scheduler.waiting.put_back(sibling)


def fork(manager: BlockManager, parent: Sequence, child: Sequence) -> list[tuple[int, int]]:
    """Gives a waiting child the keys and values of all its tokens but the last. Full blocks are
    shared with the parent. A partly filled last block is copied.

    Args:
        parent: a sequence with blocks, whose tokens begin with the child's. If a group has a
            window, it must have computed no more tokens than the child has.
        child: a waiting sequence without blocks.

    Returns:
        The pairs (source, target) of blocks to copy before the next step.
    """
    assert len(manager.free_block_ids) >= len(manager.windows)
    num_shared = (len(child) - 1) // manager.block_size
    child.block_hashes = parent.block_hashes[:num_shared]
    tables = [table[:num_shared] for table in parent.block_tables]
    manager.start_with(child, tables, parent.num_full_blocks, num_cached_tokens=len(child) - 1)
    if child.num_cached_tokens % manager.block_size == 0:
        return []
    tables_of_both = zip(parent.block_tables, child.block_tables, strict=True)
    return [(old[num_shared], new[num_shared]) for old, new in tables_of_both]
