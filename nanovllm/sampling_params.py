"""How the tokens of one request are sampled, and when it stops. Names and defaults are vLLM's."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Integral, Real
from typing import Any

import numpy as np

LARGEST = 1e30  # well within fp32
MAX_COMPLETIONS = 2**14  # of one prompt
MAX_STRINGS = 4096  # stop strings or bad words: each is looked for at every token
MAX_CHOICES = 100_000
MAX_CHARS = 100_000  # of all stop strings, or of all bad words
GREEDY_TEMPERATURE = 1e-5  # below it, logits / temperature could overflow: argmax
LIST_TYPES = (list, tuple, set, frozenset)


class RequestOutputKind(Enum):
    """vLLM's names for what a stream yields; results here are always whole."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


IMMUTABLE = frozenset((bool, int, float, str, type(None), RequestOutputKind))


@dataclass
class StructuredOutputsParams:
    """What the text of a completion has to match; exactly one of:

    Attributes:
        json: a JSON schema as a dict or a string, or a pydantic model class.
        regex: a regular expression for the whole text.
        choice: the texts to choose from.
        grammar: a context-free grammar in Lark's syntax, or in EBNF with a ``root`` rule.
        json_object: True for any JSON object.
        disable_any_whitespace, disable_additional_properties: accepted and without effect: JSON is
            written with at most one space between symbols, and has no keys but those that the
            schema allows.
        whitespace_pattern, structural_tag: vLLM's; not served.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: none or several of the first five, or one that is not served.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        for name in ("whitespace_pattern", "structural_tag"):
            if getattr(self, name) is not None:
                raise ValueError(f"vLLM's structured_outputs.{name} is not served here")
        names = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs needs exactly one of {', '.join(names)}, "
                f"got {', '.join(given) or 'none'}"
            )
        if not (
            self.json is None
            or isinstance(self.json, (str, Mapping))
            or hasattr(self.json, "model_json_schema")
        ):
            raise TypeError(
                f"json must be a schema (dict or string) or a pydantic model class, "
                f"got {self.json!r:.80}"
            )
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise TypeError(f"{name} must be a string, got {getattr(self, name)!r:.80}")
        if self.choice is not None:
            self.choice = _read_strings(
                "choice", self.choice, MAX_CHOICES, math.inf, may_be_empty=True
            )
            if not self.choice:
                raise ValueError("choice needs at least one text to choose")
        if not isinstance(self.json_object, (bool, type(None))):
            raise TypeError(f"json_object must be True or False, got {self.json_object!r:.80}")


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling settings of one request.

    Each field is checked and normalised when it is set: numpy numbers become Python's, one stop
    string becomes a list. An object can be changed until it is used; a call copies it first, so one
    object can serve many calls.

    The order in which the settings act: ``allowed_token_ids`` and structured outputs,
    ``bad_words``, ``min_tokens``, ``logit_bias``, the penalties, ``temperature``, ``min_p``,
    ``top_k``, ``top_p``.

    Attributes:
        n: completions per prompt, each with random numbers of its own.
        presence_penalty: subtracted once from the logit of each token generated so far.
        frequency_penalty: subtracted for each time that a token was generated so far.
        repetition_penalty: divides positive logits of tokens in the prompt or generated so far,
            and multiplies negative ones (Keskar et al. 2019, arXiv:1909.05858).
        temperature: divides the logits before sampling; 0 takes the most likely token.
        top_p: keep the most likely tokens whose probabilities, after ``top_k``, just reach this
            sum (Holtzman et al. 2020, arXiv:1904.09751).
        top_k: keep the k most likely tokens, and those as likely as the last; 0 or -1 for all.
        min_p: keep tokens at least this times as likely as the likeliest (arXiv:2407.01082).
        seed: makes the request's tokens a function of it and of the logits alone; None (or -1)
            takes the next one from the engine's own ``seed``.
        stop: strings that end the completion where they first appear in its text.
        stop_token_ids: tokens that end the completion, besides the model's own.
        ignore_eos: go on after an end-of-sequence token.
        max_tokens: most tokens to generate; None for as many as the model's length allows.
        min_tokens: tokens to generate before an end-of-sequence token, a stop token or a stop
            string may end the completion.
        logprobs: also return the log-probabilities of the sampled token and of this many most
            likely ones, at each position; -1 for all, True for 1. ``Config.logprobs_mode`` says of
            which logits.
        prompt_logprobs: the same for the prompt's tokens, always of the model's own logits.
        detokenize: turn the tokens into text.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: passed on to the tokenizer.
        include_stop_str_in_output: keep the stop string (or the stop token) in the text.
        bad_words: strings whose tokens may not be generated in a row.
        allowed_token_ids: the only tokens that may be generated.
        logit_bias: what to add to the logits of these tokens.
        structured_outputs: a schema, an expression or a grammar that the text has to match.

    The other fields are vLLM's. They are accepted at the values that ask for nothing here
    (``NEUTRAL_VALUES``).

    Raises:
        TypeError: a value of the wrong type, or an unknown field.
        ValueError: a value out of its range, or two that contradict each other.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = field(default=RequestOutputKind.CUMULATIVE, repr=False)
    extra_args: dict[str, Any] | None = field(default=None, repr=False)
    skip_clone: bool = field(default=False, repr=False)
    skip_reading_prefix_cache: bool | None = field(default=None, repr=False)
    stream_interval: int | None = field(default=None, repr=False)
    watermarking: bool | None = field(default=None, repr=False)
    flat_logprobs: bool = field(default=False, repr=False)
    logprob_token_ids: list[int] | None = field(default=None, repr=False)
    prompt_logprob_token_ids: Any = field(default=None, repr=False)
    prompt_logprob_start: int | None = field(default=None, repr=False)
    thinking_token_budget: int | None = field(default=None, repr=False)
    repetition_detection: Any = field(default=None, repr=False)
    routed_experts_prompt_start: int = field(default=0, repr=False)
    trace_decode_token_ids: list[int] | None = field(default=None, repr=False)
    logits_processors: list[Any] | None = field(default=None, repr=False)

    def __setattr__(self, name: str, value: Any) -> None:
        read = READERS.get(name)
        if read is not None:
            value = read(name, value)
        elif type(self) is SamplingParams:  # a subclass may have more
            raise AttributeError(f"SamplingParams has no field {name!r}")
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        if self.is_greedy:  # as vLLM does: none of them matters
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        self.check()

    def check(self) -> None:
        """Reads lists and dicts again, which may have been changed in place.

        Raises:
            TypeError, ValueError: a bad value, or fields that contradict each other.
        """
        for name in LISTS_AND_DICTS:
            setattr(self, name, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are found in text: leave detokenize=True")
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n={self.n} greedy completions would be equal: raise temperature")

    @staticmethod
    def from_optional(**values: Any) -> "SamplingParams":
        """vLLM's second constructor: None stands for the default of ``n``, the penalties,
        ``temperature`` and ``top_p``; ``logit_bias`` may have strings for token ids, and is clipped
        to [-100, 100]."""
        if (bias := values.get("logit_bias")) is not None:
            try:
                values["logit_bias"] = {int(i): min(100.0, max(-100.0, b)) for i, b in bias.items()}
            except (AttributeError, TypeError, ValueError):
                raise ValueError(
                    f"logit_bias must map token ids to numbers: {bias!r:.80}"
                ) from None
        optional = ("n", "temperature", "top_p", *PENALTIES)
        return SamplingParams(
            **{k: v for k, v in values.items() if v is not None or k not in optional}
        )

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing that can change."""
        new = object.__new__(type(self))
        vars(new).update(
            {
                name: value if type(value) in IMMUTABLE else _copy(value)
                for name, value in vars(self).items()
            }
        )
        return new

    @property
    def stop_strings(self) -> list[str]:
        """``stop``, which is a list once it is set."""
        return self.stop  # type: ignore[return-value]

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def truncates(self) -> bool:
        """Whether only some of the tokens can be sampled."""
        return not self.is_greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def _copy(value: Any) -> Any:
    """A deep copy; lists here hold ids or strings."""
    if type(value) is list:
        return value.copy()
    try:
        return copy.deepcopy(value)
    except RecursionError:
        raise ValueError("a parameter is nested too deeply") from None


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _int(minimum: int, maximum: float = math.inf, optional: bool = False) -> Callable[..., Any]:
    def read(name: str, value: Any) -> int | None:
        if optional and value is None:
            return None
        if not _is_int(value):
            kind = "an int or None" if optional else "an int"
            raise TypeError(f"{name} must be {kind}, got {value!r:.80}")
        if not minimum <= value <= maximum:
            bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            raise ValueError(f"{name} must be {bound}, got {value!s:.40}")
        return int(value)

    return read


