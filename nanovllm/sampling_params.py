"""Sampling parameters of a request, with vLLM's names and defaults."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Integral, Real
from typing import Any

import numpy as np

MAX_MAGNITUDE = 1e30  # well within the range of fp32
MAX_COMPLETIONS = 2**14  # of one prompt
MAX_STRINGS = 4096  # stop strings or bad words; each is searched for at every token
MAX_CHOICES = 100_000
MAX_CHARS = 100_000  # total of all stop strings, or of all bad words
GREEDY_TEMPERATURE = 1e-5  # sampling is greedy below it, where logits / temperature could overflow
LIST_TYPES = (list, tuple, set, frozenset)


class RequestOutputKind(Enum):
    """vLLM's kinds of streaming output. DELTA is not supported."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


IMMUTABLE = frozenset((bool, int, float, str, type(None), RequestOutputKind))


@dataclass
class StructuredOutputsParams:
    """The constraint that the text of a completion must satisfy. Exactly one of the first five
    attributes must be set.

    Attributes:
        json: a JSON schema as a dict or a string, or a pydantic model class.
        regex: a regular expression that matches the whole text.
        choice: a list of allowed texts.
        grammar: a context-free grammar in Lark's syntax, or in EBNF with a ``root`` rule.
        json_object: True for any JSON object.
        disable_any_whitespace, disable_additional_properties: accepted and ignored. JSON always
            has at most one space between symbols, and only the keys that the schema allows.
        whitespace_pattern, structural_tag: exist for vLLM; not supported.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: none or several of the first five are set, or an unsupported field is set.
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
                raise ValueError(f"vLLM's structured_outputs.{name} is not supported here")
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
            self.choice = _validate_strings(
                "choice", self.choice, MAX_CHOICES, math.inf, may_be_empty=True
            )
            if not self.choice:
                raise ValueError("choice needs at least one text to choose")
        if not isinstance(self.json_object, (bool, type(None))):
            raise TypeError(f"json_object must be True or False, got {self.json_object!r:.80}")


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Each field is checked and normalised when it is set: numpy numbers become Python numbers, and a
    single stop string becomes a list. Every call copies the object, so it can be changed and used
    again.

    The parameters are applied in this order: ``allowed_token_ids`` and structured outputs,
    ``bad_words``, ``min_tokens``, ``logit_bias``, the penalties, ``temperature``, ``min_p``,
    ``top_k``, ``top_p``.

    Attributes:
        n: the number of completions per prompt. Each is sampled with different random numbers.
        presence_penalty: subtracted from the logit of each token that was generated so far.
        frequency_penalty: subtracted from a token's logit once for each time it was generated.
        repetition_penalty: divides the positive logits of tokens in the prompt or generated so
            far, and multiplies the negative ones (Keskar et al. 2019, arXiv:1909.05858).
        temperature: divides the logits before sampling; 0 means greedy sampling.
        top_p: samples from the smallest set of most likely tokens whose probabilities, after
            ``top_k``, sum to at least this value (Holtzman et al. 2020, arXiv:1904.09751).
        top_k: samples from the k most likely tokens, and from tokens as likely as the last of
            them; 0 or -1 for all tokens.
        min_p: samples from tokens whose probability is at least this fraction of the most likely
            token's (arXiv:2407.01082).
        seed: with a seed, the sampled tokens depend only on the seed and the logits. None (or -1)
            derives a seed from the engine's ``seed``.
        stop: strings that end the completion at their first occurrence in the text.
        stop_token_ids: tokens that end the completion, in addition to the model's EOS tokens.
        ignore_eos: whether to continue after an EOS token.
        max_tokens: the maximum number of tokens to generate; None for as many as ``max_model_len``
            allows.
        min_tokens: the number of tokens to generate before an EOS token, a stop token or a stop
            string can end the completion.
        logprobs: returns the log-probabilities of the sampled token and of this many most likely
            tokens at each position; -1 for the whole vocabulary, True for 1.
            ``Config.logprobs_mode`` selects the logits.
        prompt_logprobs: the same for the prompt's tokens, always from the raw logits.
        detokenize: whether to convert the tokens to text.
        skip_special_tokens: whether to leave special tokens out of the text.
        spaces_between_special_tokens: passed to the tokenizer's ``decode``.
        include_stop_str_in_output: whether to keep the stop string or stop token in the text.
        bad_words: strings whose token sequences must not be generated.
        allowed_token_ids: the only tokens that may be generated.
        logit_bias: values to add to the logits, by token id.
        structured_outputs: a JSON schema, regex, list of choices or grammar that the text must
            match.

    The other fields exist for compatibility with vLLM. They are accepted only at values that have
    no effect (``NEUTRAL_VALUES``).

    Raises:
        TypeError: a value has the wrong type, or a field is unknown.
        ValueError: a value is out of range, or two values contradict each other.
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
        validate = VALIDATORS.get(name)
        if validate is not None:
            value = validate(name, value)
        elif type(self) is SamplingParams:  # a subclass may have more fields
            raise AttributeError(f"SamplingParams has no field {name!r}")
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        if self.is_greedy:  # these have no effect then; vLLM resets them too
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        self.check()

    def check(self) -> None:
        """Checks that the fields are consistent. Checks lists and dicts again too, because they
        may have been changed in place.

        Raises:
            TypeError, ValueError: a value is invalid, or fields contradict each other.
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
        """Creates an object as vLLM's method of this name does. None means the default of ``n``,
        the penalties, ``temperature`` and ``top_p``. The keys of ``logit_bias`` may be strings, and
        its values are clipped to [-100, 100]."""
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
        """Returns a deep copy."""
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
        """``stop`` as a list, which it always is after validation."""
        return self.stop  # type: ignore[return-value]

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def truncates(self) -> bool:
        """Whether ``top_p``, ``top_k`` or ``min_p`` exclude tokens from sampling."""
        return not self.is_greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def _copy(value: Any) -> Any:
    """Returns a deep copy."""
    if type(value) is list:  # a list of ids or strings, which are immutable
        return value.copy()
    try:
        return copy.deepcopy(value)
    except RecursionError:
        raise ValueError("a parameter is nested too deeply") from None


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _int_validator(
    minimum: int, maximum: float = math.inf, optional: bool = False
) -> Callable[..., Any]:
    def validate(name: str, value: Any) -> int | None:
        if optional and value is None:
            return None
        if not _is_int(value):
            kind = "an int or None" if optional else "an int"
            raise TypeError(f"{name} must be {kind}, got {value!r:.80}")
        if not minimum <= value <= maximum:
            bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            raise ValueError(f"{name} must be {bound}, got {value!s:.40}")
        return int(value)

    return validate


