"""The outputs of requests."""

from dataclasses import dataclass, field
from typing import Any

from nanovllm.utils.lazy_list import LazyList
from nanovllm.vllm_fields import VLLMTimes


@dataclass
class Logprob:
    """The log-probability of a token at a position.

    Attributes:
        logprob: the natural logarithm of the token's probability.
        rank: the token's rank in the vocabulary; 1 is the most likely token.
        decoded_token: the token's text; None without a tokenizer or with ``detokenize=False``.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class RequestMetrics(VLLMTimes):
    """The times of a request's events, in seconds since the epoch.

    Attributes:
        arrival_time: when the request was added.
        first_token_time: when the first token reached the host; None before that.
        finished_time: when the last completion finished; None before that.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: the index among the completions of the prompt.
        text: the generated text, without the stop string unless ``include_stop_str_in_output``;
            empty without a tokenizer or with ``detokenize=False``.
        token_ids: the generated tokens, including an EOS or stop token.
        cumulative_logprob: the sum of the tokens' log-probabilities; None unless ``logprobs`` was
            set.
        logprobs: a list with a dict of token id -> Logprob for each token, built when it is first
            read; None unless ``logprobs`` was set.
        finish_reason: "stop" (an EOS token, a stop token or string, or the end of the grammar),
            "length" (``max_tokens``, ``max_model_len``, or the size of the KV cache), "error", or
            None while the completion is running.
        stop_reason: the stop string or stop token that ended the completion; otherwise None.
        lora_request: exists for vLLM; always None.
        error: the error message if ``finish_reason`` is "error"; otherwise None. The request could
            not run, or failed after the tokens and text in this output.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Any = field(default=LazyList(), repr=False)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = field(default=None, repr=False)
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The output of a request, which can be read in vLLM's style (``out.outputs[0].text``) or in
    nano-vLLM's (``out["text"]``, ``out["token_ids"]``).

    Attributes:
        request_id: the id that ``add_request`` returned; empty if the request could not run.
        prompt: the prompt's text; None if it was given as token ids.
        prompt_token_ids: the prompt's token ids, including special tokens.
        prompt_logprobs: a list with None for the first prompt token and a dict of token id ->
            Logprob for each other, built when it is first read; None unless ``prompt_logprobs``
            was set.
        outputs: the completions, by index.
        finished: whether all completions have finished.
        metrics: when the request arrived, had its first token and finished.
        lora_request, encoder_prompt, encoder_prompt_token_ids, kv_transfer_params: exist for vLLM;
            always None.
        num_cached_tokens: the number of prompt tokens found in the prefix cache; None if the
            request could not run.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] = field(repr=False)
    prompt_logprobs: Any = field(default=LazyList(), repr=False)
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    metrics: RequestMetrics | None = field(default=None, repr=False)
    lora_request: None = field(default=None, repr=False)
    encoder_prompt: str | None = field(default=None, repr=False)
    encoder_prompt_token_ids: list[int] | None = field(default=None, repr=False)
    num_cached_tokens: int | None = None
    kv_transfer_params: None = field(default=None, repr=False)

    def __getitem__(self, key: str) -> Any:
        if key in ("text", "token_ids"):
            return getattr(self.outputs[0], key)
        raise KeyError(f"{key!r}: a result has 'text' and 'token_ids'")
