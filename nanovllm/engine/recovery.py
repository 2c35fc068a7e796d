"""Recovery of steps that ran out of memory, and of sequences for which no token was sampled."""

import copy
import logging

import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sampling_state import SamplingState
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Finish, Sequence, SequenceStatus
from nanovllm.utils.memory import describe_memory, is_out_of_memory

logger = logging.getLogger("nanovllm")


def roll_back(
    error: Exception, batch: Batch, scheduler: Scheduler, model_runner: ModelRunner
) -> bool:
    """Rolls back a step that ran out of memory. Its tokens are computed later, in smaller steps.

    Returns:
        Whether the step was rolled back. False if the error is not an out-of-memory error, or if
        there are several ranks: other ranks may have run the step.

    Raises:
        RuntimeError: not even the smallest step fits.
    """
    if model_runner.tp.size > 1 or not is_out_of_memory(error):
        return False
    memory = describe_memory(model_runner.device)
    if not preempt_batch(batch, scheduler):
        raise RuntimeError(
            f"out of memory in the smallest step ({memory}). Unfinished requests are dropped. "
            f"Lower gpu_memory_utilization, max_num_batched_tokens or max_num_seqs, or end other "
            f"programs that use this memory"
        ) from error
    message = "out of memory in a step of %d tokens; continuing with smaller steps (%s)"
    logger.warning(message, batch.num_tokens, memory)
    return True


def preempt_batch(batch: Batch, scheduler: Scheduler) -> bool:
    """Rolls back the step just scheduled, which ran out of memory, and preempts sequences.

    After a prefill, the next prefills have at most half its tokens. After a decode, at most half
    its sequences are resident. These limits double every RECOVERY_STEPS steps.

    Returns:
        False if no smaller step is possible.
    """
    scheduler.steps_since_recovery = 0
    scheduler.block_copies = [*batch.block_copies, *scheduler.block_copies]
    if batch.is_prefill:
        for item in reversed(batch.items):
            uncache_blocks(scheduler.block_manager, item.seq, item.end)
            scheduler.preempt(item.seq)
        scheduler.max_tokens_now = max(1, batch.num_tokens // 2)
        return batch.num_tokens > 1
    scheduler.max_seqs_now = max(1, len(batch) // 2)
    while len(scheduler.running) > scheduler.max_seqs_now:
        scheduler.preempt(scheduler.running[-1])
    return len(batch) > 1


def uncache_blocks(manager: BlockManager, seq: Sequence, end: int) -> None:
    """Removes the blocks that tokens up to ``end`` fill from the prefix cache, because the step
    that should have computed them failed. No other sequence may hold these blocks."""
    for i in range(seq.num_cached_tokens // manager.block_size, end // manager.block_size):
        for table in seq.block_tables:
            manager.prefix_cache.forget(table[i])


def retry_without_sharing(
    finished: dict[Sequence, Finish], scheduler: Scheduler
) -> dict[Sequence, Sequence]:
    """Retries sequences for which no token could be sampled. Each is computed again, once, without
    shared blocks: its NaN logits may be due to a cached prefix that another sequence computed.

    Args:
        finished: the sequences that finished, and how. Retried sequences are removed from it.

    Returns:
        The retried sequences, and for each the sequence that replaces it.
    """
    retried = {}
    for seq, finish in reversed([*finished.items()]):
        if not finish.error:
            continue
        state = seq.completion.sampling
        # An edit may have failed, or may forbid every token. A retry would end in the same way.
        if reason := next((edit.error for edit in state.edits if edit.error), ""):
            finished[seq] = finish._replace(error=reason)
        elif not seq.shares_no_blocks and not forbids_all(state, seq.token_ids):
            message = "request %s: %s; computing it once more, without the prefix cache"
            logger.warning(message, seq.request_id, finish.error)
            retried[seq] = unshared_copy(seq)
            scheduler.waiting.put_back(retried[seq])
            seq.completion.prompt_logprobs = []
            del finished[seq]
    return retried


def forbids_all(state: SamplingState, token_ids: list[int]) -> bool:
    """Whether the edits forbid every token after ``token_ids``, whatever the logits are."""
    logits = torch.zeros(1, state.vocab_size, dtype=torch.float32, device="cpu")
    for edit in state.edits:
        edit.apply(logits, token_ids)
    return bool(logits.isneginf().all())


def unshared_copy(seq: Sequence) -> Sequence:
    """Returns a waiting copy, to be computed again from the start without shared blocks."""
    new = copy.copy(seq)
    new.status, new.shares_no_blocks = SequenceStatus.WAITING, True
    new.block_tables, new.last_blocks, new.block_hashes = [], [], []
    new.num_cached_tokens = new.num_full_blocks = new.table_len = 0
    new.num_prompt_logprobs = 0
    new.last_token, new.num_tokens = seq.token_ids[-1], len(seq.token_ids)
    return new
