"""Prompts in, text out: the tokenizer's side of the engine, in batches off the hot loop."""

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import cached_property, partial
from operator import countOf
from typing import Any, NotRequired, TypeAlias, TypedDict, TypeVar

import numpy as np

from nanovllm.checkpoints.checkpoint import Checkpoint, load_tokenizer
from nanovllm.config import MAX_INT32, Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import IncrementalDetokenizer
from nanovllm.text.token_text import TokenTexts
from nanovllm.utils.panics import is_failure


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, and its text where it should be in the result."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


T = TypeVar("T")
CHARS_PER_TOKEN = 16  # more than any language's text has
NAMED_ERRORS = 10  # with their messages, in one exception
# vLLM's cache_salt keeps prompts from sharing cached prefixes; it changes no result.
PROMPT_KEYS = frozenset(("prompt", "prompt_token_ids", "cache_salt"))
Prompt: TypeAlias = str | Seq[int] | TextPrompt | TokensPrompt


def as_prompt_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """Several prompts as they are; a lone one (string, token ids, dict) in a list."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts must be a prompt or a list of them, got {_name(prompts)}")
    if prompts and all(_is_int(item) for item in prompts):
        return [prompts]
    return list(prompts)


class PromptEncoder:
    """Checks and tokenises prompts, and makes the detokenizers of completions.

    Args:
        tokenizer: a transformers tokenizer; None allows token ids only.
        vocab_size: token ids are in [0, vocab_size).
        max_len: most tokens of a sequence; longer texts may be refused before they are tokenised.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_len: int = MAX_INT32) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_len = max_len
        self._texts: dict[tuple[bool, bool], TokenTexts] = {}  # by the options of ``decode``
        self.has_foreign_ids = False
        if tokenizer is not None:
            # Some tokenizers have tokens that the model has no embedding for.
            self.has_foreign_ids = max(tokenizer.get_vocab().values(), default=0) >= vocab_size

    def encode(
        self, prompts: Seq[Any], add_special_tokens: bool = True
    ) -> list[tuple[str | None, list[int]] | Exception]:
        """The text (None if it came as token ids) and the token ids of each prompt. A BOS, if the
        tokenizer has one, comes before texts that do not start with it, unless they have all their
        special tokens already.

        A bad prompt gives the TypeError or ValueError that says what is wrong with it; a prompt
        that is an exception already stays one.
        """
        read = map_each(self._read, prompts)
        return map_good(lambda good: self._encode(good, add_special_tokens), read)

    def detokenizer(
        self, last_prompt_token: int, params: SamplingParams
    ) -> IncrementalDetokenizer | None:
        """For a completion's text; None if there is none."""
        if self.tokenizer is None or not params.detokenize:
            return None
        texts = self._texts_of(params.skip_special_tokens, params.spaces_between_special_tokens)
        return IncrementalDetokenizer(
            texts,
            [last_prompt_token] if texts.needs_context else [],
            params.stop_strings,
            params.include_stop_str_in_output,
        )

    def decode_logprob_tokens(
        self, context_token_ids: Seq[int], token_ids: Seq[int]
    ) -> list[str] | list[None]:
        """Texts of the candidates for one position, as in ``TokenTexts.decode_candidates``; None
        for each where there is no tokenizer."""
        if self.tokenizer is None:
            return [None] * len(token_ids)
        return self._texts_of(False, True).decode_candidates(context_token_ids, token_ids)

    def _texts_of(self, skips_special: bool, spaces_special: bool) -> TokenTexts:
        options = skips_special, spaces_special
        if options not in self._texts:
            self._texts[options] = TokenTexts(self.tokenizer, *options)
        return self._texts[options]

    def _read(self, prompt: Any) -> tuple[str | None, list[int] | None]:
        """The text, if there is one, and the token ids, if they need no tokenising."""
        if isinstance(prompt, (TypeError, ValueError)):
            raise prompt
        if isinstance(prompt, dict):
            given = {key: value for key, value in prompt.items() if value is not None}
            if unknown := given.keys() - PROMPT_KEYS:
                raise ValueError(
                    f"a dict prompt has 'prompt' or 'prompt_token_ids', not {min(unknown)!r}"
                )
            text = given.get("prompt")
            if "prompt_token_ids" in given:
                if not isinstance(text, (str, type(None))):
                    raise TypeError(f"the prompt's text must be a string, got {_name(text)}")
                return text, self._check_ids(given["prompt_token_ids"])
            if text is None:
                raise ValueError("a dict prompt needs 'prompt_token_ids' or 'prompt'")
            prompt = text
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer: give the prompt as token ids")
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"the prompt is no valid Unicode: {error}") from None
            return prompt, None
        return None, self._check_ids(prompt)

    def _check_ids(self, ids: Any) -> list[int]:
        if not isinstance(ids, (list, tuple)):
            raise TypeError(
                f"a prompt is a string, a list of token ids or a dict, not {_name(ids)}"
            )
        if countOf(map(type, ids), int) == len(ids):  # in C: a dozen times as fast
            with suppress(OverflowError):  # of an id below 0 or far too large
                if np.asarray(array("I", ids)).max(initial=0) < self.vocab_size:
                    return list(ids)
        for token_id in ids:
            if not _is_int(token_id):
                raise TypeError(f"token ids must be ints, got {token_id!r}")
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"token id {token_id} is outside the vocabulary: ids are 0 to "
                    f"{self.vocab_size - 1}"
                )
        return [int(token_id) for token_id in ids]

    def _encode(
        self, read: list[tuple[str | None, list[int] | None]], add_special_tokens: bool
    ) -> list[tuple[str | None, list[int]] | Exception]:
        """One that the tokenizer fails on becomes an error."""
        try:
            if any(text and len(text) > CHARS_PER_TOKEN * self.max_len for text, _ in read):
                checked = map_each(self._check_length, read)
                return map_good(partial(self._tokenize_read, add=add_special_tokens), checked)
            return self._tokenize_read(read, add_special_tokens)
        except BaseException as error:  # whatever the tokenizer's code runs into
            if not is_failure(error):
                raise
            if len(read) > 1:
                return [item for one in read for item in self._encode([one], add_special_tokens)]
            return [ValueError(f"no tokens: {type(error).__name__}: {error}")]

    def _tokenize_read(
        self, read: list[tuple[str | None, list[int] | None]], add: bool
    ) -> list[tuple[str | None, list[int]] | Exception]:
        token_ids = iter(self.tokenize([text or "" for text, ids in read if ids is None], add))
        encoded = ((text, next(token_ids) if ids is None else ids) for text, ids in read)
        return map_each(self._check_rows, encoded) if self.has_foreign_ids else [*encoded]

    def _check_length(
        self, read: tuple[str | None, list[int] | None]
    ) -> tuple[str | None, list[int] | None]:
        """Raises ValueError for a text that begins with more tokens than a sequence may have: a
        part of it shows that, where all of it would take seconds and gigabytes. Many more, as the
        cut may lie within a long token, and make others of those before it."""
        text, ids = read
        size = CHARS_PER_TOKEN * self.max_len
        while ids is None and text is not None and size < len(text):
            begin = self.tokenizer(text[:size], add_special_tokens=False)["input_ids"]
            if len(begin) > 2 * self.max_len + self._longest_token:
                raise ValueError(
                    f"the prompt of {len(text)} characters has over {self.max_len} tokens, the "
                    f"most of any sequence: shorten it or raise max_model_len"
                )
            size *= 2
        return read

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token, or more."""
        return max(map(len, self.tokenizer.get_vocab()), default=0)

    def _check_rows(self, encoded: tuple[str | None, list[int]]) -> tuple[str | None, list[int]]:
        """Raises ValueError for a text with a token that the model has no embedding for."""
        if (largest := max(encoded[1], default=0)) >= self.vocab_size:
            raise ValueError(
                f"the tokenizer makes token id {largest} of this text, but the model's ids are 0 "
                f"to {self.vocab_size - 1}"
            )
        return encoded

    def tokenize(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of texts: one batch for those that need the tokenizer's BOS, one for those
        (from a chat template) that spell it out already."""
        bos = self.tokenizer.bos_token if texts else None
        adds = [add_special_tokens and not (bos and text.startswith(bos)) for text in texts]
        out: list[list[int]] = [[]] * len(texts)
        for add in (True, False):
            rows = [i for i, flag in enumerate(adds) if flag is add]
            if rows:
                batch = self.tokenizer([texts[i] for i in rows], add_special_tokens=add)
                for i, ids in zip(rows, batch["input_ids"], strict=True):
                    out[i] = ids
        return out


