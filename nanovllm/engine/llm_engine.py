"""The engine: requests from prompts to results, around the loop of steps."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from itertools import count
from threading import Condition, current_thread
from time import time
from typing import Any

from tqdm.auto import tqdm

from nanovllm.config import Config
from nanovllm.engine.completion import Completion
from nanovllm.engine.preparation import CLOSED, Checked, RequestPreparer
from nanovllm.engine.request import PreparedRequest, Request, grammar_of, make_outputs, refused
from nanovllm.engine.sampling_state import SamplingStateFactory
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_loop import StepLoop
from nanovllm.outputs import EngineMetrics, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import EVERY_TOKEN
from nanovllm.text.prompts import Prompt, PromptEncoder, as_prompt_list
from nanovllm.utils.forks import leave_to_parent
from nanovllm.utils.progress import bar_maker, shown
from nanovllm.utils.throughput import Throughput

NOT_ALONE = (
    "{} needs the engine to itself: finish the other requests with step, drop them with "
    "abort_request, or close the stream that they belong to"
)
STREAM_OPEN = "generate_stream is not at its end: exhaust, close or abort it first"
CLOSED_MEANWHILE = "this engine was closed, by another call, before this one had finished"


class LLMEngine:
    """Owns the requests from prompt to result.

    Any thread may call it. One call runs at a time: a call waits while another thread is in
    ``generate``, or has unfinished requests that would be in its way. Requests are checked,
    tokenised and their grammars compiled before their call waits.

    Args:
        model: a local checkpoint directory, a ``.gguf`` file, or a hub id.
        kwargs: the other fields of Config.

    Attributes:
        tokenizer: the checkpoint's transformers tokenizer; None if it has none.

    Raises:
        TypeError: an unknown argument or one of the wrong type.
        ValueError: a setting or a checkpoint that cannot work.
    """

    def __init__(self, model: str | os.PathLike[str], **kwargs: Any) -> None:
        self._closed = True  # until start-up succeeds
        leave_to_parent(self)
        config = self.config = Config.create(model, **kwargs)
        from nanovllm.engine.startup import start_up

        started = start_up(config)
        self.model_runner = started.model_runner
        # Runs when the engine is garbage collected, or before the interpreter exits.
        self._close_runner = weakref.finalize(self, self.model_runner.close)
        self.tokenizer = started.prompt_encoder.tokenizer
        self.scheduler = Scheduler(
            config,
            self.model_runner.num_kvcache_blocks,
            started.max_model_len,
            started.eos_token_ids,
            started.eos_token_id,
        )
        self.loop = StepLoop(self.scheduler, self.model_runner)
        self.sampling_states = SamplingStateFactory(
            self.tokenizer, started.prompt_encoder.vocab_size, started.eos_token_ids, config
        )
        self.preparer = RequestPreparer(
            started.prompt_encoder, self.sampling_states, self.scheduler.check_prompt_len
        )
        self.grammars = self.sampling_states.grammars
        self.recommended_sampling = started.recommended_sampling
        self.throughput = Throughput()
        self._requests: dict[str, Request] = {}
        self._device = self.model_runner.device
        self._request_ids = count()
        self._turn = Condition()  # the running call holds its lock
        self._closed = False

    @property
    def prompt_encoder(self) -> PromptEncoder:
        return self.preparer.encoder

    def prepare(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> PreparedRequest:
        """Checks and tokenises one prompt and compiles its grammar, for ``add_request``.

        Any thread may call this. It neither waits for other calls nor delays them, so that a
        program can prepare requests, whose grammars may take seconds, while another thread steps.

        Raises:
            TypeError: not a prompt, or not SamplingParams.
            ValueError: a prompt that can never run, or parameters that the model cannot follow.
        """
        with self._closed_meanwhile():
            if sampling_params is None:
                sampling_params = self.get_default_sampling_params()
            (prepared,) = self.preparer.prepare_all([prompt], [sampling_params], "prompts")
            self._check_open()
            return prepared

    def add_request(
        self, prompt: Prompt | PreparedRequest, sampling_params: SamplingParams | None = None
    ) -> str:
        """Queues one prompt and returns its request id.

        Args:
            prompt: as in ``generate``, or what ``prepare`` has made of one.
            sampling_params: how to complete it; None for the model's own defaults. A prepared
                request has its own.

        Raises:
            TypeError: not a prompt, or not SamplingParams.
            ValueError: a prompt that can never run, or parameters that the model cannot follow; or
                a request that another engine has prepared.
        """
        if not isinstance(prompt, PreparedRequest):
            prompt = self.prepare(prompt, sampling_params)
        elif sampling_params is not None:
            raise ValueError("a prepared request has its sampling_params: give none with it")
        elif prompt.preparer() is not self.preparer:
            raise ValueError("this request was prepared by another engine: prepare it again")
        with self._running(STREAM_OPEN, alone=False):
            return self._add(prompt).request_id

    def step(self) -> list[RequestOutput]:
        """Launches the next step. Returns the results of requests that finished in the step before.

        If it raises, all unfinished requests are dropped, and the engine accepts new ones.
        """
        with self._running(STREAM_OPEN, alone=False):
            if self.is_finished():
                return []
            with self._reset_on_error():
                _, finished = self._step()
                return make_outputs(finished, self.prompt_encoder)

    def is_finished(self) -> bool:
        self._check_open()
        return not self._requests

    def abort_request(self, request_id: str) -> None:
        """Drops an unfinished request. Raises ValueError if there is none of that id."""
        with self._turn:
            if request_id not in self._requests:
                raise ValueError(f"no unfinished request has the id {request_id!r}")
            with self._reset_on_error():
                for seq in self._requests.pop(request_id).seqs:
                    if not seq.is_finished:
                        self.scheduler.abort(seq)
            if not self._requests:
                self.loop.in_flight = None  # nobody waits for it
            self._turn.notify_all()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Completes prompts and returns the results in their order.

        A request that fails while it runs (its logits are NaN, or no token satisfies its grammar)
        ends alone, with finish reason "error" and the message in ``error``.

        Args:
            prompts: one prompt or several; each a string, a list of token ids, or vLLM's
                ``{"prompt": ...}`` or ``{"prompt_token_ids": [...]}``.
            sampling_params: one for all prompts, or one each; None for the model's own defaults
                (``get_default_sampling_params``).
            use_tqdm: show a progress bar of finished prompts with the throughput, after one of
                tokenised prompts if tokenising takes over a second; or a callable like ``tqdm``
                that makes the bars.
            on_error: "raise" refuses the whole call if a prompt cannot run. "return" gives such
                prompts results with finish reason "error" and runs the others. They start while
                later prompts are tokenised and grammars compiled.

        Raises:
            TypeError, ValueError: a bad argument. The message names all bad prompts by index.
                Nothing has run.
        """
        return self._generate(as_prompt_list(prompts), sampling_params, use_tqdm, on_error)

    def generate_stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Completes prompts, and yields a request's output whenever it has new tokens.

        Each output has all tokens and text of its request so far: whole characters only, and no
        part of a stop string. The last output of a request has ``finished`` set. Leaving the loop
        early drops the unfinished requests.

        Raises:
            TypeError, ValueError: as ``generate``, when the first output is requested.
        """
        with self._closed_meanwhile():
            if sampling_params is None:
                sampling_params = self.get_default_sampling_params()
            good = self.preparer.prepare_all(as_prompt_list(prompts), sampling_params, "prompts")
        with self._running(NOT_ALONE.format("generate_stream")), self._reset_on_error():
            requests = [self._add(item, streams=True) for item in good]
        own = {request.request_id: request for request in requests}
        try:
            while not own.keys().isdisjoint(self._requests):
                with self._turn, self._reset_on_error():
                    sampled, _ = self._step()
                    advanced = dict.fromkeys(seq.request_id for seq in sampled)
                    grown = [own[request_id] for request_id in advanced if request_id in own]
                    outputs = make_outputs(grown, self.prompt_encoder)
                yield from outputs
            if not all(request.is_finished for request in requests):
                self._check_open(CLOSED_MEANWHILE)
        finally:
            with self._turn, self._reset_on_error():
                for request_id in own.keys() & self._requests.keys():
                    self.abort_request(request_id)
                self._turn.notify_all()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters that the checkpoint's generation_config.json recommends,
        with vLLM's defaults for the others.

        Raises:
            ValueError: it recommends impossible values.
        """
        try:
            return SamplingParams(**self.recommended_sampling)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the checkpoint's generation_config.json: {error}") from error

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache, and returns True. Raises ValueError if requests of this thread
        are unfinished."""
        in_use = "the prefix cache is in use: finish or abort the requests first"
        with self._running(in_use):
            self.scheduler.reset()
        return True

    def metrics(self) -> EngineMetrics:
        """Returns figures of the engine's state and throughput."""
        self._check_open()
        from nanovllm.engine.metrics import read_metrics

        return read_metrics(self.scheduler, self.throughput, self._device)

    def close(self) -> None:
        """Frees the model and the KV cache; the engine cannot be used again.

        Any thread may close it. A call in another thread stops at its next step and drops its
        requests. Calls that wait for their turn, and unfinished streams, end too. All of them raise
        ValueError. When ``close`` returns, the memory is free.
        """
        self._closed = True  # ends the calls of other threads
        self.preparer.is_closed = True
        with self._turn:
            self._requests.clear()
            if (loop := vars(self).pop("loop", None)) is not None:
                loop.reset()
                del self.model_runner
            self._close_runner()
            self._turn.notify_all()
        self.grammars.close()

    exit = close  # nano-vLLM's name

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _generate(
        self,
        prompts: Seq[Any],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        use_tqdm: bool | Callable[..., tqdm],
        on_error: str,
        what: str = "prompts",
    ) -> list[RequestOutput]:
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}")
        checked: Iterable[Checked]
        with self._closed_meanwhile():
            if sampling_params is None:
                sampling_params = self.get_default_sampling_params()
            if on_error == "raise":
                make_bar = bar_maker(use_tqdm)
                checked = self.preparer.prepare_all(prompts, sampling_params, what, make_bar)
            else:
                checked = self.preparer.prepare_each(prompts, sampling_params)
            with self._running(NOT_ALONE.format("generate")):
                outputs = self._run(checked, len(prompts), use_tqdm)
        return [
            refused(prompt, output) if isinstance(output, Exception) else output
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def _run(
        self,
        checked: Iterable[Checked],
        num_prompts: int,
        use_tqdm: bool | Callable[..., tqdm],
    ) -> list[RequestOutput | Exception]:
        """Runs requests to their end, and makes results while other requests run. A request that
        cannot run has the exception that says why as its result."""
        progress = bar_maker(use_tqdm)(total=num_prompts, desc="Generating")

        def advance() -> None:
            _, finished = self._step()
            for output in make_outputs(finished, self.prompt_encoder):
                outputs[indices[output.request_id]] = output
            if finished:
                prefill, decode = (f"{rate:.0f} tok/s" for rate in self.throughput.rates())
                progress.set_postfix(prefill=prefill, decode=decode, refresh=False)
                progress.update(len(finished))

        def meanwhile() -> bool:
            self._check_open()
            if is_busy := bool(self._requests):
                advance()
            return is_busy

        indices: dict[str, int] = {}  # by request id
        outputs: dict[int, RequestOutput | Exception] = {}
        with (
            self._reset_on_error(),
            shown(progress),
            closing(self.grammars.when_compiled(checked, grammar_of, meanwhile)) as ready,
        ):
            num_tokens = 0
            for index, item in ready:
                if isinstance(item, Exception):
                    outputs[index] = item
                    continue
                request = self._add(item)
                indices[request.request_id] = index
                num_tokens += self.scheduler.count_new_tokens(request.seqs[0])
                if num_tokens >= self.config.max_num_batched_tokens:
                    num_tokens = 0
                    advance()  # a step, during which more requests are added
            progress.update(sum(isinstance(item, Exception) for item in outputs.values()))
            while self._requests:
                advance()
        return [outputs[index] for index in range(num_prompts)]

    @contextmanager
    def _running(self, conflict: str, alone: bool = True) -> Iterator[None]:
        """Holds the engine for one call. Waits first until other threads have no unfinished
        requests, or no unfinished stream if the call need not be ``alone``.

        Raises:
            ValueError: with the message ``conflict``, if the unfinished requests are this thread's
                own, because waiting would never end.
        """
        self._check_open()
        with self._turn:
            while not self._closed and (
                threads := {
                    request.thread
                    for request in self._requests.values()
                    if alone or request.is_stream
                }
            ):
                if current_thread() in threads or not any(t.is_alive() for t in threads):
                    raise ValueError(conflict)
                self._turn.wait(1.0)  # with a timeout, because a thread that dies does not notify
            self._check_open(CLOSED_MEANWHILE)
            try:
                yield
            finally:
                self._turn.notify_all()

    def _step(self) -> tuple[list[Sequence], list[Request]]:
        """Runs the loop once. Returns the sequences that have a new token, and the requests that
        finished."""
        self._check_open(CLOSED_MEANWHILE)
        step = self.loop.step()
        for seq, new in step.retried.items():
            seqs = self._requests[seq.request_id].seqs
            seqs[seqs.index(seq)] = new
        if self.throughput.add(step.num_prefilled, len(step.sampled)):
            from nanovllm.engine.metrics import log_metrics

            log_metrics(self.metrics())
        now = time()
        if step.is_prefill:
            for seq in step.sampled:
                metrics = self._requests[seq.request_id].metrics
                metrics.first_token_time = metrics.first_token_time or now
        requests = {seq.request_id: self._requests[seq.request_id] for seq in step.finished}
        done = [request for request in requests.values() if request.is_finished]
        for request in done:
            request.metrics.finished_time = now
            del self._requests[request.request_id]
        return step.sampled, done

    def _add(self, prepared: PreparedRequest, streams: bool = False) -> Request:
        """Queues a request. If this raises, nothing has changed."""
        request_id = str(next(self._request_ids))
        params, token_ids = prepared.sampling.params, prepared.prompt_token_ids
        states = self.sampling_states.make(prepared.sampling, token_ids)
        seqs = []
        for state in states:
            seq = Sequence(token_ids, params, self.config.kvcache_block_size)
            seq.request_id = request_id
            text = self.prompt_encoder.detokenizer(token_ids[-1], params)
            tokens = None if text is None else text.stop_candidates
            every_token = streams or state.follows_tokens
            if every_token:
                tokens = EVERY_TOKEN
            seq.completion = Completion(state, text, tokens, processes_every_token=every_token)
            seqs.append(seq)
        seqs[0].wants_prompt_logprobs = params.prompt_logprobs is not None
        seqs[0].siblings = seqs[1:]
        metrics = RequestMetrics(arrival_time=time())
        request = Request(request_id, prepared, seqs, metrics, is_stream=streams)
        if not self._requests:
            self.throughput.restart()
        try:
            self._requests[request_id] = request
            self.scheduler.add(seqs[0])
        except BaseException:
            self._requests.pop(request_id, None)
            self.scheduler.abort(seqs[0])
            raise
        return request

    @contextmanager
    def _reset_on_error(self) -> Iterator[None]:
        """After an exception or Ctrl-C, drops all requests and the prefix cache, which may be
        partly computed."""
        try:
            yield
        except BaseException:
            if not self._closed:  # else ``close`` does it
                self._requests.clear()
                self.loop.reset()
            raise

    @contextmanager
    def _closed_meanwhile(self) -> Iterator[None]:
        """Replaces an error that ``close`` has caused by one that says so."""
        self._check_open()
        try:
            yield
        except Exception:
            if self._closed:
                raise ValueError(CLOSED_MEANWHILE) from None
            raise

    def _check_open(self, message: str = CLOSED) -> None:
        if self._closed:
            raise ValueError(message)
