"""Runs requests on one engine, whatever that engine does."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isqrt
from time import monotonic, time
from typing import Any, Protocol

from nanovllm.engine.workers import WorkerError
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.run_batch.journal import Journal
from nanovllm.run_batch.records import Record, RequestError, error_record, success_record
from nanovllm.run_batch.request import (
    BatchRequest,
    Generation,
    bad_request,
    has_grammar,
    has_template,
    read_body,
)
from nanovllm.run_batch.response import make_body

logger = logging.getLogger("nanovllm.run_batch")

MAX_ATTEMPTS = 3
NUM_THREADS = 4  # that prepare requests
WAIT_SECONDS = 0.1  # for these, before a wish to end is looked for


class EngineLostError(RuntimeError):
    """The engine broke, and no new one could be made."""


class Stop(Protocol):
    """Tells a run to end early.

    Attributes:
        requested: whether it should.
        deadline: until when (``time.monotonic``) what is running may finish.
    """

    @property
    def requested(self) -> bool: ...
    @property
    def deadline(self) -> float: ...


@dataclass(slots=True, eq=False)
class _Job:
    """A request under way.

    Attributes:
        request: the request.
        generation: what it asks for.
        prompts: for the engine.
        place: its place in the journal, while it is being prepared or the engine has prompts of it.
        num_running: how many prompts the engine has.
        outputs: the results that there are, by index of the prompt.
        is_over: it has its record, or is dropped.
    """

    request: BatchRequest
    generation: Generation = None  # type: ignore[assignment]  # until it is prepared
    prompts: Sequence[Any] = ()
    place: int | None = None
    num_running: int = 0
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Prompt:
    """One of a job's prompts, and how many times the engine has failed with it."""

    job: _Job
    index: int
    num_failures: int = 0

    @property
    def weight(self) -> int:
        return self.job.generation.params.n


