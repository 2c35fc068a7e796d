"""A prompt with its completions, from arrival to result."""

from dataclasses import dataclass, field, replace
from threading import Thread, current_thread
from typing import Any
from weakref import ReferenceType

import numpy as np

from nanovllm.engine.sampling_state import PreparedParams
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, PackedLogprobs, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import PromptEncoder
from nanovllm.text.structured import Once
from nanovllm.utils.panics import is_failure


@dataclass(slots=True)
class PreparedRequest:
    """A request that ``LLMEngine.prepare`` has checked and tokenised: ``add_request`` takes it in
    place of a prompt, any number of times.

    Attributes:
        prompt: its text; None if it came as token ids.
        prompt_token_ids: its token ids.
        sampling: how to complete it.
        engine: the engine that prepared it, the only one that takes it.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    sampling: PreparedParams
    engine: ReferenceType[Any] = field(repr=False)


@dataclass(slots=True)
class Request:
    """What the engine knows of one prompt.

    Attributes:
        request_id: the engine's name for it.
        prompt: its text; None if it came as token ids.
        prompt_token_ids: its token ids, for its last result to keep.
        params: how to complete it.
        seqs: a sequence for each completion, by index.
        metrics: when things happened.
        thread: that asked for it.
        is_stream: whether ``generate_stream`` made it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seqs: list[Sequence]
    metrics: RequestMetrics
    thread: Thread = field(default_factory=current_thread)
    is_stream: bool = False

    @property
    def is_finished(self) -> bool:
        return all(seq.is_finished for seq in self.seqs)


def grammar_of(item: PreparedRequest | Exception) -> Once | None:
    """What the request's text has to match, if anything."""
    return None if isinstance(item, Exception) else item.sampling.grammar


def refused(prompt: Any, error: Exception) -> RequestOutput:
    """The result of a prompt that could not run."""
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    completion = CompletionOutput(0, "", [], finish_reason="error", error=str(error))
    return RequestOutput("", text if isinstance(text, str) else None, [], outputs=[completion])


def make_outputs(requests: list[Request], encoder: PromptEncoder) -> list[RequestOutput]:
    """Results of requests, finished or not, all texts decoded together."""
    pairs = [(seq, request.params) for request in requests for seq in request.seqs]
    texts = iter(_texts(pairs, encoder))
    outputs = []
    for request in requests:
        first, ids = request.seqs[0], request.prompt_token_ids
        completions = [
            _completion(i, seq, next(texts), request.params, encoder)
            for i, seq in enumerate(request.seqs)
        ]
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None:
            rows = first.prompt_logprobs or [np.empty((0, 3), np.int32)]
            decode = encoder.decode_logprob_tokens if request.params.detokenize else None
            prompt_logprobs = PackedLogprobs(np.concatenate(rows), decode, starts_with_none=True)
        outputs.append(
            RequestOutput(
                request_id=request.request_id,
                prompt=request.prompt,
                prompt_token_ids=ids if request.is_finished else ids[:],
                outputs=completions,
                finished=request.is_finished,
                prompt_logprobs=prompt_logprobs,
                num_cached_tokens=first.num_cached_prompt_tokens or 0,
                metrics=replace(request.metrics),
            )
        )
    return outputs


def _completion(
    index: int, seq: Sequence, text: str, params: SamplingParams, encoder: PromptEncoder
) -> CompletionOutput:
    logprobs = total = None
    if params.logprobs is not None:
        rows = np.array(seq.logprobs) if seq.logprobs else np.empty((0, 3), np.int32)
        decode = encoder.decode_logprob_tokens if params.detokenize else None
        logprobs = PackedLogprobs(rows, decode)
        total = float(logprobs.token_logprobs().sum(dtype=np.float64))
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=seq.completion_token_ids,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        cumulative_logprob=total,
        logprobs=logprobs,
        error=seq.error,
    )


def _texts(pairs: list[tuple[Sequence, SamplingParams]], encoder: PromptEncoder) -> list[str]:
    """A text for each sequence: what its detokenizer has, or else all of it decoded now."""
    texts = [""] * len(pairs)
    whole: dict[tuple[bool, bool], list[int]] = {}
    for i, (seq, params) in enumerate(pairs):
        if seq.detokenizer is not None:
            known = seq.detokenizer
            texts[i] = known.text if seq.is_finished else known.stable_text()
        elif params.detokenize:
            options = params.skip_special_tokens, params.spaces_between_special_tokens
            whole.setdefault(options, []).append(i)
    for places in whole.values():
        for i, text in zip(places, _decode([pairs[i] for i in places], encoder), strict=True):
            texts[i] = text
    return texts


def _decode(pairs: list[tuple[Sequence, SamplingParams]], encoder: PromptEncoder) -> list[str]:
    """Texts of completions with equal options. One that the tokenizer fails on becomes an error."""
    completions = [_text_token_ids(*pair) for pair in pairs]
    last_prompt_tokens = [seq.token_ids[seq.num_prompt_tokens - 1] for seq, _ in pairs]
    try:
        return encoder.decode(completions, last_prompt_tokens, pairs[0][1])
    except BaseException as error:  # whatever the tokenizer's code runs into
        if not is_failure(error):
            raise
        if len(pairs) > 1:
            return [text for pair in pairs for text in _decode([pair], encoder)]
        seq = pairs[0][0]
        seq.finish_reason, seq.error = "error", f"no text: {type(error).__name__}: {error}"
        return [""]


def _text_token_ids(seq: Sequence, params: SamplingParams) -> list[int]:
    token_ids = seq.completion_token_ids
    if seq.ends_with_stop_token and not params.include_stop_str_in_output:
        return token_ids[:-1]
    return token_ids
