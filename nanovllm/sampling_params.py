"""How the tokens of one request are drawn, and when it stops. Names and defaults are vLLM's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

LARGEST = 1e30  # well within fp32
MAX_COMPLETIONS = 2**14  # of one prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the text of a completion has to match; exactly one of:

    Attributes:
        json: a JSON schema as a dict or a string, or a pydantic model class.
        regex: a regular expression for the whole text.
        choice: the texts to choose from.
        grammar: a context-free grammar in Lark's syntax, or in EBNF with a ``root`` rule.
        json_object: True for any JSON object.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: none or several of them.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs needs exactly one of json, regex, choice, grammar and "
                f"json_object, got {', '.join(given) or 'none'}"
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
            _check_strings("choice", self.choice)
            if not self.choice:
                raise ValueError("choice needs at least one text to choose")
        if not isinstance(self.json_object, (bool, type(None))):
            raise TypeError(f"json_object must be True or False, got {self.json_object!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; immutable, so one object can serve many.

    The order in which they act: ``allowed_token_ids`` and structured outputs, ``bad_words``,
    ``min_tokens``, ``logit_bias``, the penalties, ``temperature``, ``min_p``, ``top_k``, ``top_p``.

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
        logprobs: also return the log-probabilities of this many most likely tokens, and of the
            one drawn, at each position, from the logits as the model gives them; -1 for all.
        prompt_logprobs: the same for the prompt's tokens.
        detokenize: turn the tokens into text.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: passed on to the tokenizer.
        include_stop_str_in_output: keep the stop string (or the stop token) in the text.
        bad_words: strings whose tokens may not be generated in a row.
        allowed_token_ids: the only tokens that may be generated.
        logit_bias: what to add to the logits of these tokens.
        structured_outputs: a schema, an expression or a grammar that the text has to match.

    Raises:
        TypeError: a value of the wrong type.
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
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for field in fields(self):  # what the caller does to a list later is not meant here
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, list(value))
            elif isinstance(value, Mapping):
                object.__setattr__(self, field.name, dict(value))
        self._check_int("n", 1)
        if self.n > MAX_COMPLETIONS:
            raise ValueError(f"n must be at most {MAX_COMPLETIONS}, got {self.n}")
        self._check_number("presence_penalty", -2, 2)
        self._check_number("frequency_penalty", -2, 2)
        self._check_number("repetition_penalty", 1e-4, 1e4)
        self._check_number("temperature", 0, LARGEST)
        self._check_number("top_p", 0, 1, above=True)
        self._check_int("top_k", -1)
        self._check_number("min_p", 0, 1)
        self._check_int("seed", -(2**63), optional=True)
        if self.seed is not None and self.seed >= 2**64:
            raise ValueError(f"seed must fit into 64 bits, got {self.seed}")
        self._check_int("max_tokens", 1, optional=True)
        self._check_int("min_tokens", 0)
        self._check_int("logprobs", -1, optional=True)
        self._check_int("prompt_logprobs", -1, optional=True)
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r:.80}")
        if self.stop is not None:
            _check_strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        if "" in self.stop_strings:
            raise ValueError("stop must not contain an empty string")
        if self.bad_words is not None:
            _check_strings("bad_words", self.bad_words)
            if "" in self.bad_words:
                raise ValueError("bad_words must not contain an empty string")
        for name in ("stop_token_ids", "allowed_token_ids"):
            if getattr(self, name) is not None:
                _check_ids(name, getattr(self, name))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must name at least one token")
        self._check_logit_bias()
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))):
            raise TypeError(
                f"structured_outputs must be StructuredOutputsParams, "
                f"got {self.structured_outputs!r:.80}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}"
            )
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings are found in text: leave detokenize=True")
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n={self.n} greedy completions would be equal: raise temperature")

    @property
    def is_greedy(self) -> bool:
        """Whether logits divided by so low a temperature would overflow: an argmax anyway."""
        return self.temperature < 1e-5

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def truncates(self) -> bool:
        """Whether only some of the tokens may be drawn."""
        return not self.is_greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def _check_int(self, name: str, minimum: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, Integral):
            kind = "an int or None" if optional else "an int"
            raise TypeError(f"{name} must be {kind}, got {value!r:.80}")
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")

    def _check_number(self, name: str, low: float, high: float, above: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {value!r:.80}")
        if not low <= value <= high or (above and value == low):  # type: ignore[operator]
            bound = "above" if above else "at least"
            raise ValueError(f"{name} must be {bound} {low} and at most {high}, got {value!r:.40}")

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r:.80}"
            )
        _check_ids("logit_bias", list(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            if isinstance(bias, bool) or not isinstance(bias, Real):
                raise TypeError(f"logit_bias[{token_id}] must be a number, got {bias!r:.80}")
            if not -LARGEST <= bias <= LARGEST:
                raise ValueError(
                    f"logit_bias[{token_id}] must be within {LARGEST} of 0, got {bias!r:.40}: use "
                    f"allowed_token_ids or bad_words to forbid tokens"
                )


def _check_strings(name: str, values: Any) -> None:
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
        raise TypeError(f"{name} must be a list of strings, got {values!r:.80}")
    for value in values:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} holds {value!r:.80}, which is no valid Unicode") from None


def _check_ids(name: str, values: Any) -> None:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} must be a list of token ids, got {values!r:.80}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} holds {value!r:.80}, which is not a token id")
        if value < 0:
            raise ValueError(f"{name} holds {value}: token ids are at least 0")