def _number(low: float, high: float, above: bool = False) -> Callable[[str, Any], float]:
    def read(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {value!r:.80}")
        if not low <= value <= high or (above and value == low):  # type: ignore[operator]
            bound = "above" if above else "at least"
            raise ValueError(f"{name} must be {bound} {low} and at most {high}, got {value!r:.40}")
        return float(value)

    return read


def _read_bool(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r:.80}")
    return bool(value)


def _read_seed(name: str, value: Any) -> int | None:
    seed = _int(-(2**63), 2**64 - 1, optional=True)(name, value)
    return None if seed == -1 else seed


def _read_num_logprobs(name: str, value: Any) -> int | None:
    if isinstance(value, (bool, np.bool_)):
        return 1 if value else None
    return _int(-1, optional=True)(name, value)


def _read_strings(
    name: str,
    values: Any,
    max_count: int = MAX_STRINGS,
    max_chars: float = MAX_CHARS,
    may_be_empty: bool = False,
) -> list[str]:
    if not isinstance(values, LIST_TYPES) or not all(isinstance(v, str) for v in values):
        raise TypeError(f"{name} must be a list of strings, got {values!r:.80}")
    if len(values) > max_count:
        raise ValueError(f"{name} has {len(values)} strings, but may have {max_count}")
    if (num_chars := sum(map(len, values))) > max_chars:
        raise ValueError(f"{name} has {num_chars} characters, but may have {max_chars}")
    for value in values:
        if not value and not may_be_empty:
            raise ValueError(f"{name} must not contain an empty string")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} holds {value!r:.80}, which is no valid Unicode") from None
    return list(values)