def _number_validator(low: float, high: float, above: bool = False) -> Callable[[str, Any], float]:
    def validate(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {value!r:.80}")
        if not low <= value <= high or (above and value == low):  # type: ignore[operator]
            bound = "above" if above else "at least"
            raise ValueError(f"{name} must be {bound} {low} and at most {high}, got {value!r:.40}")
        return float(value)

    return validate


def _validate_bool(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r:.80}")
    return bool(value)


def _validate_seed(name: str, value: Any) -> int | None:
    seed = _int_validator(-(2**63), 2**64 - 1, optional=True)(name, value)
    return None if seed == -1 else seed


def _validate_num_logprobs(name: str, value: Any) -> int | None:
    if isinstance(value, (bool, np.bool_)):
        return 1 if value else None
    return _int_validator(-1, optional=True)(name, value)


def _validate_strings(
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
            raise ValueError(f"{name} holds {value!r:.80}, which is not valid Unicode") from None
    return list(values)


def _validate_stop(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    return _validate_strings(name, [value] if isinstance(value, str) else value)


def _validate_bad_words(name: str, value: Any) -> list[str]:
    return [] if value is None else list(dict.fromkeys(_validate_strings(name, value)))


def _validate_ids(name: str, values: Any) -> list[int]:
    """Returns token ids as Python ints without duplicates."""
    if not isinstance(values, LIST_TYPES):
        raise TypeError(f"{name} must be a list of token ids, got {values!r:.80}")
    for value in values:
        if not _is_int(value):
            raise TypeError(f"{name} holds {value!r:.80}, which is not a token id")
        if value < 0:
            raise ValueError(f"{name} holds {value}: token ids are at least 0")
    return list(dict.fromkeys(map(int, values)))


def _validate_stop_token_ids(name: str, values: Any) -> list[int]:
    return [] if values is None else _validate_ids(name, values)


def _validate_allowed_token_ids(name: str, values: Any) -> list[int] | None:
    if values is None:
        return None
    ids = _validate_ids(name, values)
    if not ids:
        raise ValueError(f"{name} must name at least one token")
    return ids


def _validate_logit_bias(name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must map token ids to numbers, got {value!r:.80}")
    _validate_ids(name, list(value))
    for token_id, bias in value.items():
        is_number = isinstance(bias, Real) and not isinstance(bias, bool)
        if not is_number:
            raise TypeError(f"{name}[{token_id}] must be a number, got {bias!r:.80}")
        if not -MAX_MAGNITUDE <= bias <= MAX_MAGNITUDE:
            raise ValueError(
                f"{name}[{token_id}] must be within {MAX_MAGNITUDE} of 0, got {bias!r:.40}: use "
                f"allowed_token_ids or bad_words to forbid tokens"
            )
    return {int(token_id): float(bias) for token_id, bias in value.items()}


def _validate_structured_outputs(name: str, value: Any) -> StructuredOutputsParams | None:
    if not isinstance(value, (StructuredOutputsParams, type(None))):
        raise TypeError(f"{name} must be StructuredOutputsParams, got {value!r:.80}")
    return value


def _validate_neutral(name: str, value: Any) -> Any:
    if not any(value is neutral or value == neutral for neutral in NEUTRAL_VALUES[name]):
        raise ValueError(
            f"vLLM's sampling parameter {name} is not supported here, got {value!r:.80}"
        )
    return value


def _accept_anything(name: str, value: Any) -> Any:
    return value


PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
# The attribute of msgspec.Struct, vLLM's base class. The package outlines uses it to copy objects.
SamplingParams.__struct_fields__ = tuple(f.name for f in fields(SamplingParams))  # type: ignore[attr-defined]
# Unsupported fields of vLLM, with the values at which they have no effect.
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
# Fields of vLLM that do not affect results and are accepted at any value.
IGNORED_FIELDS = ("extra_args", "skip_clone", "skip_reading_prefix_cache", "stream_interval")
# The function that checks and normalises each field: (name, value) -> value.
VALIDATORS: dict[str, Callable[[str, Any], Any]] = {
    **{f.name: _validate_bool for f in fields(SamplingParams) if f.type is bool},
    "n": _int_validator(1, MAX_COMPLETIONS),
    "presence_penalty": _number_validator(-2, 2),
    "frequency_penalty": _number_validator(-2, 2),
    "repetition_penalty": _number_validator(1e-4, 1e4),
    "temperature": _number_validator(0, MAX_MAGNITUDE),
    "top_p": _number_validator(0, 1, above=True),
    "top_k": _int_validator(-1),
    "min_p": _number_validator(0, 1),
    "seed": _validate_seed,
    "stop": _validate_stop,
    "stop_token_ids": _validate_stop_token_ids,
    "max_tokens": _int_validator(1, optional=True),
    "min_tokens": _int_validator(0),
    "logprobs": _validate_num_logprobs,
    "prompt_logprobs": _validate_num_logprobs,
    "bad_words": _validate_bad_words,
    "allowed_token_ids": _validate_allowed_token_ids,
    "logit_bias": _validate_logit_bias,
    "structured_outputs": _validate_structured_outputs,
    **dict.fromkeys(NEUTRAL_VALUES, _validate_neutral),
    **dict.fromkeys(IGNORED_FIELDS, _accept_anything),
}
