"""What a request returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Logprob:
    """How likely one token was at one position.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token.
        decoded_token: its text; None without a tokenizer or with ``detokenize=False``.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobList = list[dict[int, Logprob] | None]


class PackedLogprobs:
    """Log-probabilities as the engine collects them: a million tokens cost one array, not a million
    dicts.

    Args:
        rows: int32 [positions, 1 + 2 * (1 + k)]: the rank of the token at that position, then pairs
            of a token id and the bits of its fp32 log-probability: that token's, and the k best.
        decode: texts of the candidates for a position, given the token ids at the positions before
            it and theirs; None for no texts.
        starts_with_none: put None before the rows; a prompt's first token has no probability.
    """

    __slots__ = ("decode", "rows", "starts_with_none")

    def __init__(
        self,
        rows: np.ndarray,
        decode: Callable[[Sequence[int], Sequence[int]], Sequence[str | None]] | None = None,
        starts_with_none: bool = False,
    ) -> None:
        self.rows = rows
        self.decode = decode
        self.starts_with_none = starts_with_none

    def token_logprobs(self) -> np.ndarray:
        """fp32 [positions], of the tokens at these positions."""
        return self.rows[:, 2].view(np.float32)

    def to_list(self) -> LogprobList:
        """A dict of token id -> Logprob for each position. Each starts with the token at that
        position, whatever its rank; the most likely ones follow, in order."""
        out: LogprobList = [None] if self.starts_with_none else []
        before: list[int] = []
        for row in self.rows:
            ids, logprobs = row[1::2].tolist(), row[2::2].view(np.float32).tolist()
            ranks = [int(row[0]), *range(1, len(ids))]
            texts = [None] * len(ids) if self.decode is None else self.decode(before, ids)
            position: dict[int, Logprob] = {}
            for token_id, logprob, rank, text in zip(ids, logprobs, ranks, texts, strict=True):
                position.setdefault(token_id, Logprob(logprob, rank, text))
            out.append(position)
            before = [*before[-3:], ids[0]]  # a character has at most 4 bytes, so 4 tokens
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.to_list(),)  # without the tokenizer behind ``decode``


class _Logprobs:
    """A field that is given PackedLogprobs and becomes a plain list when it is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> LogprobList | None:
        if instance is None:
            return None
        value = vars(instance)[self.name]
        if isinstance(value, PackedLogprobs):
            value = vars(instance)[self.name] = value.to_list()
        return value

    def __set__(self, instance: Any, value: PackedLogprobs | LogprobList | None) -> None:
        vars(instance)[self.name] = None if value is self else value  # self: no argument


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds since the epoch; None for what has not.

    Attributes:
        arrival_time: the request was queued.
        first_token_time: its first token reached the host.
        finished_time: its last completion ended.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: position among the completions of its prompt.
        text: the completion, cut before a stop string; empty without a tokenizer or with
            ``detokenize=False``.
        token_ids: every generated token, one that ended the completion included.
        cumulative_logprob: sum over the tokens; None unless ``logprobs`` were asked for.
        logprobs: a list with a dict of token id -> Logprob for each token, made when it is first
            read; None unless asked for.
        finish_reason: "stop" (an end-of-sequence token, a stop token or string, the end of a
            grammar), "length" (``max_tokens``, the model's length limit, or the size of the KV
            cache), "error", or None while it runs.
        stop_reason: the stop string or stop token that ended it; None for any other end.
        lora_request: vLLM's; always None.
        error: what went wrong where ``finish_reason`` is "error": the request could not run, or
            failed with the tokens and the text that are here.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Any = field(default=_Logprobs(), repr=False)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = field(default=None, repr=False)
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's result, readable in vLLM's style (``out.outputs[0].text``) and in nano-vLLM's
    (``out["text"]``, ``out["token_ids"]``).

    Attributes:
        request_id: what ``add_request`` returned; empty for one that could not run.
        prompt: the prompt's text; None if it was given as token ids.
        prompt_token_ids: the prompt as the model saw it.
        prompt_logprobs: None, then a dict for each further prompt token, made when it is first
            read; None unless asked for.
        outputs: its completions, by index.
        finished: whether all of them have ended.
        metrics: when it arrived, had its first token and finished.
        lora_request, encoder_prompt, encoder_prompt_token_ids, kv_transfer_params: vLLM's; always
            None.
        num_cached_tokens: prompt tokens that the prefix cache held already; None for a prompt that
            could not run.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] = field(repr=False)
    prompt_logprobs: Any = field(default=_Logprobs(), repr=False)
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


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """An engine at one moment.

    Attributes:
        num_running: sequences that hold KV blocks.
        num_waiting: sequences that do not yet, or no longer.
        kv_cache_usage: share of the KV blocks in use, 0 to 1.
        num_prompt_tokens: tokens of all prompts that have started since the engine did.
        num_generated_tokens: tokens sampled since then.
        prefix_cache_hit_rate: share of those prompt tokens that the prefix cache held.
        num_preemptions: times that a sequence lost its blocks to others, since then.
        prompt_tokens_per_second: tokens prefilled, over the last seconds.
        generated_tokens_per_second: tokens sampled, over the last seconds.
        gpu_memory_bytes: what this process holds of rank 0's GPU through PyTorch; None on a CPU.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_prompt_tokens: int
    num_generated_tokens: int
    prefix_cache_hit_rate: float
    num_preemptions: int
    prompt_tokens_per_second: float
    generated_tokens_per_second: float
    gpu_memory_bytes: int | None = None
