"""The loop: schedule, run, postprocess; and what stands at its two ends, prompts and results."""

import logging
import os
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from itertools import count
from time import perf_counter, time
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from nanovllm.config import Config
from nanovllm.engine.batch import Batch
from nanovllm.engine.model_runner import LaunchedStep, start_ranks
from nanovllm.engine.prompts import Prompt, PromptEncoder, as_prompt_list
from nanovllm.engine.request import Request, make_outputs
from nanovllm.engine.sampling_state import SamplingStateFactory
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.models.checkpoint import open_checkpoint
from nanovllm.models.model_config import ModelConfig
from nanovllm.outputs import RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger("nanovllm")


class LLMEngine:
    """Owns the requests from prompt to result.

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
        self._closed = True  # until there is something to close
        config = self.config = Config.create(model, **kwargs)
        checkpoint = open_checkpoint(config.model)
        max_model_len = limit_model_len(config.max_model_len, checkpoint.config)
        self.tokenizer = checkpoint.load_tokenizer()
        self.prompt_encoder = PromptEncoder(self.tokenizer, checkpoint.config.vocab_size)
        checkpoint.config.check_split(config.tensor_parallel_size)
        self.model_runner = start_ranks(config, checkpoint, max_model_len)
        eos_token_ids = set(checkpoint.eos_token_ids)
        eos_token_id = min(eos_token_ids) if len(eos_token_ids) == 1 else None
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            eos_token_id = self.tokenizer.eos_token_id
            eos_token_ids.add(eos_token_id)
        # Some files name tokens that the model has no logits for.
        eos_token_ids = {i for i in eos_token_ids if 0 <= i < checkpoint.config.vocab_size}
        self.scheduler = Scheduler(
            num_blocks=self.model_runner.num_kvcache_blocks,
            block_size=config.kvcache_block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            eos_token_id=eos_token_id,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.sampling_states = SamplingStateFactory(
            self.tokenizer, checkpoint.config.vocab_size, eos_token_ids, config.seed
        )
        self.recommended_sampling = checkpoint.recommended_sampling
        self._requests: dict[str, Request] = {}
        self._launched: LaunchedStep | None = None  # whose tokens have not been fetched
        self._request_ids = count()
        self._stream_ids: frozenset[str] = frozenset()  # of the last generate_stream
        self._closed = False
        logger.info(
            "%s on %s in %s: %d KV blocks of %d tokens",
            checkpoint.config.architecture,
            self.model_runner.device,
            str(self.model_runner.dtype).removeprefix("torch."),
            self.model_runner.num_kvcache_blocks,
            config.kvcache_block_size,
        )

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> str:
        """Queues one prompt and returns its request id.

        Raises:
            TypeError: not a prompt, or not SamplingParams.
            ValueError: a prompt that can never run, or parameters that the model cannot follow.
        """
        self._check_open()
        self._check_no_stream()
        (added,) = self._validate([prompt], sampling_params)
        with self._reset_on_error():
            return self._add(*added).request_id

    def step(self) -> list[RequestOutput]:
        """Launches the next step, and returns the requests that the one before it finished.

        If it raises, every unfinished request is dropped and the engine is ready for new ones.
        """
        self._check_open()
        self._check_no_stream()
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
        if request_id not in self._requests:
            raise ValueError(f"no unfinished request has the id {request_id!r}")
        with self._reset_on_error():
            for seq in self._requests.pop(request_id).seqs:
                if not seq.is_finished:
                    self.scheduler.abort(seq)
        if not self._requests:
            self._launched = None  # nobody waits for it

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
    ) -> list[RequestOutput]:
        """Completes prompts and returns the results in their order.

        Args:
            prompts: one prompt or several; each a string, a list of token ids, or vLLM's
                ``{"prompt": ...}`` or ``{"prompt_token_ids": [...]}``.
            sampling_params: one for all prompts, or one each; None for the model's own defaults
                (``get_default_sampling_params``).
            use_tqdm: show a bar of finished prompts with the throughput; or what makes the bar,
                called as ``tqdm`` is.

        Raises:
            TypeError, ValueError: a bad argument; for one of several prompts the message names
                its index. Nothing has run then.
        """
        return self._generate(as_prompt_list(prompts), sampling_params, use_tqdm)

    def generate_stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Completes prompts, yielding what there is of each request whenever it has grown.

        Each output holds all of its request's tokens and text so far (whole characters only,
        and no part of a stop string); the last one of a request has ``finished`` set. Leaving
        the loop early drops the requests that are unfinished.

        Raises:
            TypeError, ValueError: as ``generate``, when the first output is asked for.
        """
        added = self._start(as_prompt_list(prompts), sampling_params)
        with self._reset_on_error():
            requests = [self._add(*args, streams=True) for args in added]
        own = {request.request_id: request for request in requests}
        self._stream_ids = frozenset(own)
        try:
            while not own.keys().isdisjoint(self._requests):
                with self._reset_on_error():
                    sampled, _ = self._step()
                advanced = dict.fromkeys(seq.request_id for seq in sampled)
                grown = [own[request_id] for request_id in advanced if request_id in own]
                yield from make_outputs(grown, self.prompt_encoder)
                self._check_open()
        finally:
            with self._reset_on_error():
                for request_id in own.keys() & self._requests.keys():
                    self.abort_request(request_id)

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint recommends."""
        try:
            return SamplingParams(**self.recommended_sampling)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the checkpoint's generation_config.json: {error}") from error

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Raises ValueError while requests are unfinished."""
        self._check_open()
        if not self.is_finished():
            raise ValueError("the prefix cache is in use: finish or abort the requests first")
        self.scheduler.reset()

    def close(self) -> None:
        """Frees the model and the KV cache; the engine cannot be used again."""
        if self._closed:
            return
        self._closed = True
        self._requests.clear()
        self._launched = None
        self.model_runner.close()
        del self.model_runner, self.scheduler

    exit = close  # nano-vLLM's name

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def _generate(
        self,
        prompts: Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        use_tqdm: bool | Callable[..., tqdm],
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        added = self._start(prompts, sampling_params, add_special_tokens)
        with self._reset_on_error(), _Progress(len(added), use_tqdm) as progress:
            requests = [self._add(*args) for args in added]
            while not self.is_finished():
                launched = self._launched
                _, finished = self._step()
                if launched is not None:
                    progress.update(launched.batch, finished)
        return make_outputs(requests, self.prompt_encoder)

    def _start(
        self,
        prompts: Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        add_special_tokens: bool = True,
    ) -> list[tuple[str | None, list[int], SamplingParams]]:
        """What to add for a run that has the engine to itself."""
        self._check_open()
        if not self.is_finished():
            raise ValueError(
                "generate needs the engine to itself: finish the other requests with step, drop "
                "them with abort_request, or close the stream that they belong to"
            )
        return self._validate(prompts, sampling_params, add_special_tokens)

    def _step(self) -> tuple[list[Sequence], list[Request]]:
        """Launches the next step, and while it runs, books the one before it: the device never
        waits for the host. Returns the sequences that have a new token, and the requests that it
        finished."""
        batch = self.scheduler.schedule()
        if batch.items:
            self.model_runner.run(batch)
        launched, self._launched = self._launched, None
        sampled, finished = self._book(launched) if launched else ([], [])
        if batch.items and self._requests:  # or all that was launched is for nothing
            self._launched = self.model_runner.sample(batch)
        return sampled, finished

    def _book(self, launched: LaunchedStep) -> tuple[list[Sequence], list[Request]]:
        """Waits for a step and hands its results to their sequences, but for those that have
        finished since it was launched."""
        batch, output = launched.batch, self.model_runner.wait(launched)
        rows = [i for i, item in enumerate(batch.sampled) if not item.seq.is_finished]
        finished = self.scheduler.postprocess(batch, output.token_ids)
        for item in batch.items:
            if (logprobs := output.prompt_logprobs.get(item.seq.seq_id)) is not None:
                item.seq.prompt_logprobs.append(logprobs)
                item.seq.num_prompt_logprobs += len(logprobs)
        sampled = [batch.sampled[row].seq for row in rows]
        token_ids = [output.token_ids[row] for row in rows]
        if output.logprobs is not None:
            collect_logprobs(sampled, token_ids, output.logprobs[rows])
        for seq, token_id in zip(sampled, token_ids, strict=True):
            if seq.is_watched:
                self._watch(seq, token_id)
                if seq.is_finished:
                    finished.append(seq)
        now = time()
        if batch.is_prefill:
            for seq in sampled:
                metrics = self._requests[seq.request_id].metrics
                metrics.first_token_time = metrics.first_token_time or now
        requests = {seq.request_id: self._requests[seq.request_id] for seq in finished}
        done = [request for request in requests.values() if request.is_finished]
        for request in done:
            request.metrics.finished_time = now
            del self._requests[request.request_id]
        return sampled, done

    def _watch(self, seq: Sequence, token_id: int) -> None:
        """Books what a new token (-1 for none) means besides its place in the sequence."""
        state, text = seq.sampling, seq.detokenizer
        if token_id < 0:
            if text is not None:
                text.finish(may_stop=False)
            return
        state.append_token(token_id)
        if state.grammar is not None and state.grammar.is_finished and not seq.is_finished:
            self.scheduler.finish(seq, None)
        if text is None:
            return
        may_stop = seq.num_completion_tokens > seq.sampling_params.min_tokens
        stop = None
        if text.keep_stop or not seq.ends_with_stop_token:
            stop = text.append(token_id, may_stop)
        if stop is None and seq.is_finished:
            stop = text.finish(may_stop)
        if stop is not None:
            self.scheduler.finish(seq, stop)

    def _add(
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        streams: bool = False,
    ) -> Request:
        request_id = str(next(self._request_ids))
        states = self.sampling_states.make(params, token_ids)
        seqs = []
        for state in states:
            seq = Sequence(token_ids, params, self.config.kvcache_block_size)
            seq.request_id = request_id
            seq.sampling = state
            if params.detokenize and self.tokenizer and (streams or params.stop_strings):
                seq.detokenizer = self.prompt_encoder.detokenizer(token_ids[-1], params)
            seq.is_watched = seq.detokenizer is not None or state.follows_tokens
            seqs.append(seq)
        seqs[0].wants_prompt_logprobs = params.prompt_logprobs is not None
        seqs[0].siblings = seqs[1:]
        request = Request(request_id, text, params, seqs, RequestMetrics(arrival_time=time()))
        self.scheduler.add(seqs[0])
        self._requests[request_id] = request
        return request

    def _validate(
        self,
        prompts: Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        add_special_tokens: bool = True,
    ) -> list[tuple[str | None, list[int], SamplingParams]]:
        """Text, token ids and parameters of each prompt; raises before anything runs."""
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, (list, tuple)):
            params = list(sampling_params)
        else:
            params = [sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(params)} sampling_params: give one for all or "
                f"one each"
            )
        for i, param in enumerate(params):
            if not isinstance(param, SamplingParams):
                raise TypeError(
                    f"sampling_params[{i}] must be SamplingParams, got {type(param).__name__}"
                )
        first_use = {id(param): i for i, param in reversed(list(enumerate(params)))}
        for i in sorted(first_use.values()):
            try:
                self.sampling_states.check(params[i])
            except ValueError as error:
                raise ValueError(f"sampling_params[{i}]: {error}") from None
        texts, token_ids = self.prompt_encoder.encode(prompts, add_special_tokens)
        for i, ids in enumerate(token_ids):
            try:
                self.scheduler.check_prompt_len(len(ids))
            except ValueError as error:
                raise ValueError(f"prompts[{i}]: {error}") from None
        return list(zip(texts, token_ids, params, strict=True))

    @contextmanager
    def _reset_on_error(self) -> Iterator[None]:
        """After an exception or Ctrl-C: no request is left, nothing half computed is cached."""
        try:
            yield
        except BaseException:
            if not self._closed:
                self._requests.clear()
                self._launched = None
                self.scheduler.reset()
            raise

    def _check_no_stream(self) -> None:
        """A stream's steps would take the results of other requests, and theirs its own."""
        if not self._stream_ids.isdisjoint(self._requests):
            raise ValueError("generate_stream is not at its end: exhaust, close or abort it first")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this engine is closed: make a new one")