class Runner:
    """Runs requests on one engine, a bounded number of them at a time.

    Where the engine fails, it runs again what was under way: first in small groups, then each
    prompt alone, so that one that brings down the engine each time takes no other with it. It
    makes a new engine if the old one is broken. Requests that were under way when an earlier
    process died run last, in the same way.

    Requests with grammars or chat templates of their own, which may take long to prepare, are
    prepared in threads, while the engine runs others.

    Requests without a seed draw random numbers that depend on the engine's seed and on their line,
    not on what ran before them: a job gives the same results however often it is resumed.

    Args:
        make_llm: makes an engine.
        model_names: names of the model that requests may give; answers to those that give none
            have the first.
        journal: where to note what is under way, and with what earlier processes have died.

    Attributes:
        llm: the engine; None from when it broke until it is needed.
        window: most completions that the engine is given at once. (A prompt that asks for more
            runs alone.)
        num_in_flight: completions that the engine has been given, and has not finished.
    """

    def __init__(
        self,
        make_llm: Callable[[], LLM],
        model_names: Sequence[str],
        journal: Journal | None = None,
    ) -> None:
        self.llm: LLM | None = make_llm()
        self.window = 2 * self.llm.config.max_num_seqs
        self.num_in_flight = 0
        self._make_llm = make_llm
        self._model_names = model_names
        self._journal = journal
        seed = self.llm.config.seed
        self._defaults = replace(self.llm.get_default_sampling_params(), seed=seed)
        # By the number of their failures: prompts to run, and how many completions at once.
        self._queues: list[deque[_Prompt]] = [deque() for _ in range(MAX_ATTEMPTS)]
        self._windows = (self.window, isqrt(self.window), 1)
        # By the number of deaths: requests with which a process has died.
        self._suspects: list[deque[BatchRequest]] = [deque() for _ in range(MAX_ATTEMPTS)]
        self._is_trial = False  # what the engine has are suspects, and nothing may join them
        self._in_flight: dict[str, _Prompt] = {}  # by request id, oldest first; all of one queue
        self._num_failures = 0  # since the engine has last finished anything
        self._threads = ThreadPoolExecutor(NUM_THREADS, "nanovllm-requests")
        self._preparing: dict[Future[RequestError | None], tuple[_Job, LLM]] = {}
        self._records: list[Record] = []  # to hand out

    def run(
        self, requests: Iterable[BatchRequest | Record], stop: Stop | None = None
    ) -> Iterator[Record]:
        """Yields the record of each request as it finishes, and records among them as they are.

        Reads no further than there is room. Requests that ``stop`` ends have no record.

        Raises:
            EngineLostError: the engine broke, and no new one could be made.
        """
        source = iter(requests)
        is_read = False
        try:
            while stop is None or not stop.requested:
                if not is_read and self.has_room:
                    item = next(source, None)
                    if item is None:
                        is_read = True
                    elif isinstance(item, BatchRequest):
                        yield from self.add(item)
                    else:
                        yield item
                elif self.is_idle:
                    return
                else:
                    yield from self.step()
            self._drop_waiting()
            logger.info("ending: %d requests are still to finish", len(self._in_flight))
            while self._in_flight and monotonic() < stop.deadline:
                yield from self.step()
        finally:
            self._clear_queues()
            self._take_all_back()

    @property
    def has_room(self) -> bool:
        """Whether another request should be added before the next step."""
        if any(self._queues) or (self._is_trial and (self._in_flight or self._preparing)):
            return False
        return self.num_in_flight + len(self._preparing) < self.window

    @property
    def is_idle(self) -> bool:
        """Whether every request has its record."""
        is_running = self._in_flight or self._preparing or any(self._queues)
        return not is_running and not any(self._suspects)

    def add(self, request: BatchRequest) -> list[Record]:
        """Takes a request; returns records of requests that turn out not to run, if there are any.

        Raises:
            EngineLostError: the engine broke, and no new one could be made.
        """
        num_deaths = self._journal.num_deaths(request.digest) if self._journal else 0
        if self._journal and num_deaths >= MAX_ATTEMPTS:
            self._journal.forget(request.digest)
            error = RequestError(
                f"the process died {MAX_ATTEMPTS} times with this request under way, the last time "
                f"with nothing else to do",
                status=500,
                code="process_died",
            )
            self._records.append(error_record(request, request.custom_id, error))
        elif num_deaths:
            self._suspects[num_deaths].append(request)
        else:
            self._prepare(request)
        return self._take_records()

    def step(self) -> list[Record]:
        """Lets the engine do a step; returns records of requests that have finished.

        Raises:
            EngineLostError: the engine broke, and no new one could be made.
        """
        self._take_prepared()
        if not (self._in_flight or self._preparing or any(self._queues)):
            self._try_suspects()
        self._fill()
        if self._in_flight:
            llm = self._engine()
            try:
                outputs = llm.step()
                if llm.is_finished() and len(outputs) < len(self._in_flight):
                    raise RuntimeError("the engine has lost requests")
            except Exception as error:
                self._fail(error, list(self._in_flight.values()))
            else:
                # All of them leave before one of them can drop the others of its job.
                for prompt, output in [(self._leave(out.request_id), out) for out in outputs]:
                    self._finish(prompt, output)
        return self._take_records()

    def close(self) -> None:
        """Frees the engine."""
        if self.llm is not None:
            with suppress(Exception):  # of an engine that is broken
                self.llm.close()
            self.llm = None

    def _engine(self) -> LLM:
        if self.llm is None:
            logger.warning("making a new engine")
            try:
                self.llm = self._make_llm()
            except Exception as error:
                raise EngineLostError(
                    f"the engine broke, and a new one cannot be made: {describe(error)}"
                ) from error
        return self.llm

    def _prepare(self, request: BatchRequest) -> None:
        """Begins with a request."""
        llm = self._engine()
        job = _Job(request)
        self._note_begin(job)
        if has_grammar(request) or has_template(request):
            self._preparing[self._threads.submit(self._read, llm, job)] = job, llm
        else:
            self._queue(job, self._read(llm, job))

    def _read(self, llm: LLM, job: _Job) -> RequestError | None:
        """What a job's request asks for; returns what is wrong with it. Any thread may do this."""
        try:
            job.generation = read_body(job.request, self._defaults, self._model_names)
            job.prompts = _make_prompts(llm, job.generation)
            if has_grammar(job.request):
                _compile_grammar(llm, job)
        except RequestError as error:
            return error
        except Exception as error:  # whatever that is, it must not end the run
            return _internal(error)
        return None

    def _queue(self, job: _Job, error: RequestError | None) -> None:
        """Hands the engine the prompts of a job that has been read, as far as there is room."""
        if error:
            self._refuse(job, error)
        else:
            job.request = replace(job.request, body={})  # which may be large
            self._queues[0].extend(_Prompt(job, i) for i in range(len(job.prompts)))
            self._fill()
        if not job.num_running:
            self._note_end(job)

    def _take_prepared(self) -> None:
        """Goes on with jobs that threads have read; waits for one if there is nothing else."""
        if self._preparing and not self._in_flight and not any(self._queues):
            wait(self._preparing, WAIT_SECONDS, FIRST_COMPLETED)
        for future in [future for future in self._preparing if future.done()]:
            job, llm = self._preparing.pop(future)
            if llm is self.llm:
                self._queue(job, future.result())
            else:  # that engine is gone, perhaps before the job had been read
                self._note_end(job)
                self._prepare(job.request)

    def _try_suspects(self) -> None:
        """Begins with some of the requests with which a process has died: those with which that
        happened most often."""
        level = max((i for i, queue in enumerate(self._suspects) if queue), default=0)
        suspects = self._suspects[level]
        for _ in range(min(len(suspects), self._windows[level])):
            self._prepare(suspects.popleft())
        self._is_trial = level > 0

    def _note_begin(self, job: _Job) -> None:
        if self._journal and job.place is None:
            job.place = self._journal.begin(job.request.digest)

    def _note_end(self, job: _Job) -> None:
        if self._journal and job.place is not None:
            self._journal.end(job.place)
            job.place = None

    def _take_records(self) -> list[Record]:
        records, self._records = self._records, []
        return records

    def _fill(self) -> None:
        """Gives the engine prompts of one queue: of that which it has some of, or else of those
        that have failed most often."""
        if self._in_flight:
            level = next(iter(self._in_flight.values())).num_failures
        else:
            level = max((i for i, queue in enumerate(self._queues) if queue), default=0)
        queue, window = self._queues[level], self._windows[level]
        while queue and (self.num_in_flight + queue[0].weight <= window or not self._in_flight):
            prompt = queue.popleft()
            if not prompt.job.is_over and not self._start(prompt):
                return

    def _start(self, prompt: _Prompt) -> bool:
        """Hands a prompt to the engine; False if the engine failed."""
        params = prompt.job.generation.params_of(prompt.index)
        llm = self._engine()
        self._note_begin(prompt.job)
        prompt.job.num_running += 1
        try:
            request_id = llm.add_request(prompt.job.prompts[prompt.index], params)
        except (TypeError, ValueError) as error:
            self._release(prompt)
            self._refuse(prompt.job, bad_request(error))
        except Exception as error:
            self._release(prompt)
            self._fail(error, [*self._in_flight.values(), prompt])
            return False
        else:
            self._in_flight[request_id] = prompt
            self.num_in_flight += prompt.weight
        return True

    def _leave(self, request_id: str) -> _Prompt:
        """Takes a prompt off the list of those that the engine has."""
        prompt = self._in_flight.pop(request_id)
        self.num_in_flight -= prompt.weight
        self._release(prompt)
        return prompt

    def _release(self, prompt: _Prompt) -> None:
        """Notes that the engine does not have a prompt any more."""
        prompt.job.num_running -= 1
        if not prompt.job.num_running:
            self._note_end(prompt.job)

    def _finish(self, prompt: _Prompt, output: RequestOutput) -> None:
        self._num_failures = 0
        job = prompt.job
        if job.is_over:
            return
        for completion in output.outputs:
            if completion.finish_reason == "error":
                message = f"generation failed: {completion.error or 'no token could be drawn'}"
                self._refuse(job, RequestError(message, status=500, code="generation_failed"))
                return
        job.outputs[prompt.index] = output
        if len(job.outputs) < len(job.prompts):
            return
        outputs = [job.outputs[i] for i in range(len(job.prompts))]
        try:
            body = make_body(job.request, job.generation, outputs, int(time()))
        except Exception as error:  # whatever that is, it must not end the run
            self._refuse(job, _internal(error))
        else:
            job.is_over = True
            self._records.append(success_record(job.request, job.request.custom_id, body))

    def _fail(self, error: Exception, prompts: list[_Prompt]) -> None:
        """Takes note that the engine failed with these prompts, all that it had."""
        self._num_failures += 1
        again = [prompt for prompt in prompts if not prompt.job.is_over]
        logger.warning(
            "the engine failed with %d prompts: %s", len(again), describe(error), exc_info=error
        )
        # A new engine, once: what that does not help is not the old one's fault.
        if isinstance(error, WorkerError) or self._num_failures == MAX_ATTEMPTS:
            self.close()
        self._take_all_back()
        for prompt in again:
            prompt.num_failures += 1
            if prompt.num_failures < MAX_ATTEMPTS:
                self._queues[prompt.num_failures].append(prompt)
            else:  # which was alone
                message = (
                    f"the engine failed {MAX_ATTEMPTS} times with this request, the last time "
                    f"with nothing else to do: {describe(error)}"
                )
                self._refuse(prompt.job, RequestError(message, status=500, code="engine_failed"))

    def _refuse(self, job: _Job, error: RequestError) -> None:
        """Ends a job with an error; prompts of it that have not started are passed over."""
        job.is_over = True
        self._records.append(error_record(job.request, job.request.custom_id, error))
        self._abort_what_is_over()

    def _drop_waiting(self) -> None:
        """Drops what the engine has not started, and the jobs that cannot finish without it."""
        num_running = self.llm.metrics().num_running if self.llm and self._in_flight else 0
        waiting = self._clear_queues()
        for prompt in self._in_flight.values():  # the engine starts them in this order
            if num_running <= 0:
                waiting.append(prompt)
            num_running -= prompt.weight
        for prompt in waiting:
            prompt.job.is_over = True
        self._abort_what_is_over()

    def _clear_queues(self) -> list[_Prompt]:
        """Forgets what the engine does not have; returns the prompts among it."""
        for future, (job, _) in self._preparing.items():
            future.cancel()
            self._note_end(job)
        self._preparing.clear()
        prompts = [prompt for queue in self._queues for prompt in queue]
        for queue, suspects in zip(self._queues, self._suspects, strict=True):
            queue.clear()
            suspects.clear()
        return prompts

    def _abort_what_is_over(self) -> None:
        for request_id, prompt in list(self._in_flight.items()):
            if prompt.job.is_over:
                self._leave(request_id)
                if self.llm is not None:
                    self.llm.abort_request(request_id)

    def _take_all_back(self) -> None:
        """Leaves the engine without requests; gives it up if that is too much for it."""
        try:
            if self.llm is not None and not self.llm.is_finished():
                for request_id in self._in_flight:
                    self.llm.abort_request(request_id)
        except Exception:
            self.close()
        for request_id in list(self._in_flight):
            self._leave(request_id)


def _compile_grammar(llm: LLM, job: _Job) -> None:
    """So that the engine need not when it takes the job's prompts. Raises RequestError."""
    try:
        llm.prepare(job.prompts[0], job.generation.params)
    except (TypeError, ValueError) as error:
        raise bad_request(error) from error


def _make_prompts(llm: LLM, generation: Generation) -> Sequence[Any]:
    """What to give the engine. Raises RequestError for a bad conversation or template."""
    if not generation.messages:
        return generation.prompts
    try:
        return llm.render_chat(generation.messages, **generation.template)
    except Exception as error:  # a template of the request's own may raise anything
        raise bad_request(error) from error


def _internal(error: Exception) -> RequestError:
    logger.error("a request met a fault of this program", exc_info=error)
    return RequestError(f"internal error: {describe(error)}", status=500, code="internal_error")


def describe(error: Exception) -> str:
    """On one line."""
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"
