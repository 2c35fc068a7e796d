"""The engine: adds requests, runs steps and returns results."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import count
from threading import Thread
from time import time
from typing import TYPE_CHECKING, Any, Self

from tqdm.auto import tqdm

from nanovllm.config import Config
from nanovllm.engine.completion import Completion
from nanovllm.engine.preparation import Checked, RequestPreparer
from nanovllm.engine.request import PreparedRequest, Request, grammar_of, make_outputs, refused
from nanovllm.engine.sampling_state import SamplingStateFactory
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_loop import StepLoop
from nanovllm.outputs import RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import EVERY_TOKEN
from nanovllm.text.prompts import Prompt, as_prompt_list
from nanovllm.utils.forks import leave_to_parent
from nanovllm.utils.garbage import collecting_new_objects_only
from nanovllm.utils.panics import as_value_error
from nanovllm.utils.progress import bar_maker, closing_bar
from nanovllm.utils.throughput import Throughput
from nanovllm.utils.turns import Turns

if TYPE_CHECKING:
    from nanovllm.engine.metrics import EngineMetrics

NOT_ALONE = (
    "{} needs the engine to itself: finish the other requests with step, drop them with "
    "abort_request, or close the stream that they belong to"
)
NUM_QUEUED = 512  # prepared requests that ``generate`` queues before each step
STREAM_OPEN = "generate_stream has not ended: exhaust it, close it or abort its requests first"


class LLMEngine:
    """Runs requests from prompt to result.

    Any thread may call it. One call runs at a time. A call waits while another thread is in
    ``generate`` or has an open stream. ``generate`` and ``generate_stream`` also wait until other
    threads have no unfinished requests. Before a call waits, its prompts are checked and tokenised
    and its grammars are compiled (with ``on_error="return"`` while its requests run).

    Args:
        model: a local checkpoint directory, a ``.gguf`` file, or a hub id.
        kwargs: the other fields of Config.

    Attributes:
        tokenizer: the checkpoint's transformers tokenizer; None if it has none.
        requests: the unfinished requests, by request id.

    Raises:
        TypeError: an unknown argument or one of the wrong type.
        ValueError: a setting or a checkpoint that cannot work.
    """

    def __init__(self, model: str | os.PathLike[str], **kwargs: Any) -> None:
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
            windows=self.model_runner.windows,
            cache_len=started.cache_len,
            max_num_seqs=self.model_runner.max_num_seqs,
        )
        self.loop = StepLoop(self.scheduler, self.model_runner)
        self.sampling_states = SamplingStateFactory(
            self.tokenizer, started.prompt_encoder.vocab_size, started.eos_token_ids, config
        )
        self.turns = Turns("engine")
        self.preparer = RequestPreparer(
            started.prompt_encoder,
            self.sampling_states,
            self.scheduler.check_prompt_len,
            self.turns.check_open,
        )
        self.grammars = self.sampling_states.grammars
        # Called by ``close``, after unfinished requests have been dropped.
        self._on_close: list[Callable[[], None]] = [self.grammars.close]
        self.recommended_sampling = started.recommended_sampling
        self.throughput = Throughput()
        self.requests: dict[str, Request] = {}
        # ``metrics`` needs them, also while another thread is in ``close``.
        self._device = self.model_runner.device
        self._prefix_finder = self.model_runner.prefix_finder
        self._request_ids = count()

    def prepare(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> PreparedRequest:
        """Checks and tokenises one prompt and compiles its grammar, for ``add_request``.

        Any thread may call this. It neither waits for other calls nor delays them. So one thread
        can prepare requests while another thread calls ``step``. Compiling a grammar may take
        seconds.

        Raises:
            TypeError: not a prompt, or not SamplingParams.
            ValueError: a prompt that can never run, or parameters that are invalid for the model.
        """
        with self.turns.until_closed():
            if sampling_params is None:
                sampling_params = self.get_default_sampling_params()
            (prepared,) = self.preparer.prepare_all([prompt], [sampling_params], "prompts")
            self.turns.check_open()
            return prepared

    def add_request(
        self,
        prompt: Prompt | PreparedRequest,
        sampling_params: SamplingParams | None = None,
        *,
        may_reorder: bool = False,
    ) -> str:
        """Queues one prompt and returns its request id.

        Args:
            prompt: as in ``generate``, or a request that ``prepare`` returned.
            sampling_params: how to complete the prompt; None for the model's defaults. Must be None
                for a prepared request, which already has sampling parameters.
            may_reorder: the request may be admitted earlier or later than its turn, like the
                prompts of ``generate`` (see ``Config.enable_reordering``). Requests without
                ``may_reorder`` are admitted before all of these, first come, first served.

        Raises:
            TypeError: not a prompt, or not SamplingParams.
            ValueError: a prompt that can never run, parameters that are invalid for the model, or a
                request that another engine has prepared.
        """
        if not isinstance(prompt, PreparedRequest):
            prompt = self.prepare(prompt, sampling_params)
        elif sampling_params is not None:
            raise ValueError("a prepared request has its own sampling_params: leave them out")
        elif prompt.preparer() is not self.preparer:
            raise ValueError("this request was prepared by another engine: prepare it again")
        with self.acquire(STREAM_OPEN, alone=False):
            return self.add_prepared(prompt, may_reorder=may_reorder).request_id

    def step(self) -> list[RequestOutput]:
        """Launches the next step. Returns the results of requests that finished in the step before.

        If it raises, all unfinished requests are dropped, and the engine accepts new ones.
        """
        with self.acquire(STREAM_OPEN, alone=False):
            if self.is_finished():
                return []
            with self.reset_on_error():
                _, finished = self.run_step()
                return make_outputs(finished, self.preparer.encoder)

    def is_finished(self) -> bool:
        """Returns whether all requests have finished."""
        self.turns.check_open()
        return not self.requests

    def abort_request(self, request_id: str) -> None:
        """Drops an unfinished request. Raises ValueError if no unfinished one has this id."""
        with self.turns.turn():
            if request_id not in self.requests:
                raise ValueError(f"no unfinished request has the id {request_id!r}")
            with self.reset_on_error():
                for seq in self.requests.pop(request_id).seqs:
                    if not seq.is_finished:
                        self.scheduler.abort(seq)
            if not self.requests:
                self.loop.in_flight = None  # nobody waits for it

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
            sampling_params: one for all prompts, or one each; None for the model's defaults
                (``get_default_sampling_params``).
            use_tqdm: show a progress bar with the finished prompts and the throughput. If
                tokenising takes over a second, a bar with the tokenised prompts comes before it.
                Or a callable like ``tqdm`` that makes the bars.
            on_error: "raise" refuses the whole call if a prompt cannot run. "return" gives such a
                prompt a result with finish reason "error" and runs the others. The first prompts
                then start while later ones are tokenised and their grammars compiled.

        Raises:
            TypeError, ValueError: an invalid argument. The message has the indices of all invalid
                prompts. No prompt was run.
        """
        return self._generate(as_prompt_list(prompts), sampling_params, use_tqdm, on_error)

    def generate_stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Completes prompts, and yields a request's output whenever it has new tokens.

        Each output has all tokens and the text of its request so far. The text ends with a whole
        character, and has no part of a stop string. The last output of a request has ``finished``
        set. Leaving the loop early drops the unfinished requests.

        Raises:
            TypeError, ValueError: as ``generate``, when the first output is requested.
        """
        from nanovllm.engine.streaming import stream_outputs

        return stream_outputs(self, prompts, sampling_params)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters that the checkpoint's generation_config.json recommends,
        with vLLM's defaults for the others.

        Raises:
            ValueError: the file recommends invalid values.
        """
        with as_value_error("the checkpoint's generation_config.json:"):
            return SamplingParams(**self.recommended_sampling)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache, and returns True. Waits until other threads have no unfinished
        requests. Raises ValueError if this thread has some."""
        in_use = "the prefix cache is in use: finish or abort the requests first"
        with self.acquire(in_use):
            self.scheduler.reset()
        return True

    def metrics(self) -> "EngineMetrics":
        """Returns the engine's metrics: queue lengths, cache usage and throughput."""
        self.turns.check_open()
        from nanovllm.engine.metrics import read_metrics

        return read_metrics(self.scheduler, self.throughput, self._prefix_finder, self._device)

    def close(self) -> None:
        """Frees the model and the KV cache; the engine cannot be used again.

        Any thread may close it. A call in another thread stops at its next step and drops its
        requests. Waiting calls and unfinished streams end too. All of them raise ValueError. When
        ``close`` returns, the memory is free.
        """
        self.turns.close()
        with self.turns.turn():
            self.requests.clear()
            if (loop := vars(self).pop("loop", None)) is not None:
                loop.reset()
                del self.model_runner
            self._close_runner()
        for action in self._on_close:
            action()

    exit = close  # nano-vLLM's name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @collecting_new_objects_only()
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
        with self.turns.until_closed():
            if sampling_params is None:
                sampling_params = self.get_default_sampling_params()
            if on_error == "return":
                checked: Iterable[Checked] = self.preparer.prepare_each(prompts, sampling_params)
            else:
                make_bar = bar_maker(use_tqdm)
                checked = self.preparer.prepare_all(prompts, sampling_params, what, make_bar)
            with self.acquire(NOT_ALONE.format("generate")):
                return self._run(checked, prompts, use_tqdm)

    def _run(
        self,
        checked: Iterable[Checked],
        prompts: Seq[Any],
        use_tqdm: bool | Callable[..., tqdm],
    ) -> list[RequestOutput]:
        """Runs requests until all have finished. Makes a request's result as soon as it finishes,
        while others run."""
        progress = bar_maker(use_tqdm)(total=len(prompts), desc="Generating")

        def advance() -> bool:
            """Runs a step if there are unfinished requests. Returns whether there are any."""
            self.turns.check_open()
            if not self.requests:
                return False
            _, finished = self.run_step()
            for output in make_outputs(finished, self.preparer.encoder):
                outputs[indices[output.request_id]] = output
            if finished:
                prefill, decode = (f"{rate:.0f} tok/s" for rate in self.throughput.rates())
                progress.set_postfix(prefill=prefill, decode=decode, refresh=False)
                progress.update(len(finished))
            return True

        indices: dict[str, int] = {}  # by request id
        outputs: dict[int, RequestOutput] = {}
        # If all prompts are prepared, NUM_QUEUED are queued before each step, so that the scheduler
        # can reorder many. Otherwise only enough tokens for one step are queued before it, so that
        # the device does not wait for tokenisation.
        is_prepared = isinstance(checked, list)
        limit = NUM_QUEUED if is_prepared else self.config.max_num_batched_tokens
        with (
            self.reset_on_error(),
            closing_bar(progress),
            closing(self.grammars.when_compiled(checked, grammar_of, advance)) as ready,
        ):
            num_queued = 0  # requests (tokens if not all are prepared) queued since the last step
            for index, item in ready:
                if isinstance(item, Exception):
                    outputs[index] = refused(prompts[index], item)
                    progress.update()
                    continue
                request = self.add_prepared(item, may_reorder=True)
                indices[request.request_id] = index
                num_queued += 1 if is_prepared else self.scheduler.count_new_tokens(request.seqs[0])
                if num_queued >= limit:
                    num_queued = 0
                    advance()  # a step, during which more requests are added
            while self.requests:
                advance()
        return [outputs[index] for index in range(len(prompts))]

    def acquire(self, conflict: str, alone: bool = True) -> AbstractContextManager[None]:
        """Waits for this call's turn, and until no other thread has an unfinished stream or, if
        ``alone``, any unfinished request.

        Raises:
            ValueError: waiting would never end: see ``Turns.turn_after``.
        """

        def owners() -> set[Thread]:
            requests = self.requests.values()
            return {request.thread for request in requests if alone or request.is_stream}

        return self.turns.turn_after(owners, conflict)

    def run_step(self) -> tuple[list[Sequence], list[Request]]:
        """Calls ``StepLoop.step`` once. Returns the sequences that have a new token, or for which
        none could be sampled, and the requests that finished."""
        self.turns.check_still_open()
        step = self.loop.step()
        for seq, new in step.retried.items():
            seqs = self.requests[seq.request_id].seqs
            seqs[seqs.index(seq)] = new
        if self.throughput.add(step.num_prefilled, len(step.sampled) - step.num_failed):
            from nanovllm.engine.metrics import log_metrics

            log_metrics(self.metrics())
        now = time()
        for seq in step.sampled if step.num_prefilled else ():
            metrics = self.requests[seq.request_id].metrics
            if seq.num_completion_tokens:
                metrics.first_token_time = metrics.first_token_time or now
        requests = {seq.request_id: self.requests[seq.request_id] for seq in step.finished}
        done = [request for request in requests.values() if request.is_finished]
        for request in done:
            request.metrics.finished_time = now
            del self.requests[request.request_id]
        return step.sampled, done

    def add_prepared(
        self, prepared: PreparedRequest, streams: bool = False, may_reorder: bool = False
    ) -> Request:
        """Queues a prepared request. If this raises, no request has been queued."""
        request_id = str(next(self._request_ids))
        params, token_ids = prepared.sampling.params, prepared.prompt_token_ids
        states = self.sampling_states.make(prepared.sampling, token_ids)
        seqs = []
        for state in states:
            seq = Sequence(token_ids, params, self.config.block_size)
            seq.request_id = request_id
            text = self.preparer.encoder.detokenizer(token_ids[-1], params)
            tokens = None if text is None else text.stop_candidates
            every_token = streams or state.follows_tokens
            if every_token:
                tokens = EVERY_TOKEN
            seq.completion = Completion(state, text, tokens, processes_every_token=every_token)
            seqs.append(seq)
        seqs[0].wants_prompt_logprobs = params.prompt_logprobs is not None
        seqs[0].siblings = seqs[1:]
        seqs[0].may_reorder = may_reorder
        request = Request(request_id, prepared, seqs, RequestMetrics(time()), is_stream=streams)
        if not self.requests:
            self.throughput.restart()
        try:
            self.requests[request_id] = request
            self.scheduler.add(seqs[0])
        except BaseException:
            self.requests.pop(request_id, None)
            self.scheduler.abort(seqs[0])
            raise
        return request

    @contextmanager
    def reset_on_error(self) -> Iterator[None]:
        """After an exception or Ctrl-C, drops all requests and the prefix cache, whose blocks may
        not have been computed."""
        try:
            yield
        except BaseException:
            if not self.turns.is_closed:  # else ``close`` does it
                self.requests.clear()
                self.loop.reset()
            raise
