"""Runs requests on one engine, and recovers when the engine fails."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isqrt
from time import monotonic, time
from typing import Any

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
from nanovllm.run_batch.stop import Stop

logger = logging.getLogger("nanovllm.run_batch")

MAX_ATTEMPTS = 3
NUM_THREADS = 4  # for preparing requests
EXHAUSTED: Any = object()
WAIT_SECONDS = 0.1  # longest wait for these threads before ``stop`` is checked again


class EngineLostError(RuntimeError):
    """The engine failed, and no new engine could be created."""


@dataclass(slots=True, eq=False)
class _RequestState:
    """The state of a request in flight.

    Attributes:
        request: the request.
        generation: the request's parsed body.
        prompts: the prompts to add to the engine.
        slot: the slot in the journal, while the request is being prepared or has prompts in the
            engine; otherwise None.
        num_running: the number of prompts in the engine.
        outputs: the outputs of finished prompts, by prompt index.
        is_finished: whether the request has its record, or was dropped.
    """

    request: BatchRequest
    generation: Generation = None  # type: ignore[assignment]  # until it is prepared
    prompts: Sequence[Any] = ()
    slot: int | None = None
    num_running: int = 0
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    is_finished: bool = False


@dataclass(slots=True, eq=False)
class _Prompt:
    """One prompt of a request, with the number of times that the engine failed while running it."""

    state: _RequestState
    index: int
    num_failures: int = 0

    @property
    def num_completions(self) -> int:
        return self.state.generation.params.n


class Runner:
    """Runs requests on one engine, a bounded number of them at a time.

    If the engine fails, its prompts are retried: first in small groups, then each prompt alone, so
    that a prompt that always makes the engine fail does not affect others. A broken engine is
    replaced. Requests that were in flight when an earlier process died ("suspects") run last, also
    in small groups and then alone.

    Requests with a grammar or their own chat template may take long to prepare. Threads prepare
    them while the engine runs other requests.

    The seed of a request without one depends on the engine's seed and the request's line, not on
    earlier requests. So a job gives the same results however often it is resumed.

    Args:
        make_llm: creates an engine.
        model_names: the names that requests may use for the model. The first is the default.
        journal: records the requests in flight, and knows how often earlier processes died with
            each.

    Attributes:
        llm: the engine; None after a failure, until an engine is needed again.
        window: the maximum number of completions in the engine. A prompt with more runs alone.
        num_in_flight: the number of completions in the engine.
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
        # Waiting prompts by number of failures, and the window for each number.
        self._queues: list[deque[_Prompt]] = [deque() for _ in range(MAX_ATTEMPTS)]
        self._windows = (self.window, isqrt(self.window), 1)
        # Requests by the number of times that the process died with them in flight.
        self._suspects: list[deque[BatchRequest]] = [deque() for _ in range(MAX_ATTEMPTS)]
        self._runs_suspects = False  # the engine runs suspects, and no other request may join
        self._in_flight: dict[str, _Prompt] = {}  # by request id, oldest first; from one queue
        self._num_failures = 0  # since a request last finished
        self._pool = ThreadPoolExecutor(NUM_THREADS, "nanovllm-requests")
        self._preparing: dict[Future[RequestError | None], tuple[_RequestState, LLM]] = {}
        self._records: list[Record] = []  # to return from the next call

    def run(
        self, requests: Iterable[BatchRequest | Record | None], stop: Stop | None = None
    ) -> Iterator[Record]:
        """Yields the record of each request as it finishes. Records among ``requests`` are passed
        through. None among them means that there is no request yet.

        Reads only as many requests as the engine can take. Requests that ``stop`` ends get no
        record.

        Raises:
            EngineLostError: the engine failed and could not be replaced.
        """
        source = iter(requests)
        is_exhausted = False
        try:
            while stop is None or not stop.requested:
                if not is_exhausted and self.has_capacity:
                    item = next(source, EXHAUSTED)
                    if item is EXHAUSTED:
                        is_exhausted = True
                    elif item is None:
                        yield from self.step()
                    elif isinstance(item, BatchRequest):
                        yield from self.add(item)
                    else:
                        yield item
                elif self.is_idle:
                    return
                else:
                    yield from self.step()
            self._drop_waiting()
            logger.info("stopping: waiting for %d running requests", len(self._in_flight))
            while self._in_flight and monotonic() < stop.deadline:
                yield from self.step()
        finally:
            self._clear_queues()
            self._abort_all()

    @property
    def has_capacity(self) -> bool:
        """Whether another request should be added before the next step."""
        if any(self._queues) or (self._runs_suspects and (self._in_flight or self._preparing)):
            return False
        return self.num_in_flight + len(self._preparing) < self.window

    @property
    def is_idle(self) -> bool:
        """Whether every request has its record."""
        is_running = self._in_flight or self._preparing or any(self._queues)
        return not is_running and not any(self._suspects)

    def add(self, request: BatchRequest) -> list[Record]:
        """Adds a request. Returns the error records of requests that cannot run.

        Raises:
            EngineLostError: the engine failed and could not be replaced.
        """
        num_deaths = self._journal.num_deaths(request.digest) if self._journal else 0
        if self._journal and num_deaths >= MAX_ATTEMPTS:
            self._journal.forget(request.digest)
            error = RequestError(
                f"the process died {MAX_ATTEMPTS} times while running this request, the last time "
                f"with no other request",
                status=500,
                code="process_died",
            )
            self._records.append(error_record(request, request.custom_id, error))
        elif num_deaths:
            self._suspects[num_deaths].append(request)
        else:
            self._prepare(request)
        return self._pop_records()

    def step(self) -> list[Record]:
        """Runs one engine step. Returns the records of requests that have finished.

        Raises:
            EngineLostError: the engine failed and could not be replaced.
        """
        self._queue_prepared()
        if not (self._in_flight or self._preparing or any(self._queues)):
            self._prepare_suspects()
        self._fill_engine()
        if self._in_flight:
            llm = self._ensure_engine()
            try:
                outputs = llm.step()
                if llm.is_finished() and len(outputs) < len(self._in_flight):
                    raise RuntimeError("the engine has lost requests")
            except Exception as error:
                self._handle_failure(error, list(self._in_flight.values()))
            else:
                # Remove all finished prompts first: finishing one may abort others of its request.
                for prompt, output in [(self._remove(out.request_id), out) for out in outputs]:
                    self._finish(prompt, output)
        return self._pop_records()

    def close(self) -> None:
        """Frees the engine."""
        if self.llm is not None:
            with suppress(Exception):  # a broken engine may fail to close
                self.llm.close()
            self.llm = None

    def _ensure_engine(self) -> LLM:
        if self.llm is None:
            logger.warning("creating a new engine")
            try:
                self.llm = self._make_llm()
            except Exception as error:
                raise EngineLostError(
                    f"the engine failed, and a new one cannot be created: {describe(error)}"
                ) from error
        return self.llm

    def _prepare(self, request: BatchRequest) -> None:
        """Prepares a request and queues its prompts. A thread does the work if it may take long."""
        llm = self._ensure_engine()
        state = _RequestState(request)
        self._journal_begin(state)
        if has_grammar(request) or has_template(request):
            self._preparing[self._pool.submit(self._read_request, llm, state)] = state, llm
        else:
            self._queue(state, self._read_request(llm, state))

    def _read_request(self, llm: LLM, state: _RequestState) -> RequestError | None:
        """Parses a request's body and makes its prompts. Returns the error if the request is
        invalid. Thread-safe."""
        try:
            state.generation = read_body(state.request, self._defaults, self._model_names)
            state.prompts = _make_prompts(llm, state.generation)
            if has_grammar(state.request):
                _compile_grammar(llm, state)
        except RequestError as error:
            return error
        except Exception as error:  # no request may end the run
            return _internal_error(error)
        return None

    def _queue(self, state: _RequestState, error: RequestError | None) -> None:
        """Queues the prompts of a prepared request, or ends the request with its error."""
        if error:
            self._finish_with_error(state, error)
        else:
            state.request = replace(state.request, body={})  # free the body, which may be large
            self._queues[0].extend(_Prompt(state, i) for i in range(len(state.prompts)))
            self._fill_engine()
        if not state.num_running:
            self._journal_end(state)

    def _queue_prepared(self) -> None:
        """Queues the requests that threads have prepared. Waits for one if nothing else can run."""
        if self._preparing and not self._in_flight and not any(self._queues):
            wait(self._preparing, WAIT_SECONDS, FIRST_COMPLETED)
        for future in [future for future in self._preparing if future.done()]:
            state, llm = self._preparing.pop(future)
            if llm is self.llm:
                self._queue(state, future.result())
            else:  # the engine has been replaced, so prepare the request with the new one
                self._journal_end(state)
                self._prepare(state.request)

    def _prepare_suspects(self) -> None:
        """Prepares some of the suspects: those with the most deaths."""
        level = max((i for i, queue in enumerate(self._suspects) if queue), default=0)
        suspects = self._suspects[level]
        for _ in range(min(len(suspects), self._windows[level])):
            self._prepare(suspects.popleft())
        self._runs_suspects = level > 0

    def _journal_begin(self, state: _RequestState) -> None:
        if self._journal and state.slot is None:
            state.slot = self._journal.begin(state.request.digest)

    def _journal_end(self, state: _RequestState) -> None:
        if self._journal and state.slot is not None:
            self._journal.end(state.slot)
            state.slot = None

    def _pop_records(self) -> list[Record]:
        records, self._records = self._records, []
        return records

    def _fill_engine(self) -> None:
        """Adds prompts to the engine up to the window. All prompts in the engine come from the same
        queue. If the engine is empty, the queue with the most failures goes first."""
        if self._in_flight:
            level = next(iter(self._in_flight.values())).num_failures
        else:
            level = max((i for i, queue in enumerate(self._queues) if queue), default=0)
        queue, window = self._queues[level], self._windows[level]
        while queue and (
            self.num_in_flight + queue[0].num_completions <= window or not self._in_flight
        ):
            prompt = queue.popleft()
            if not prompt.state.is_finished and not self._add_to_engine(prompt):
                return

    def _add_to_engine(self, prompt: _Prompt) -> bool:
        """Adds a prompt to the engine. Returns False if the engine failed."""
        params = prompt.state.generation.params_of(prompt.index)
        llm = self._ensure_engine()
        self._journal_begin(prompt.state)
        prompt.state.num_running += 1
        try:
            request_id = llm.add_request(prompt.state.prompts[prompt.index], params)
        except (TypeError, ValueError) as error:
            self._release(prompt)
            self._finish_with_error(prompt.state, bad_request(error))
        except Exception as error:
            self._release(prompt)
            self._handle_failure(error, [*self._in_flight.values(), prompt])
            return False
        else:
            self._in_flight[request_id] = prompt
            self.num_in_flight += prompt.num_completions
        return True

    def _remove(self, request_id: str) -> _Prompt:
        """Removes a prompt from those in flight."""
        prompt = self._in_flight.pop(request_id)
        self.num_in_flight -= prompt.num_completions
        self._release(prompt)
        return prompt

    def _release(self, prompt: _Prompt) -> None:
        """Counts a prompt as no longer running. Frees the journal's slot after the last one."""
        prompt.state.num_running -= 1
        if not prompt.state.num_running:
            self._journal_end(prompt.state)

    def _finish(self, prompt: _Prompt, output: RequestOutput) -> None:
        self._num_failures = 0
        state = prompt.state
        if state.is_finished:
            return
        for completion in output.outputs:
            if completion.finish_reason == "error":
                message = f"generation failed: {completion.error or 'no token could be sampled'}"
                self._finish_with_error(
                    state, RequestError(message, status=500, code="generation_failed")
                )
                return
        state.outputs[prompt.index] = output
        if len(state.outputs) < len(state.prompts):
            return
        outputs = [state.outputs[i] for i in range(len(state.prompts))]
        try:
            body = make_body(state.request, state.generation, outputs, int(time()))
        except Exception as error:  # no request may end the run
            self._finish_with_error(state, _internal_error(error))
        else:
            state.is_finished = True
            self._records.append(success_record(state.request, state.request.custom_id, body))

    def _handle_failure(self, error: Exception, prompts: list[_Prompt]) -> None:
        """Handles a failure of the engine while it ran these prompts: queues them for a retry, or
        ends their requests after MAX_ATTEMPTS."""
        self._num_failures += 1
        again = [prompt for prompt in prompts if not prompt.state.is_finished]
        logger.warning(
            "the engine failed with %d prompts: %s", len(again), describe(error), exc_info=error
        )
        # Replace an engine at most once: if its successor fails too, the prompts are the cause.
        if isinstance(error, WorkerError) or self._num_failures == MAX_ATTEMPTS:
            self.close()
        self._abort_all()
        for prompt in again:
            prompt.num_failures += 1
            if prompt.num_failures < MAX_ATTEMPTS:
                self._queues[prompt.num_failures].append(prompt)
            else:  # it ran alone
                message = (
                    f"the engine failed {MAX_ATTEMPTS} times while running this request, the last "
                    f"time with no other request: {describe(error)}"
                )
                self._finish_with_error(
                    prompt.state, RequestError(message, status=500, code="engine_failed")
                )

    def _finish_with_error(self, state: _RequestState, error: RequestError) -> None:
        """Ends a request with an error record, and aborts its other prompts."""
        state.is_finished = True
        self._records.append(error_record(state.request, state.request.custom_id, error))
        self._abort_finished()

    def _drop_waiting(self) -> None:
        """Drops the prompts that the engine is not running, and all requests with such a prompt."""
        num_running = self.llm.metrics().num_running if self.llm and self._in_flight else 0
        waiting = self._clear_queues()
        for prompt in self._in_flight.values():  # the engine runs them in this order
            if num_running <= 0:
                waiting.append(prompt)
            num_running -= prompt.num_completions
        for prompt in waiting:
            prompt.state.is_finished = True
        self._abort_finished()

    def _clear_queues(self) -> list[_Prompt]:
        """Empties the queues. Returns the prompts that were in them."""
        for future, (state, _) in self._preparing.items():
            future.cancel()
            self._journal_end(state)
        self._preparing.clear()
        prompts = [prompt for queue in self._queues for prompt in queue]
        for queue, suspects in zip(self._queues, self._suspects, strict=True):
            queue.clear()
            suspects.clear()
        return prompts

    def _abort_finished(self) -> None:
        for request_id, prompt in list(self._in_flight.items()):
            if prompt.state.is_finished:
                self._remove(request_id)
                if self.llm is not None:
                    self.llm.abort_request(request_id)

    def _abort_all(self) -> None:
        """Aborts all requests in the engine. Closes the engine if it fails."""
        try:
            if self.llm is not None and not self.llm.is_finished():
                for request_id in self._in_flight:
                    self.llm.abort_request(request_id)
        except Exception:
            self.close()
        for request_id in list(self._in_flight):
            self._remove(request_id)


def _compile_grammar(llm: LLM, state: _RequestState) -> None:
    """Compiles a request's grammar, so that ``add_request`` need not wait for it. Raises
    RequestError for an invalid grammar."""
    try:
        llm.prepare(state.prompts[0], state.generation.params)
    except (TypeError, ValueError) as error:
        raise bad_request(error) from error


def _make_prompts(llm: LLM, generation: Generation) -> Sequence[Any]:
    """Returns the prompts for the engine. Raises RequestError for an invalid conversation or
    template."""
    if not generation.messages:
        return generation.prompts
    try:
        return llm.render_chat(generation.messages, **generation.template)
    except Exception as error:  # the request's own template may raise anything
        raise bad_request(error) from error


def _internal_error(error: Exception) -> RequestError:
    logger.error("internal error while running a request", exc_info=error)
    return RequestError(f"internal error: {describe(error)}", status=500, code="internal_error")


def describe(error: Exception) -> str:
    """Formats an error's type and message in one line."""
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"