def load_encoder(config: Config, checkpoint: Checkpoint, max_model_len: int) -> PromptEncoder:
    """Loads the tokenizer that a model is to have, if any."""
    tokenizer, other = None, config.tokenizer
    if not config.skip_tokenizer_init:
        tokenizer = load_tokenizer(other) if other else checkpoint.load_tokenizer()
    return PromptEncoder(tokenizer, checkpoint.config.vocab_size, max_model_len)


def map_each(function: Callable[[Any], T], items: Iterable[Any]) -> list[T | Exception]:
    """``function`` of each item, or the TypeError or ValueError that it raises."""
    results: list[T | Exception] = []
    for item in items:
        try:
            results.append(function(item))
        except (TypeError, ValueError) as error:
            results.append(error)
    return results


def map_good(function: Callable[[list[Any]], Iterable[T]], items: Seq[Any]) -> list[T | Exception]:
    """``function`` of all items together that are no exceptions; the others as they are."""
    results = iter(function([item for item in items if not isinstance(item, Exception)]))
    return [item if isinstance(item, Exception) else next(results) for item in items]


def raise_errors(items: Seq[T | Exception], what: str) -> list[T]:
    """The items if none is an exception; otherwise raises one that names all of those by index,
    and what is wrong with the first few."""
    errors = {i: item for i, item in enumerate(items) if isinstance(item, Exception)}
    if not errors:
        return [item for item in items if not isinstance(item, Exception)]
    kind = TypeError if all(isinstance(e, TypeError) for e in errors.values()) else ValueError
    lines = [f"{what}[{i}]: {error}" for i, error in list(errors.items())[:NAMED_ERRORS]]
    if len(errors) > 1:
        lines.insert(0, f"{len(errors)} of {len(items)} {what} cannot run, so none has:")
    if more := list(errors)[NAMED_ERRORS:]:
        lines.append(f"and {what} {', '.join(map(str, more))}")
    raise kind("\n".join(lines)) from next(iter(errors.values()))


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _name(value: Any) -> str:
    return type(value).__name__
