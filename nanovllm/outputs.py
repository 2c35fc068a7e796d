"""What a request returns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely one token was at one position.

    Attributes:
        logprob: natural logarithm of its probability, by the logits as the model gave them.
        rank: 1 for the most likely token.
        decoded_token: its text; None where the model has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


class Logprobs(Sequence[dict[int, Logprob] | None]):
    """A dict of token id -> Logprob for each position, built when it is looked at.

    Each dict starts with the token that stands there, whatever its rank; the most likely ones
    follow, in order. A million tokens cost two arrays, not a million dicts.

    Args:
        rows: int32 [positions, 1 + 2 * (1 + k)]: the rank of the token that stands there, then
            pairs of a token id and the bits of its fp32 log-probability: that token, the k best.
        decode: text of one token id.
        starts_with_none: put None before the rows; a prompt's first token has no probability.
    """

    __slots__ = ("_decode", "_offset", "_rows")

    def __init__(
        self,
        rows: np.ndarray,
        decode: Callable[[int], str | None],
        starts_with_none: bool = False,
    ) -> None:
        self._rows = rows
        self._decode = decode
        self._offset = int(starts_with_none)

    def __len__(self) -> int:
        return len(self._rows) + self._offset

    @overload
    def __getitem__(self, i: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, i: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(f"position {i} of {len(self)}")
        position = i % len(self) - self._offset
        return None if position < 0 else self._make(position)

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Logprobs, list)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} positions of logprobs>"

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # without the tokenizer behind ``decode``

    def token_logprobs(self) -> np.ndarray:
        """fp32 [rows], of the tokens that stand there."""
        return self._rows[:, 2].view(np.float32)

    def _make(self, position: int) -> dict[int, Logprob]:
        row = self._rows[position]
        ids, logprobs = row[1::2].tolist(), row[2::2].view(np.float32).tolist()
        ranks = [int(row[0]), *range(1, len(ids))]
        out: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(ids, logprobs, ranks, strict=True):
            if token_id not in out:
                out[token_id] = Logprob(logprob, rank, self._decode(token_id))
        return out


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


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: position among the completions of its prompt.
        text: the completion, cut before a stop string; empty without a tokenizer or with
            ``detokenize=False``.
        token_ids: every generated token, one that ended the completion included.
        cumulative_logprob: sum over the tokens; None unless ``logprobs`` were asked for.
        logprobs: a dict for each token; None unless asked for.
        finish_reason: "stop" (an end-of-sequence token, a stop token or string, the end of a
            grammar), "length" (``max_tokens``, the model's length limit, or the size of the KV
            cache), "error", or None while it runs.
        stop_reason: the stop string or stop token that ended it; None for any other end.
        error: what went wrong where ``finish_reason`` is "error": the request could not run, or
            failed on the way with the tokens and the text that there are.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = field(default=None, repr=False)
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's result, readable in vLLM's style (``out.outputs[0].text``) and in nano-vLLM's
    (``out["text"]``, ``out["token_ids"]``).

    Attributes:
        request_id: what ``add_request`` returned; empty for one that could not run.
        prompt: the prompt's text; None if it was given as token ids.
        prompt_token_ids: the prompt as the model saw it.
        prompt_logprobs: None, then a dict for each further prompt token; None unless asked for.
        outputs: its completions, by index.
        finished: whether all of them have ended.
        num_cached_tokens: prompt tokens that the prefix cache held already.
        metrics: when it arrived, had its first token and finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] = field(repr=False)
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: Logprobs | None = field(default=None, repr=False)
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, repr=False)

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
        num_prompt_tokens: of all prompts that have started since the engine did.
        num_generated_tokens: drawn since then.
        prefix_cache_hit_rate: share of those prompt tokens that the prefix cache held.
        num_preemptions: times that a sequence lost its blocks to others, since then.
        prompt_tokens_per_second: tokens prefilled, over the last seconds.
        generated_tokens_per_second: tokens drawn, over the last seconds.
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
