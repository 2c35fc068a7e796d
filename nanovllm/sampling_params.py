"""Sampling parameters of a request, with vLLM's names and defaults."""

import copy
from dataclasses import dataclass, fields
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from nanovllm.utils.validation import (
    boolean,
    integer,
    number,
    optional,
    or_empty,
    strings,
    token_biases,
    token_ids,
    validators_of,
)
from nanovllm.vllm_fields import VLLM_VALIDATORS, RequestOutputKind, VLLMFields

if TYPE_CHECKING:
    from nanovllm.structured_outputs import StructuredOutputsParams

MAX_MAGNITUDE = 1e30  # well within the range of fp32
MAX_COMPLETIONS = 2**14  # of one prompt
GREEDY_TEMPERATURE = 1e-5  # sampling is greedy below it, where logits / temperature could overflow
IMMUTABLE = bool, int, float, NoneType, RequestOutputKind  # types of fields that clones share
_search_strings = strings(max_count=4096, max_chars=100_000)  # limited: each step searches for them


def _seed(name: str, value: Any) -> int | None:
    seed = optional(integer(-(2**63), 2**64 - 1))(name, value)
    return None if seed == -1 else seed


def _num_logprobs(name: str, value: Any) -> int | None:
    if isinstance(value, (bool, np.bool_)):
        value = int(value) or None
    return optional(integer(-1))(name, value)


def _stop(name: str, value: Any) -> list[str]:
    return _search_strings(name, [value] if isinstance(value, str) else value)


def _bad_words(name: str, value: Any) -> list[str]:
    return list(dict.fromkeys(_search_strings(name, value)))


def _allowed_token_ids(name: str, value: Any) -> list[int]:
    if not (ids := token_ids(name, value)):
        raise ValueError(f"{name} must name at least one token")
    return ids


def _structured_outputs(name: str, value: Any) -> "StructuredOutputsParams":
    from nanovllm.structured_outputs import StructuredOutputsParams

    if not isinstance(value, StructuredOutputsParams):
        raise TypeError(f"{name} must be StructuredOutputsParams, got {value!r:.80}")
    return value


@dataclass(kw_only=True)
class SamplingParams(VLLMFields):
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
            ``min_p`` and ``top_k``, sum to at least this value (Holtzman et al. 2020,
            arXiv:1904.09751).
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

    The fields of ``VLLMFields`` exist for compatibility with vLLM. ``LLM`` ignores them, except
    ``guided_decoding``, the former name of ``structured_outputs``. Most accept only values that
    have no effect in vLLM either.

    Raises:
        TypeError: a value has the wrong type, or a field is unknown.
        ValueError: a value is out of range, or two values contradict each other.
    """

    n: Annotated[int, integer(1, MAX_COMPLETIONS)] = 1
    presence_penalty: Annotated[float, number(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, number(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, number(1e-4, 1e4)] = 1.0
    temperature: Annotated[float, number(0, MAX_MAGNITUDE)] = 1.0
    top_p: Annotated[float, number(0, 1, above=True)] = 1.0
    top_k: Annotated[int, integer(-1)] = 0
    min_p: Annotated[float, number(0, 1)] = 0.0
    seed: Annotated[int | None, _seed] = None
    stop: Annotated[str | list[str] | None, or_empty(_stop)] = None
    stop_token_ids: Annotated[list[int] | None, or_empty(token_ids)] = None
    ignore_eos: Annotated[bool, boolean] = False
    max_tokens: Annotated[int | None, optional(integer(1))] = 16
    min_tokens: Annotated[int, integer(0)] = 0
    logprobs: Annotated[int | None, _num_logprobs] = None
    prompt_logprobs: Annotated[int | None, _num_logprobs] = None
    detokenize: Annotated[bool, boolean] = True
    skip_special_tokens: Annotated[bool, boolean] = True
    spaces_between_special_tokens: Annotated[bool, boolean] = True
    include_stop_str_in_output: Annotated[bool, boolean] = False
    bad_words: Annotated[list[str] | None, or_empty(_bad_words)] = None
    allowed_token_ids: Annotated[list[int] | None, optional(_allowed_token_ids)] = None
    logit_bias: Annotated[dict[int, float] | None, optional(token_biases(MAX_MAGNITUDE))] = None
    structured_outputs: Annotated[
        "StructuredOutputsParams | None", optional(_structured_outputs)
    ] = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in VALIDATORS:
            value = VALIDATORS[name](name, value)
        elif type(self) is SamplingParams:  # a subclass may have more fields
            raise AttributeError(f"SamplingParams has no field {name!r}")
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Checks that the fields are consistent. Checks lists and dicts again too, because they
        may have been changed in place. Resets fields that greedy sampling ignores, as vLLM does.

        Raises:
            TypeError, ValueError: a value is invalid, or fields contradict each other.
        """
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias"):
            setattr(self, name, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are found in text: leave detokenize=True")
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n={self.n} greedy completions would be equal: raise temperature")

    def clone(self) -> "SamplingParams":
        """Returns a deep copy."""
        new = object.__new__(type(self))
        try:
            pairs = vars(self).items()
            vars(new).update((k, v if type(v) in IMMUTABLE else copy.deepcopy(v)) for k, v in pairs)
        except RecursionError:
            raise ValueError("a parameter is nested too deeply") from None
        return new

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

    @property
    def edits_logits(self) -> bool:
        """Whether a parameter forbids tokens, or changes their logits before sampling."""
        names = ("bad_words", "min_tokens", "logit_bias", "allowed_token_ids", "structured_outputs")
        return self.penalises or any(getattr(self, name) for name in names)


def __getattr__(name: str) -> Any:
    if name == "StructuredOutputsParams":  # vLLM has it here
        from nanovllm.structured_outputs import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# The attribute of msgspec.Struct, vLLM's base class. The package outlines uses it to copy objects.
SamplingParams.__struct_fields__ = tuple(f.name for f in fields(SamplingParams))  # type: ignore[attr-defined]
VALIDATORS = VLLM_VALIDATORS | validators_of(SamplingParams)
