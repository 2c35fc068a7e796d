"""The loop: schedule, run, apply. A step is launched before the tokens of the last one arrive."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from nanovllm.engine.batch import Batch
from nanovllm.engine.in_flight import InFlightStep
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import FINISHED, Finish, Sequence
from nanovllm.utils.forks import leave_to_parent
from nanovllm.utils.memory import release_unused
from nanovllm.utils.panics import is_failure

TEXT_STEPS = 32  # the new tokens of each sequence are detokenized once in this many steps


@dataclass(slots=True)
class AppliedStep:
    """The changes that applying a step has made.

    Attributes:
        num_prefilled: tokens that a prefill computed, among them generated ones of sequences that
            had been preempted; 0 for a decode.
        sampled: the sequences that have a new token, or for which none could be sampled.
        finished: the sequences that ended, and how.
        retried: the sequences that are computed again, and for each the one that replaces it.
        num_failed: how many of the sampled sequences have no new token.
    """

    num_prefilled: int = 0
    sampled: list[Sequence] = field(default_factory=list)
    finished: dict[Sequence, Finish] = field(default_factory=dict)
    retried: dict[Sequence, Sequence] = field(default_factory=dict)
    num_failed: int = 0


class StepLoop:
    """Runs the scheduler's batches, one step ahead of their results.

    Attributes:
        in_flight: the last launched step, until its tokens are applied; otherwise None.
    """

    def __init__(self, scheduler: Scheduler, model_runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.in_flight: InFlightStep | None = None
        self._text_turns = cycle(range(TEXT_STEPS))
        leave_to_parent(self)  # a forked child must not free the step in flight

    def step(self) -> AppliedStep:
        """Launches the next step and applies the previous one while it runs, so that the device
        does not wait for the host."""
        batch = self.scheduler.schedule()
        step = self._run_part(batch, self.model_runner.run, batch) if batch.seqs else None
        last, self.in_flight = self.in_flight, None
        applied = self._apply(last) if last else AppliedStep()
        if step is not None and not all(seq.is_finished for seq in batch.seqs):
            self.in_flight = self._run_part(batch, self.model_runner.sample, step)
            if self.in_flight is not None:
                self.scheduler.launched(batch)
        return applied

    def reset(self) -> None:
        """Drops all sequences, the step in flight and the prefix cache."""
        self.in_flight = None
        self.scheduler.reset()

    def _run_part(
        self, batch: Batch, part: Callable[[Any], InFlightStep], argument: Any
    ) -> InFlightStep | None:
        """Calls ``part(argument)``, which runs a part of a step. If it runs out of memory, rolls
        back the step and returns None. Smaller steps compute its tokens later."""
        try:
            return part(argument)
        except Exception as error:
            from nanovllm.engine.recovery import roll_back

            if not roll_back(error, batch, self.scheduler, self.model_runner):
                raise
        # Outside the except block, in which the exception's frames would still hold tensors.
        release_unused(self.model_runner.device)
        return None

    def _apply(self, step: InFlightStep) -> AppliedStep:
        """Waits for a step and applies its results to its sequences, except those that have
        finished since the launch."""
        self.model_runner.wait(step)
        batch = step.batch
        assert batch is not None and step.token_ids is not None
        results = step.token_ids.tolist()
        seqs = batch.sampled
        rows = [row for row, seq in enumerate(seqs) if seq.status is not FINISHED]
        finished = self.scheduler.postprocess(batch, results)
        retried: dict[Sequence, Sequence] = {}
        if any(finish.error for finish in finished.values()):
            from nanovllm.engine.recovery import retry_without_sharing

            retried = retry_without_sharing(finished, self.scheduler)
            rows = [row for row in rows if seqs[row] not in retried]
        sampled, token_ids = [seqs[row] for row in rows], [results[row] for row in rows]
        if step.logprobs is not None:
            from nanovllm.engine.logprobs import collect_logprobs

            collect_logprobs(sampled, token_ids, step.logprobs.numpy()[rows])
        for seq, finish in finished.items():
            seq.completion.finish = finish
        finished |= self._process_completions(sampled, token_ids, finished)
        num_prefilled = batch.num_tokens if batch.is_prefill else 0
        return AppliedStep(num_prefilled, sampled, finished, retried, token_ids.count(-1))

    def _process_completions(
        self, sampled: list[Sequence], token_ids: list[int], finished: Iterable[Sequence]
    ) -> dict[Sequence, Finish]:
        """Calls ``Completion.process`` for finished sequences, for those whose new token must be
        processed at once, and for a part of the others, which take turns over TEXT_STEPS steps.

        Returns:
            The sequences that a stop string, a grammar or an error ended, and how.
        """
        work = dict.fromkeys((*sampled[next(self._text_turns) :: TEXT_STEPS], *finished), -1)
        for seq, token_id in zip(sampled, token_ids, strict=True):
            must_process = seq.completion.tokens_to_process
            if must_process is not None and must_process[token_id]:
                work[seq] = token_id
        ended = {}
        for seq, token_id in work.items():
            try:
                finish = seq.completion.process(seq, token_id)
            except BaseException as error:  # tokenizers and grammars may raise anything
                if not is_failure(error):
                    raise
                finish = Finish("error", error=f"{type(error).__name__}: {error}")
            if finish is not None:
                seq.completion.finish = ended[seq] = finish
                if not seq.is_finished:
                    self.scheduler.abort(seq)
        return ended
