"""Runs requests on one engine, and recovers when the engine fails."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Set
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isqrt
from time import monotonic, time
from typing import Any

from nanovllm.engine.request import PreparedRequest
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.workers import WorkerError
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.run_batch.journal import Journal
from nanovllm.run_batch.records import Record, RequestError, error_record, success_record
from nanovllm.run_batch.request import BatchRequest, Generation, bad_request, read_body
from nanovllm.run_batch.response import make_body
from nanovllm.run_batch.stop import StopOnSignal

logger = logging.getLogger("nanovllm.run_batch")

# The engine can reorder only requests that have been added to it. In a simulation of 5,000
# shuffled prompts with 50 prefixes, a KV cache for 15 of them and max_num_seqs=512, prefills
# computed 1.80 times the distinct tokens with 4 * max_num_seqs requests, 1.09 times with 8 *, and
# 1.03 times with all.
QUEUE_FACTOR = 8
MAX_WINDOW = 2**14  # unless it would be less than twice max_num_seqs
MAX_QUEUED_TOKENS = 2**22  # of prompts; each takes about 50 bytes
MAX_ATTEMPTS = 3
NUM_THREADS = 4  # for preparing requests
WAIT_SECONDS = 0.1  # longest wait for these threads before ``stop`` is checked again
EXHAUSTED: Any = object()


def max_window(max_num_seqs: int) -> int:
    """Returns the maximum number of completions in an engine that reorders requests."""
    return max(2 * max_num_seqs, min(QUEUE_FACTOR * max_num_seqs, MAX_WINDOW))


class EngineLostError(RuntimeError):
    """The engine failed, and no new engine could be created."""


@dataclass(slots=True, eq=False)
class _RequestState:
    """The state of a request that has no record yet.

    Attributes:
        request: the request.
        attempt: how many earlier attempts ended in a failure of the engine or its process.
        generation: the request's parsed body.
        prompts: the request's prompts, prepared for the engine.
        request_ids: the engine's request ids of the prompts that have been added to it, in order,
            and the number of tokens of each prompt.
        sequences: the first sequence of each prompt that has been added to the engine.
        outputs: the outputs of finished prompts, by request id.
    """

    request: BatchRequest
    attempt: int
    generation: Generation = None  # type: ignore[assignment]  # until it is prepared
    prompts: Seq[PreparedRequest] = ()
    request_ids: dict[str, int] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    @property
    def num_completions(self) -> int:
        """The number of completions of each prompt."""
        return self.generation.params.n

    @property
    def has_started(self) -> bool:
        """Whether the scheduler has admitted one of its prompts. Also valid after a failure."""
        return any(seq.num_cached_prompt_tokens is not None for seq in self.sequences)

    @property
    def waits(self) -> bool:
        """Whether the scheduler has not admitted all of its prompts."""
        return any(seq.num_cached_prompt_tokens is None for seq in self.sequences)


class Runner:
    """Runs requests on one engine, a bounded number of them at a time.

    A request is active from its preparation until it has its record. If the engine fails, the
    requests that it was running are retried: first in small groups, then each alone, so that a
    request that always makes the engine fail does not affect others. Requests that only waited in
    the engine are added to it again as before. A broken engine is replaced. Requests that were in
    flight when an earlier process died, running or waiting, are retried too.

    The engine has several times the requests that it can run at a time, and orders them so that the
    job takes less time (see ``Config.enable_reordering``). Between two steps, at most
    ``max_num_batched_tokens`` prompt tokens are read, so that the GPU is not idle for long.

    Requests with a grammar or their own chat template may take long to prepare. Threads prepare
    them while the engine runs other requests.

    A request without a seed gets one that depends on the engine's seed and the request's line, but
    not on earlier requests. So a job gives the same results, up to rounding, however often it is
    resumed.

    Args:
        make_llm: creates an engine.
        model_names: the names that requests may use for the model. The first is the default.
        journal: keeps track of the requests in flight, and has the number of times that earlier
            processes died while running each request.

    Attributes:
        llm: the engine; None after a failure, until an engine is needed again.
        window: the maximum number of completions in the engine. A prompt with more completions than
            that runs alone.
        num_in_flight: the number of completions in the engine.
        num_tokens_in_flight: the number of tokens of their prompts.
    """

    def __init__(
        self, make_llm: Callable[[], LLM], model_names: Seq[str], journal: Journal
    ) -> None:
        self.llm: LLM | None = make_llm()
        config, max_num_seqs = self.llm.config, self.llm.scheduler.max_num_seqs
        self.window = small_window = 2 * max_num_seqs
        if config.enable_reordering:
            self.window = max_window(max_num_seqs)
        self.num_in_flight = self.num_tokens_in_flight = 0
        self._small_window = small_window
        self._tokens_per_step = config.max_num_batched_tokens
        self._num_new_tokens = 0  # of prompts added since the last step
        self._make_llm = make_llm
        self._model_names = model_names
        self._journal = journal
        self._defaults = replace(self.llm.get_default_sampling_params(), seed=config.seed)
        self._max_tokens = self.llm.recommended_sampling.get("max_tokens")
        self._waiting: list[_RequestState] = []  # to be retried; those at attempt 0 are last
        # Active requests, oldest first. All of them are at the same attempt. A request is prepared
        # first. Then its prompts are ready, and then they are in flight in the engine.
        self._attempt = 0
        self._active: dict[_RequestState, None] = {}
        self._preparing: dict[Future[RequestError | None], _RequestState] = {}
        self._ready: deque[tuple[_RequestState, PreparedRequest]] = deque()
        self._in_flight: dict[str, _RequestState] = {}  # by request id
        self._num_failures = 0  # of the engine, since a request last finished
        self._pool = ThreadPoolExecutor(NUM_THREADS, "nanovllm-requests")
        self._records: list[Record] = []  # to yield next

    def run(
        self, requests: Iterable[BatchRequest | Record], stop: StopOnSignal | None = None
    ) -> Generator[Record, None, None]:
        """Yields the record of each request as it finishes. Records among ``requests`` are passed
        through.

        Reads only as many requests as the engine can take. Requests that ``stop`` ends get no
        record.

        Raises:
            EngineLostError: the engine failed and could not be replaced.
        """
        source = iter(requests)
        try:
            while stop is None or not stop.requested:
                records = self.advance(source)
                if records is None:
                    return
                yield from records
            self.end_unstarted()
            logger.info("stopping: waiting for %d running requests", len(self._in_flight))
            while self._in_flight and monotonic() < stop.deadline:
                yield from self.advance(iter(())) or ()
        finally:
            self._waiting.clear()
            self._end_all()

    def advance(self, source: Iterator[BatchRequest | Record]) -> list[Record] | None:
        """Reads a request, if there is capacity for it, or runs an engine step.

        Returns:
            The records of requests that have finished, and those read from ``source``; None if
            every request has its record and ``source`` is exhausted.

        Raises:
            EngineLostError: the engine failed and could not be replaced.
        """
        item = next(source, EXHAUSTED) if self._has_capacity else None
        if isinstance(item, BatchRequest):
            self._add(item)
        elif isinstance(item, dict):
            self._records.append(item)
        elif item is EXHAUSTED and self.is_idle:
            return None
        else:
            self._step()
        records, self._records = self._records, []
        return records

    @property
    def is_idle(self) -> bool:
        """Whether every request has its record."""
        return not self._active and not self._waiting

    def close(self) -> None:
        """Frees the engine."""
        if self.llm is not None:
            with suppress(Exception):  # a broken engine may fail to close
                self.llm.close()
            self.llm = None

    @property
    def _has_capacity(self) -> bool:
        """Whether another request should be read before the next step: the window is not
        full, no request is being retried, and fewer than ``window`` requests wait for a retry."""
        may_read = self._attempt == 0 and len(self._waiting) < self.window
        # A request that waits at attempt 0 had not started when the engine failed: it is next.
        may_read = may_read and (not self._waiting or self._waiting[-1].attempt > 0)
        return may_read and self._can_start

    @property
    def _can_start(self) -> bool:
        num_preparing = len(self._preparing)
        may_prepare = not self._ready and num_preparing < self._small_window
        may_prepare = may_prepare and self._num_new_tokens < self._tokens_per_step
        return may_prepare and self.num_in_flight + num_preparing < self._window_now

    @property
    def _window_now(self) -> int:
        """The maximum number of completions in the engine at the current attempt. It is at most
        twice ``max_num_seqs`` while their prompts have MAX_QUEUED_TOKENS or more."""
        if self._attempt:
            return isqrt(self._small_window) if self._attempt == 1 else 1
        is_long = self.num_tokens_in_flight >= MAX_QUEUED_TOKENS
        return self._small_window if is_long else self.window

    def _add(self, request: BatchRequest) -> None:
        """Starts a request. If earlier processes died while running it, it waits for a retry, or
        ends with an error after MAX_ATTEMPTS."""
        num_deaths = self._journal.num_deaths(request.digest)
        state = _RequestState(request, num_deaths)
        if num_deaths >= MAX_ATTEMPTS:
            self._journal.forget(request.digest)
            message = (
                f"the process died {MAX_ATTEMPTS} times while running this request, the last time "
                f"with no other request (or somebody killed it)"
            )
            self._end_with_error(state, RequestError(message, status=500, code="process_died"))
        elif num_deaths:
            self._waiting.append(state)
        else:
            self._start(state)

    def _step(self) -> None:
        """Runs one engine step.

        Raises:
            EngineLostError: the engine failed and could not be replaced.
        """
        self._start_waiting()
        self._take_prepared()
        self._fill_engine()
        self._num_new_tokens = 0  # also if the prompts have been dropped since
        if self._in_flight:
            llm = self._ensure_engine()
            try:
                outputs = llm.step()
                if llm.is_finished() and len(outputs) < len(self._in_flight):
                    raise RuntimeError("the engine has lost requests")
            except Exception as error:
                self._handle_failure(error)
            else:
                for output in outputs:
                    # A request that ends with an error removes its other prompts.
                    if state := self._remove(output.request_id):
                        self._finish(state, output)

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

    def _start_waiting(self) -> None:
        """Starts requests that are waiting, up to the window. If no request is active, continues
        with the requests that have had the most attempts."""
        if not self._active:
            self._sort_waiting()
            self._attempt = self._waiting[0].attempt if self._waiting else 0
        while self._waiting and self._waiting[0].attempt == self._attempt and self._can_start:
            self._start(self._waiting.pop(0))

    def _sort_waiting(self) -> None:
        self._waiting.sort(key=lambda state: -state.attempt)

    def _start(self, state: _RequestState) -> None:
        """Prepares a request and adds its prompts. A thread prepares it if that may take long."""
        llm = self._ensure_engine()
        self._journal.begin(state.request.digest)
        self._active[state] = None
        if state.request.has_grammar or state.request.has_template:
            self._preparing[self._pool.submit(self._prepare, llm, state)] = state
        else:
            self._finish_preparing(state, self._prepare(llm, state))
            self._fill_engine()

    def _prepare(self, llm: LLM, state: _RequestState) -> RequestError | None:
        """Parses a request's body and prepares its prompts. Returns the error if the request is
        invalid. Thread-safe."""
        try:
            generation = read_body(
                state.request, self._defaults, self._model_names, self._max_tokens
            )
            state.generation = generation
            prompts: Seq[Any] = generation.prompts
            if generation.messages:
                prompts = llm.render_chat(generation.messages, **generation.template)
            params = map(generation.params_of, range(len(prompts)))
            state.prompts = list(map(llm.prepare, prompts, params))
        except RequestError as error:
            return error
        except (TypeError, ValueError) as error:
            return bad_request(error)
        except Exception as error:  # no request may end the run
            return _internal_error(error)
        return None

    def _take_prepared(self) -> None:
        """Adds the prompts that threads have prepared. Waits for them if nothing else can run."""
        if self._preparing and not self._in_flight and not self._ready:
            wait(self._preparing, WAIT_SECONDS, FIRST_COMPLETED)
        for future in [future for future in self._preparing if future.done()]:
            self._finish_preparing(self._preparing.pop(future), future.result())

    def _finish_preparing(self, state: _RequestState, error: RequestError | None) -> None:
        """Makes the prompts of a prepared request ready, or ends the request with its error."""
        if error:
            self._end_with_error(state, error)
        else:
            self._ready.extend((state, prompt) for prompt in state.prompts)

    def _fill_engine(self) -> None:
        """Adds prompts to the engine up to the window."""
        while self._ready:
            state, prompt = self._ready[0]
            if self._in_flight and self.num_in_flight + state.num_completions > self._window_now:
                return
            self._ready.popleft()
            if state not in self._active:  # another of its prompts has ended it
                continue
            try:
                llm = self._ensure_engine()
                request_id = llm.add_request(prompt, may_reorder=True)
            except Exception as error:
                self._handle_failure(error, [state])
                return
            self._in_flight[request_id] = state
            state.sequences.append(llm.requests[request_id].seqs[0])
            self.num_in_flight += state.num_completions
            state.request_ids[request_id] = num_tokens = len(prompt.prompt_token_ids)
            self.num_tokens_in_flight += num_tokens
            self._num_new_tokens += num_tokens

    def _remove(self, request_id: str) -> _RequestState | None:
        """Removes a prompt from those in flight. Returns its request, or None if the prompt is not
        in flight."""
        state = self._in_flight.pop(request_id, None)
        if state is not None:
            self.num_in_flight -= state.num_completions
            self.num_tokens_in_flight -= state.request_ids[request_id]
        return state

    def _finish(self, state: _RequestState, output: RequestOutput) -> None:
        """Adds the output of a prompt, and ends the request if it was the last one."""
        self._num_failures = 0
        for completion in output.outputs:
            if completion.finish_reason == "error":
                message = f"generation failed: {completion.error}"
                error = RequestError(message, status=500, code="generation_failed")
                self._end_with_error(state, error)
                return
        state.outputs[output.request_id] = output
        if len(state.outputs) < len(state.prompts):
            return
        outputs = [state.outputs[request_id] for request_id in state.request_ids]
        try:
            body = make_body(state.request, state.generation, outputs, int(time()))
        except Exception as error:  # no request may end the run
            self._end_with_error(state, _internal_error(error))
        else:
            self._end(state)
            self._records.append(success_record(state.request, state.request.custom_id, body))

    def _handle_failure(self, error: Exception, added: Seq[_RequestState] = ()) -> None:
        """Handles a failure of the engine in a step, or while a prompt of ``added`` was added.
        These requests and those that it was running are retried, or end after MAX_ATTEMPTS. Other
        active requests are prepared and added again, at the same attempt. If the engine was running
        none, or adding a prompt failed, all requests in flight are retried."""
        self._num_failures += 1
        num_prompts, failed = len(self._in_flight), {*self._in_flight.values(), *added}
        if not added:
            failed = {state for state in failed if state.has_started} or failed
        logger.warning(
            "the engine failed with %d prompts: %s", num_prompts, describe(error), exc_info=error
        )
        # An engine without all its workers is replaced. Any other is replaced only once, after the
        # third failure in a row: if the new engine fails too, the requests are the cause.
        if isinstance(error, WorkerError) or self._num_failures == MAX_ATTEMPTS:
            self.close()
        for state in self._end_all():
            attempt = state.attempt + (state in failed)
            if attempt < MAX_ATTEMPTS:
                self._waiting.append(_RequestState(state.request, attempt))
            else:  # the window of the last attempt is 1, so no other request was running
                message = (
                    f"the engine failed {MAX_ATTEMPTS} times while running this request, the last "
                    f"time with no other request: {describe(error)}"
                )
                self._end_with_error(state, RequestError(message, status=500, code="engine_failed"))
        self._sort_waiting()

    def _end_with_error(self, state: _RequestState, error: RequestError) -> None:
        self._end(state)
        self._records.append(error_record(state.request, state.request.custom_id, error))

    def _end(self, state: _RequestState) -> None:
        """Ends a request, active or not, and aborts its prompts in the engine."""
        self._active.pop(state, None)
        self._journal.end(state.request.digest)
        for request_id in state.request_ids:
            if self._remove(request_id) and self.llm is not None:
                with suppress(Exception):  # an engine that has failed has no requests
                    self.llm.abort_request(request_id)

    def _end_all(self, kept: Set[_RequestState] = frozenset()) -> list[_RequestState]:
        """Ends all active requests except ``kept``, and returns them. All prompts of ``kept`` must
        be in flight."""
        for future in self._preparing:
            future.cancel()
        self._preparing.clear()
        self._ready.clear()
        ended = [state for state in self._active if state not in kept]
        for state in ended:
            self._end(state)
        return ended

    def end_unstarted(self) -> None:
        """Ends all requests with a prompt that the engine has not started. One whose sequences
        were preempted has started."""
        self._waiting.clear()
        started = {state for state in self._in_flight.values() if not state.waits}
        self._end_all(kept=started - {state for state, _ in self._ready})


def _internal_error(error: Exception) -> RequestError:
    logger.error("internal error while running a request", exc_info=error)
    return RequestError(f"internal error: {describe(error)}", status=500, code="internal_error")


def describe(error: Exception) -> str:
    """Formats an error in one line, without the type's name if the message explains itself."""
    first_line = str(error).partition("\n")[0]
    explains_itself = isinstance(error, (OSError, TypeError, ValueError))
    return first_line if explains_itself else f"{type(error).__name__}: {first_line}"
