"""What a step does that runs out of memory, or cannot sample a token."""

import copy
import logging

import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sampling_state import SamplingState
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Finish, Sequence, SequenceStatus
from nanovllm.utils.memory import describe_memory, is_out_of_memory

logger = logging.getLogger("nanovllm")


def roll_back(
    error: Exception, batch: Batch, scheduler: Scheduler, model_runner: ModelRunner
) -> bool:
    """Rolls back a step that ran out of memory, so that smaller ones compute the same later.
    Returns False if the error has another cause, or there are several ranks, of which the others
    cannot roll back.

    Raises:
        RuntimeError: not even the smallest step fits.
    """
    if model_runner.tp.size > 1 or not is_out_of_memory(error):
        return False
    memory = describe_memory(model_runner.device)
    if not scheduler.roll_back(batch):
        raise RuntimeError(
            f"out of memory in the smallest step ({memory}). Unfinished requests are dropped. "
            f"Lower gpu_memory_utilization, max_num_batched_tokens or max_num_seqs, or end what "
            f"else uses this memory"
        ) from error
    message = "out of memory in a step of %d tokens; going on with smaller ones (%s)"
    logger.warning(message, batch.num_tokens, memory)
    return True


def retry_alone(finished: dict[Sequence, Finish], scheduler: Scheduler) -> dict[Sequence, Sequence]:
    """Takes out the sequences that ended because no token could be sampled, and queues each to be
    computed again once, alone: the NaN may have come with a prefix that another sequence computed.
    Returns them, and the sequences that take their place."""
    retried = {}
    for seq, finish in reversed([*finished.items()]):
        if not finish.error:
            continue
        state = seq.completion.sampling
        if reason := next((edit.error for edit in state.edits if edit.error), ""):
            finished[seq] = finish._replace(error=reason)
        elif not seq.is_isolated and not allows_none(state, seq.token_ids):
            message = "request %s: %s; computing it once more, alone"
            logger.warning(message, seq.request_id, finish.error)
            retried[seq] = alone(seq)
            scheduler.waiting.put_back(retried[seq])
            seq.completion.prompt_logprobs = []
            del finished[seq]
    return retried


def allows_none(state: SamplingState, token_ids: list[int]) -> bool:
    """Whether the parameters forbid every token after these, whatever the logits are."""
    logits = torch.zeros(1, state.vocab_size)
    for edit in state.edits:
        edit.apply(logits, token_ids)
    return bool(logits.isneginf().all())


def alone(seq: Sequence) -> Sequence:
    """Returns a copy that waits to be computed again from the start, sharing no blocks."""
    new = copy.copy(seq)
    new.status, new.is_isolated = SequenceStatus.WAITING, True
    new.block_table, new.block_hashes, new.num_cached_tokens = [], [], 0
    new.num_prompt_logprobs = 0
    new.last_token, new.num_tokens = seq.token_ids[-1], len(seq.token_ids)
    return new