def _read_stop(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    return _read_strings(name, [value] if isinstance(value, str) else value)


def _read_bad_words(name: str, value: Any) -> list[str]:
    return [] if value is None else list(dict.fromkeys(_read_strings(name, value)))


def _read_ids(name: str, values: Any) -> list[int]:
    """Token ids as Python ints, without repetitions."""
    if not isinstance(values, LIST_TYPES):
        raise TypeError(f"{name} must be a list of token ids, got {values!r:.80}")
    for value in values:
        if not _is_int(value):
            raise TypeError(f"{name} holds {value!r:.80}, which is not a token id")
        if value < 0:
            raise ValueError(f"{name} holds {value}: token ids are at least 0")
    return list(dict.fromkeys(map(int, values)))


def _read_stop_token_ids(name: str, values: Any) -> list[int]:
    return [] if values is None else _read_ids(name, values)


def _read_allowed_token_ids(name: str, values: Any) -> list[int] | None:
    if values is None:
        return None
    ids = _read_ids(name, values)
    if not ids:
        raise ValueError(f"{name} must name at least one token")
    return ids


def _read_logit_bias(name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must map token ids to numbers, got {value!r:.80}")
    _read_ids(name, list(value))
    for token_id, bias in value.items():
        is_number = isinstance(bias, Real) and not isinstance(bias, bool)
        if not is_number:
            raise TypeError(f"{name}[{token_id}] must be a number, got {bias!r:.80}")
        if not -LARGEST <= bias <= LARGEST:
            raise ValueError(
                f"{name}[{token_id}] must be within {LARGEST} of 0, got {bias!r:.40}: use "
                f"allowed_token_ids or bad_words to forbid tokens"
            )
    return {int(token_id): float(bias) for token_id, bias in value.items()}


def _read_structured_outputs(name: str, value: Any) -> StructuredOutputsParams | None:
    if not isinstance(value, (StructuredOutputsParams, type(None))):
        raise TypeError(f"{name} must be StructuredOutputsParams, got {value!r:.80}")
    return value


def _read_neutral(name: str, value: Any) -> Any:
    if not any(value is neutral or value == neutral for neutral in NEUTRAL_VALUES[name]):
        raise ValueError(f"vLLM's sampling parameter {name} is not served here, got {value!r:.80}")
    return value


def _read_anything(name: str, value: Any) -> Any:
    return value


PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
# As msgspec, vLLM's base class, names the fields: outlines copies parameters by it.
SamplingParams.__struct_fields__ = tuple(f.name for f in fields(SamplingParams))  # type: ignore[attr-defined]
# vLLM's fields that are not served, with the values that ask for nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "output_kind": (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY),
    "watermarking": (None, False),
    "flat_logprobs": (False,),
    "logprob_token_ids": (None,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None,),
    "thinking_token_budget": (None, -1),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (0,),
    "trace_decode_token_ids": (None,),
    "logits_processors": (None, []),
}
LISTS_AND_DICTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias")
# vLLM's fields that change no result here, whatever they say.
HINTS = ("extra_args", "skip_clone", "skip_reading_prefix_cache", "stream_interval")
# What checks and normalises each field: (name, value) -> value.
READERS: dict[str, Callable[[str, Any], Any]] = {
    **{f.name: _read_bool for f in fields(SamplingParams) if f.type is bool},
    "n": _int(1, MAX_COMPLETIONS),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(1e-4, 1e4),
    "temperature": _number(0, LARGEST),
    "top_p": _number(0, 1, above=True),
    "top_k": _int(-1),
    "min_p": _number(0, 1),
    "seed": _read_seed,
    "stop": _read_stop,
    "stop_token_ids": _read_stop_token_ids,
    "max_tokens": _int(1, optional=True),
    "min_tokens": _int(0),
    "logprobs": _read_num_logprobs,
    "prompt_logprobs": _read_num_logprobs,
    "bad_words": _read_bad_words,
    "allowed_token_ids": _read_allowed_token_ids,
    "logit_bias": _read_logit_bias,
    "structured_outputs": _read_structured_outputs,
    **dict.fromkeys(NEUTRAL_VALUES, _read_neutral),
    **dict.fromkeys(HINTS, _read_anything),
}
