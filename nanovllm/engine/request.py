"""A prompt with its completions, from arrival to result."""

from dataclasses import dataclass, field, replace
from threading import Thread, current_thread
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

from nanovllm.engine.sampling_state import PreparedParams
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.text.prompts import PromptEncoder

if TYPE_CHECKING:
    from nanovllm.text.structured import Lazy


@dataclass(slots=True)
class PreparedRequest:
    """A request that ``LLMEngine.prepare`` has checked and tokenised: ``add_request`` takes it in
    place of a prompt, any number of times.

    Attributes:
        prompt: its text; None if it came as token ids.
        prompt_token_ids: its token ids.
        sampling: its sampling parameters, checked.
        preparer: a weak reference to the engine's RequestPreparer. No other engine accepts it.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    sampling: PreparedParams
    preparer: ReferenceType[Any] = field(repr=False)


@dataclass(slots=True)
class Request:
    """One prompt, and the sequences that complete it.

    Attributes:
        request_id: its id in the engine.
        prepared: its prompt and sampling parameters.
        seqs: a sequence for each completion, by index.
        metrics: the times of its arrival, first token and end.
        thread: the thread that added it.
        is_stream: whether ``generate_stream`` added it.
    """

    request_id: str
    prepared: PreparedRequest
    seqs: list[Sequence]
    metrics: RequestMetrics
    thread: Thread = field(default_factory=current_thread)
    is_stream: bool = False

    @property
    def is_finished(self) -> bool:
        return all(seq.is_finished for seq in self.seqs)


def grammar_of(item: PreparedRequest | Exception) -> "Lazy | None":
    """Returns the grammar that the request's text has to match, if any."""
    return None if isinstance(item, Exception) else item.sampling.grammar


def refused(prompt: Any, error: Exception) -> RequestOutput:
    """Returns the result of a prompt that could not run."""
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    completion = CompletionOutput(0, "", [], finish_reason="error", error=str(error))
    return RequestOutput("", text if isinstance(text, str) else None, [], outputs=[completion])


def make_outputs(requests: list[Request], encoder: PromptEncoder) -> list[RequestOutput]:
    """Returns the results of requests, finished or not."""
    outputs = []
    for request in requests:
        params = request.prepared.sampling.params
        output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prepared.prompt,
            prompt_token_ids=request.prepared.prompt_token_ids[:],
            outputs=[_completion(i, seq) for i, seq in enumerate(request.seqs)],
            finished=request.is_finished,
            num_cached_tokens=request.seqs[0].num_cached_prompt_tokens or 0,
            metrics=replace(request.metrics),
        )
        if params.logprobs is not None or params.prompt_logprobs is not None:
            from nanovllm.engine.logprobs import add_logprobs

            add_logprobs(output, request.seqs, encoder)
        outputs.append(output)
    return outputs


def _completion(index: int, seq: Sequence) -> CompletionOutput:
    completion, text = seq.completion, ""
    if (detokenizer := completion.detokenizer) is not None:
        text = detokenizer.text if seq.is_finished else detokenizer.stable_text()
    finish = completion.finish
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=seq.completion_token_ids,
        finish_reason=finish and finish.reason,
        stop_reason=finish and finish.stop_reason,
        error=finish and finish.error,
    )