class _Progress:
    """A bar of finished prompts, with prefill and decode throughput in tokens per second."""

    def __init__(self, num_prompts: int, use_tqdm: bool | Callable[..., tqdm]) -> None:
        if callable(use_tqdm):
            self.bar = use_tqdm(total=num_prompts, desc="Generating")
        else:
            self.bar = tqdm(total=num_prompts, desc="Generating", disable=not use_tqdm)
        self.tokens = {True: 0, False: 0}
        self.seconds = {True: 0.0, False: 0.0}
        self.last = perf_counter()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.bar.close()

    def update(self, batch: Batch, finished: list[Request]) -> None:
        now = perf_counter()
        self.tokens[batch.is_prefill] += batch.num_tokens
        self.seconds[batch.is_prefill] += now - self.last
        self.last = now
        if not getattr(self.bar, "disable", False):
            rates = (self.tokens[p] / max(self.seconds[p], 1e-9) for p in (True, False))
            prefill, decode = (f"{rate:.0f} tok/s" for rate in rates)
            self.bar.set_postfix(prefill=prefill, decode=decode, refresh=False)
            self.bar.update(len(finished))


def collect_logprobs(sampled: list[Sequence], token_ids: list[int], logprobs: np.ndarray) -> None:
    """Hands each sequence that asks for them the logprobs of its new token."""
    for seq, token_id, row in zip(sampled, token_ids, logprobs, strict=True):
        k = seq.sampling.kind.num_logprobs
        if k is not None and token_id >= 0:
            # A view keeps the whole step's rows alive: fine where they are no wider than it needs.
            seq.logprobs.append(row if len(row) == 3 + 2 * k else row[: 3 + 2 * k].copy())


def limit_model_len(max_model_len: int, model: ModelConfig) -> int:
    """``max_model_len`` capped by the model's positions.

    Raises:
        ValueError: longer than a sliding window, which attention here does not apply.
    """
    length = min(max_model_len, model.max_position_embeddings)
    if model.sliding_window is not None and length > model.sliding_window:
        raise ValueError(
            f"{model.architecture} attends within a sliding window of {model.sliding_window} "
            f"tokens, which is not served: set max_model_len to at most {model.sliding_window}"
        )
    return length
