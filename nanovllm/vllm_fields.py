"""vLLM's sampling parameters that ``LLM`` ignores, former names, and its names of times, so that
scripts which use them run."""

# ruff: noqa: RUF009 (neutral and ignored return dataclass fields)

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from inspect import Parameter, signature
from typing import Any, Self

from nanovllm.utils.validation import check_names

NO_BEAM_SEARCH = "beam search is not supported"


class RequestOutputKind(Enum):
    """vLLM's kinds of streaming output. DELTA is not supported."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@cache
def _parameters(cls: Any) -> list[str] | None:
    """Returns the names of a class's parameters, which a subclass may have defined itself. None if
    it takes any."""
    parameters = signature(cls.__init__).parameters.values()
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    return None if takes_any else [parameter.name for parameter in parameters][1:]


def neutral(*values: Any) -> Any:
    """Returns a field that is accepted at these values only, the default first."""
    return field(default=values[0], repr=False, metadata={"neutral": values})


def former(hint: str, *values: Any) -> Any:
    """Returns a neutral field of earlier versions of vLLM. At other values, the error says what to
    use instead."""
    return field(default=values[0], repr=False, metadata={"neutral": values, "hint": hint})


def ignored(default: Any = None) -> Any:
    """Returns a field that is accepted at any value, and ignored."""
    return field(default=default, repr=False)


@dataclass(kw_only=True)
class VLLMFields:
    """The base class of ``SamplingParams`` with these fields."""

    output_kind: RequestOutputKind = neutral(
        RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
    )
    extra_args: dict[str, Any] | None = ignored()
    skip_clone: bool = ignored(False)
    skip_reading_prefix_cache: bool | None = ignored()
    stream_interval: int | None = ignored()
    watermarking: bool | None = neutral(None, False)
    flat_logprobs: bool = neutral(False)
    logprob_token_ids: list[int] | None = neutral(None)
    prompt_logprob_token_ids: Any = neutral(None)
    prompt_logprob_start: int | None = neutral(None)
    thinking_token_budget: int | None = neutral(None, -1)
    repetition_detection: Any = neutral(None)
    routed_experts_prompt_start: int = neutral(0)
    trace_decode_token_ids: list[int] | None = neutral(None)
    logits_processors: list[Any] | None = neutral(None, [])
    guided_decoding: Any = field(default=None, repr=False)  # see ``__setattr__``
    best_of: int | None = former("use n, and choose by cumulative_logprob", None, 1)
    use_beam_search: bool = former(NO_BEAM_SEARCH, False)
    length_penalty: float = former(NO_BEAM_SEARCH, 1.0)
    early_stopping: bool | str = former(NO_BEAM_SEARCH, False)
    truncate_prompt_tokens: int | None = former("shorten the prompt's token ids", None)

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Raises TypeError for an unknown parameter. The message suggests a known one."""
        known = _parameters(cls)  # type: ignore[arg-type]  # a class is hashable
        if known is not None:
            check_names(values, known)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets ``structured_outputs`` also by its former name."""
        guided = vars(self).get("guided_decoding")
        if name == "structured_outputs" and guided is not None:
            if value not in (None, guided):
                raise ValueError("guided_decoding is structured_outputs: set only one of them")
            value = guided
        super().__setattr__(name, value)
        if name == "guided_decoding" and value is not None:
            self.structured_outputs = value

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """Creates an object as vLLM's method of this name does. None means the default of ``n``,
        the penalties, ``temperature`` and ``top_p``. The keys of ``logit_bias`` may be strings, and
        its values are clipped to [-100, 100]."""
        if (bias := values.get("logit_bias")) is not None:
            try:
                values["logit_bias"] = {int(i): min(100.0, max(-100.0, b)) for i, b in bias.items()}
            except (AttributeError, TypeError, ValueError):
                message = f"logit_bias must map token ids to numbers: {bias!r:.80}"
                raise ValueError(message) from None
        penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        for name in ("n", "temperature", "top_p", *penalties):
            if values.get(name) is None:
                values.pop(name, None)
        return cls(**values)


class VLLMTimes:
    """The base class of ``RequestMetrics``, with vLLM's names of the same times. They are 0 before
    the event."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None

    @property
    def queued_ts(self) -> float:
        return self.arrival_time

    @property
    def first_token_ts(self) -> float:
        return self.first_token_time or 0.0

    @property
    def last_token_ts(self) -> float:
        return self.finished_time or 0.0

    @property
    def first_token_latency(self) -> float:
        """Seconds from ``arrival_time`` to ``first_token_time``."""
        return 0.0 if self.first_token_time is None else self.first_token_time - self.arrival_time


def _validate(name: str, value: Any) -> Any:
    values = NEUTRAL_VALUES.get(name)  # None if the field is ignored
    if values is not None and not any(value is known or value == known for known in values):
        hint = HINTS.get(name)
        message = f"vLLM's sampling parameter {name} is not supported here, got {value!r:.80}"
        raise ValueError(message) if hint is None else TypeError(f"{message}: {hint}")
    return value


# The values at which a field has no effect.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    f.name: f.metadata["neutral"] for f in fields(VLLMFields) if f.metadata
}
HINTS: dict[str, str] = {
    f.name: f.metadata["hint"] for f in fields(VLLMFields) if "hint" in f.metadata
}
VLLM_VALIDATORS: dict[str, Callable[[str, Any], Any]] = {
    f.name: _validate for f in fields(VLLMFields)
}
