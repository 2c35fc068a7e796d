"""The loop: schedule, run, apply. The next step is launched before the last one's tokens arrive."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from nanovllm.engine.batch import Batch
from nanovllm.engine.in_flight import InFlightStep
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Finish, Sequence
from nanovllm.utils.forks import leave_to_parent
from nanovllm.utils.memory import release_unused
from nanovllm.utils.panics import is_failure

TEXT_STEPS = 32  # in so many steps, the new tokens of every sequence become text once


@dataclass(slots=True)
class AppliedStep:
    """What a step has changed.

    Attributes:
        num_prefilled: prompt tokens that it computed.
        is_prefill: see ``Batch``.
        sampled: the sequences that have a new token.
        finished: the sequences that ended, and how.
        retried: sequences that are computed again, and those that take their place.
    """

    num_prefilled: int = 0
    is_prefill: bool = False
    sampled: list[Sequence] = field(default_factory=list)
    finished: dict[Sequence, Finish] = field(default_factory=dict)
    retried: dict[Sequence, Sequence] = field(default_factory=dict)


class StepLoop:
    """Runs the scheduler's batches, one step ahead of their results.

    Attributes:
        in_flight: the step that was launched last, until its tokens are applied.
    """

    def __init__(self, scheduler: Scheduler, model_runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.in_flight: InFlightStep | None = None
        self._text_turns = cycle(range(TEXT_STEPS))
        leave_to_parent(self)  # and the step in flight, which a forked child must not free

    def step(self) -> AppliedStep:
        """Launches the next step and, while it runs, applies the step before it: the device never
        waits for the host."""
        batch = self.scheduler.schedule()
        step = self._run_part(batch, self.model_runner.run, batch) if batch.items else None
        last, self.in_flight = self.in_flight, None
        applied = self._apply(last) if last else AppliedStep()
        if step is not None and not all(item.seq.is_finished for item in batch.items):
            self.in_flight = self._run_part(batch, self.model_runner.sample, step)
            if self.in_flight is not None:
                self.scheduler.launched(batch)
        return applied

    def reset(self) -> None:
        """Drops all sequences, whatever an interrupted step has left, and the prefix cache."""
        self.in_flight = None
        self.scheduler.reset()

    def _run_part(
        self, batch: Batch, part: Callable[[Any], InFlightStep], argument: Any
    ) -> InFlightStep | None:
        """Runs a part of a step. Returns None if memory ran out: the step is rolled back then, and
        smaller ones compute the same later."""
        try:
            return part(argument)
        except Exception as error:
            from nanovllm.engine.recovery import roll_back

            if not roll_back(error, batch, self.scheduler, self.model_runner):
                raise
        # Only now are the tensors in the exception's frames gone.
        release_unused(self.model_runner.device)
        return None

    def _apply(self, step: InFlightStep) -> AppliedStep:
        """Waits for a step and applies its results to their sequences, except those that have
        finished since it was launched."""
        self.model_runner.wait(step)
        batch = step.batch
        assert batch is not None and step.token_ids is not None
        results = step.token_ids.tolist()
        rows = [i for i, item in enumerate(batch.sampled) if not item.seq.is_finished]
        finished = self.scheduler.postprocess(batch, results)
        retried: dict[Sequence, Sequence] = {}
        if any(finish.error for finish in finished.values()):
            from nanovllm.engine.recovery import retry_alone

            retried = retry_alone(finished, self.scheduler)
            rows = [row for row in rows if batch.sampled[row].seq not in retried]
        sampled = [batch.sampled[row].seq for row in rows]
        token_ids = [results[row] for row in rows]
        if step.logprobs is not None:
            from nanovllm.engine.logprobs import collect_logprobs

            collect_logprobs(sampled, token_ids, step.logprobs.numpy()[rows])
        for seq, finish in finished.items():
            seq.completion.finish = finish
        finished |= self._process_text(sampled, token_ids, finished)
        num_prefilled = batch.num_tokens if batch.is_prefill else 0
        return AppliedStep(num_prefilled, batch.is_prefill, sampled, finished, retried)

    def _process_text(
        self, sampled: list[Sequence], token_ids: list[int], finished: Iterable[Sequence]
    ) -> dict[Sequence, Finish]:
        """Extends the texts of finished sequences, of those whose new token needs processing, and
        of one in TEXT_STEPS of the others. Returns the sequences that the text, a grammar or an
        error ends, and how."""
        work = dict.fromkeys((*sampled[next(self._text_turns) :: TEXT_STEPS], *finished), -1)
        for seq, token_id in zip(sampled, token_ids, strict=True):
            tokens = seq.completion.tokens_to_process
            if tokens is not None and tokens[token_id]:
                work[seq] = token_id
        ended = {}
        for seq, token_id in work.items():
            try:
                finish = seq.completion.process(seq, token_id)
            except BaseException as error:  # of its tokenizer or its grammar
                if not is_failure(error):
                    raise
                finish = Finish("error", error=f"{type(error).__name__}: {error}")
            if finish is not None:
                seq.completion.finish = ended[seq] = finish
                if not seq.is_finished:
                    self.scheduler.abort(seq)
        return ended
