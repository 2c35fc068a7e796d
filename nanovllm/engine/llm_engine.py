"""The loop: schedule, run, postprocess; and what stands at its two ends, prompts and results."""

import logging
import os
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

from nanovllm.config import Config
from nanovllm.engine.batch import Batch
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.prompts import Prompt, PromptEncoder, as_prompt_list
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.models.checkpoint import open_checkpoint
from nanovllm.models.model_config import ModelConfig
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.distributed import TPGroup

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
        self.model_runner = ModelRunner(config, checkpoint, max_model_len, TPGroup())
        eos_token_ids = set(checkpoint.eos_token_ids)
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            eos_token_ids.add(self.tokenizer.eos_token_id)
        self.scheduler = Scheduler(
            num_blocks=self.model_runner.num_kvcache_blocks,
            block_size=config.kvcache_block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._requests: dict[str, tuple[Sequence, str | None]] = {}
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
            ValueError: a prompt that can never run.
        """
        self._check_open()
        (text, token_ids), (params,) = self._validate([prompt], sampling_params)
        return self._add(text[0], token_ids[0], params)

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the requests that it finished.

        If it raises, every unfinished request is dropped and the engine is ready for new ones.
        """
        self._check_open()
        if self.is_finished():
            return []
        with self._reset_on_error():
            _, finished = self._step()
            return self._make_outputs([self._requests.pop(str(seq.seq_id)) for seq in finished])

    def is_finished(self) -> bool:
        self._check_open()
        return self.scheduler.is_finished()

    def abort_request(self, request_id: str) -> None:
        """Drops an unfinished request. Raises ValueError if there is none of that id."""
        if request_id not in self._requests:
            raise ValueError(f"no unfinished request has the id {request_id!r}")
        seq, _ = self._requests.pop(request_id)
        self.scheduler.abort(seq)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts and returns the results in their order.

        Args:
            prompts: one prompt or several; each a string, a list of token ids, or vLLM's
                ``{"prompt": ...}`` or ``{"prompt_token_ids": [...]}``.
            sampling_params: one for all prompts, or one each.
            use_tqdm: show a bar of finished prompts with the throughput.

        Raises:
            TypeError, ValueError: a bad argument; for one of several prompts the message names
                its index. Nothing has run then.
        """
        self._check_open()
        if not self.is_finished():
            raise ValueError(
                "generate needs the engine to itself: finish the requests of add_request with "
                "step, or drop them with abort_request"
            )
        encoded, params = self._validate(as_prompt_list(prompts), sampling_params)
        with self._reset_on_error(), _Progress(len(params), use_tqdm) as progress:
            ids = [self._add(*p) for p in zip(*encoded, params, strict=True)]
            requests = [self._requests[request_id] for request_id in ids]
            while not self.is_finished():
                progress.update(*self._step())
            self._requests.clear()
        return self._make_outputs(requests)

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
        self.model_runner.call("exit")
        del self.model_runner, self.scheduler

    exit = close  # nano-vLLM's name

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def _step(self) -> tuple[Batch, list[Sequence]]:
        batch = self.scheduler.schedule()
        token_ids = self.model_runner.call("run", batch)
        return batch, self.scheduler.postprocess(batch, token_ids)

    def _add(self, text: str | None, token_ids: list[int], params: SamplingParams) -> str:
        seq = Sequence(token_ids, params, self.config.kvcache_block_size)
        self.scheduler.add(seq)
        self._requests[str(seq.seq_id)] = (seq, text)
        return str(seq.seq_id)

    def _validate(
        self,
        prompts: Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
    ) -> tuple[tuple[list[str | None], list[list[int]]], list[SamplingParams]]:
        """Texts, token ids and parameters of all prompts; raises before anything runs."""
        if sampling_params is None:
            sampling_params = SamplingParams()
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
        texts, token_ids = self.prompt_encoder.encode(prompts)
        for i, ids in enumerate(token_ids):
            try:
                self.scheduler.check_prompt_len(len(ids))
            except ValueError as error:
                raise ValueError(f"prompts[{i}]: {error}") from None
        return (texts, token_ids), params

    def _make_outputs(self, requests: Seq[tuple[Sequence, str | None]]) -> list[RequestOutput]:
        """Results of finished sequences, detokenised together."""
        completions = [seq.completion_token_ids for seq, _ in requests]
        texts = self.prompt_encoder.decode(completions)
        outputs = []
        for (seq, prompt), ids, text in zip(requests, completions, texts, strict=True):
            assert seq.finish_reason is not None
            completion = CompletionOutput(0, text, ids, seq.finish_reason)
            outputs.append(
                RequestOutput(str(seq.seq_id), prompt, seq.prompt_token_ids, [completion])
            )
        return outputs

    @contextmanager
    def _reset_on_error(self) -> Iterator[None]:
        """After an exception or Ctrl-C: no request is left, nothing half computed is cached."""
        try:
            yield
        except BaseException:
            self._requests.clear()
            self.scheduler.reset()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this engine is closed: make a new one")


class _Progress:
    """A bar of finished prompts, with prefill and decode throughput in tokens per second."""

    def __init__(self, num_prompts: int, shown: bool) -> None:
        self.bar = tqdm(total=num_prompts, desc="Generating", disable=not shown)
        self.tokens = {True: 0, False: 0}
        self.seconds = {True: 0.0, False: 0.0}
        self.last = perf_counter()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.bar.close()

    def update(self, batch: Batch, finished: list[Sequence]) -> None:
        now = perf_counter()
        self.tokens[batch.is_prefill] += batch.num_tokens
        self.seconds[batch.is_prefill] += now - self.last
        self.last = now
        if not self.bar.disable:
            rates = (self.tokens[p] / max(self.seconds[p], 1e-9) for p in (True, False))
            prefill, decode = (f"{rate:.0f} tok/s" for rate in rates)
            self.bar.set_postfix(prefill=prefill, decode=decode, refresh=False)
            self.bar.update(len(finished))


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
