"""What a step does that runs out of memory, or cannot sample a token."""

import logging

from nanovllm.engine.batch import Batch
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Finish, Sequence
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
        if state.error:
            finished[seq] = finish._replace(error=state.error)
        elif not seq.is_isolated and not state.allows_none(seq.token_ids):
            message = "request %s: %s; computing it once more, alone"
            logger.warning(message, seq.request_id, finish.error)
            retried[seq] = scheduler.retry_alone(seq)
            seq.completion.prompt_logprobs = []
            del finished[seq]
    return retried
