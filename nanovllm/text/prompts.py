"""Checks and tokenizes prompts, and creates detokenizers."""

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import cache, cached_property, partial
from operator import countOf
from typing import Any, NotRequired, TypeAlias, TypedDict, TypeVar

import numpy as np

from nanovllm.checkpoints.checkpoint import Checkpoint, load_tokenizer
from nanovllm.config import MAX_INT32, Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import IncrementalDetokenizer
from nanovllm.text.token_text import TokenTexts
from nanovllm.utils.panics import as_value_error, is_failure


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids. ``prompt`` is the text to put into the output; it is not tokenized."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


T = TypeVar("T")
PORTION = 256  # prompts tokenized together
CHARS_PER_TOKEN = 16  # more than the average in any language
MAX_MESSAGES = 10  # a combined exception has the messages of the first 10 errors
# vLLM's cache_salt, which keeps prompts from sharing cached prefixes, is ignored.
PROMPT_KEYS = frozenset(("prompt", "prompt_token_ids", "cache_salt"))
UNSUPPORTED_KEYS = {
    "multi_modal_data": "images, audio and video",
    "multi_modal_uuids": "images, audio and video",
    "prompt_embeds": "embeddings as prompts",
    "encoder_prompt": "models with an encoder",
    "decoder_prompt": "models with an encoder",
}
Prompt: TypeAlias = str | Seq[int] | TextPrompt | TokensPrompt
Message: TypeAlias = dict[str, Any]  # of a conversation: {"role": ..., "content": ...}


def as_prompt_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """Returns a list of prompts. A single prompt (string, token ids, dict) becomes a list."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    items = as_list(prompts)
    if items is None:
        hint = ": use its 'input_ids', or chat" if hasattr(prompts, "input_ids") else ""
        raise TypeError(
            f"prompts must be a prompt or a list of them, got {_type_name(prompts)}{hint}"
        )
    return [items] if items and all(map(_is_int, items)) else items


def as_list(items: Any) -> list[Any] | None:
    """Returns the items of a sequence, which may also be an array, a tensor, or a column of a table
    (pandas, polars, datasets). None if it is not a sequence."""
    if isinstance(items, Seq):
        return None if isinstance(items, (str, bytes, bytearray, memoryview)) else list(items)
    convert = getattr(items, "tolist", None) or getattr(items, "to_list", None)
    found = convert() if callable(convert) and hasattr(items, "__len__") else None
    return found if isinstance(found, list) else None


class PromptEncoder:
    """Checks and tokenizes prompts, and creates the detokenizers of completions.

    Args:
        tokenizer: a transformers tokenizer; None allows only token ids as prompts.
        vocab_size: the model's vocabulary size. Token ids are in [0, vocab_size).
        max_len: the maximum number of tokens of a sequence. Texts that are clearly longer are
            refused without tokenizing all of them.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_len: int = MAX_INT32) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_len = max_len
        self._get_token_texts = cache(partial(TokenTexts, tokenizer))
        self._checks_text_ids = False
        if tokenizer is not None:
            # Some tokenizers have tokens for which the model has no embedding.
            self._checks_text_ids = max(tokenizer.get_vocab().values(), default=0) >= vocab_size

    def encode(
        self, prompts: Seq[Any], add_special_tokens: bool = True
    ) -> list[tuple[str | None, list[int]] | Exception]:
        """Checks and tokenizes prompts.

        Args:
            prompts: strings, token ids or dicts. Exceptions among them are passed through.
            add_special_tokens: whether the tokenizer adds its special tokens, such as BOS, to
                texts. It adds none to a text that starts with them.

        Returns:
            For each prompt its text (None if it is given as token ids) and its token ids, or a
            TypeError or ValueError if the prompt is invalid.
        """
        parsed = map_each(self._parse, prompts)
        texts = [item for item in parsed if isinstance(item, str)]
        encoded = iter(self._encode(texts, add_special_tokens))
        return [next(encoded) if isinstance(item, str) else item for item in parsed]

    def encode_texts(self, texts: Seq[Any]) -> list[TokensPrompt | Exception]:
        """Tokenizes texts without adding special tokens. Returns prompts with both text and token
        ids, and exceptions as ``encode`` does."""
        return map_valid(_with_tokens, self.encode(texts, add_special_tokens=False))

    def detokenizer(
        self, last_prompt_token: int, params: SamplingParams
    ) -> IncrementalDetokenizer | None:
        """Creates the detokenizer of a completion; None without a tokenizer or if ``detokenize`` is
        False."""
        if self.tokenizer is None or not params.detokenize:
            return None
        texts = self._get_token_texts(
            params.skip_special_tokens, params.spaces_between_special_tokens
        )
        return IncrementalDetokenizer(
            texts,
            [last_prompt_token] if texts.needs_context else [],
            list(params.stop or ()),
            params.include_stop_str_in_output,
        )

    def decode_logprob_tokens(
        self, context_token_ids: Seq[int], token_ids: Seq[int]
    ) -> list[str] | list[None]:
        """Returns the texts of the candidate tokens for one position: see
        ``TokenTexts.decode_after``. Without a tokenizer, all are None."""
        if self.tokenizer is None:
            return [None] * len(token_ids)
        texts = self._get_token_texts(False, True)
        return [texts.decode_after(context_token_ids, token_id) for token_id in token_ids]

    def _parse(self, prompt: Any) -> str | tuple[str | None, list[int]]:
        """Checks a prompt. Returns the text to tokenize or, for a prompt with token ids, a tuple of
        its text (None if it has none) and the ids."""
        if isinstance(prompt, (TypeError, ValueError)):
            raise prompt
        if isinstance(prompt, dict):
            given = {key: value for key, value in prompt.items() if value is not None}
            if unknown := given.keys() - PROMPT_KEYS:
                if unsupported := unknown & UNSUPPORTED_KEYS.keys():
                    key = min(unsupported)
                    raise ValueError(
                        f"vLLM's `{key}` is not supported here: {UNSUPPORTED_KEYS[key]}"
                    )
                raise ValueError(
                    f"a dict prompt has 'prompt' or 'prompt_token_ids', not {min(unknown)!r}: "
                    f"remove this key, or pass a list of the prompts alone"
                )
            text = given.get("prompt")
            if "prompt_token_ids" in given:
                if not isinstance(text, (str, type(None))):
                    raise TypeError(f"the prompt's text must be a string, got {_type_name(text)}")
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
                raise ValueError(f"the prompt is not valid Unicode: {error}") from None
            self._check_length(prompt)
            return prompt
        return None, self._check_ids(prompt)

    def _check_ids(self, ids: Any) -> list[int]:
        given, ids = ids, as_list(ids)
        if ids is None:
            raise TypeError(
                f"a prompt is a string, a list of token ids or a dict, not {_type_name(given)}"
            )
        if countOf(map(type, ids), int) == len(ids):  # a fast path in C, a dozen times as fast
            with suppress(OverflowError):  # an id is negative or far too large
                if np.asarray(array("I", ids)).max(initial=0) < self.vocab_size:
                    return ids
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
        self, texts: list[str], add_special_tokens: bool
    ) -> list[tuple[str | None, list[int]] | Exception]:
        """Tokenizes texts. If the tokenizer fails on a text, returns a ValueError for it."""
        try:
            encoded = [*zip(texts, self.tokenize(texts, add_special_tokens), strict=True)]
        except BaseException as error:  # the tokenizer's code may raise anything
            if not is_failure(error):
                raise
            if len(texts) > 1:
                return [item for text in texts for item in self._encode([text], add_special_tokens)]
            return [ValueError(f"the tokenizer failed: {type(error).__name__}: {error}")]
        return map_each(self._check_text_ids, encoded) if self._checks_text_ids else [*encoded]

    def _check_length(self, text: str) -> None:
        """Raises ValueError for a text that is far too long, because tokenizing all of it would
        take seconds and gigabytes.

        Tokenizes only the start of the text. The cut may split a long token, which may change the
        tokens before it too. So the text is refused only if its start has more than twice
        ``max_len`` tokens, and a margin for a long token."""
        size = CHARS_PER_TOKEN * self.max_len
        while size < len(text):
            with as_value_error("the tokenizer failed:"):
                start = self.tokenizer(text[:size], add_special_tokens=False)["input_ids"]
            if len(start) > 2 * self.max_len + self._longest_token:
                raise ValueError(
                    f"the prompt of {len(text)} characters has over {self.max_len} tokens, the "
                    f"maximum of a sequence: shorten it or raise max_model_len"
                )
            size *= 2

    @cached_property
    def _longest_token(self) -> int:
        """An upper bound of the characters in a token."""
        return max(map(len, self.tokenizer.get_vocab()), default=0)

    @cached_property
    def _added_texts(self) -> tuple[str, ...]:
        """The BOS token, and the special tokens that the tokenizer adds to a text, such as GLM's
        ``[gMASK]<sop>``. A text that starts with either already has its special tokens."""
        added = self.tokenizer.convert_ids_to_tokens(self.tokenizer("")["input_ids"])
        return tuple(filter(None, (self.tokenizer.bos_token, "".join(added))))

    def _check_text_ids(
        self, encoded: tuple[str | None, list[int]]
    ) -> tuple[str | None, list[int]]:
        """Returns its argument. Raises ValueError if the model has no embedding for a token."""
        if (largest := max(encoded[1], default=0)) >= self.vocab_size:
            raise ValueError(
                f"the text contains token id {largest} of the tokenizer, but the model's ids are 0 "
                f"to {self.vocab_size - 1}"
            )
        return encoded

    def tokenize(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Tokenizes texts. Special tokens are not added to texts that start with them, such as
        those from a chat template."""
        added = self._added_texts if texts and add_special_tokens else ()
        adds = [add_special_tokens and not text.startswith(added) for text in texts]
        out: dict[int, list[int]] = {}
        for add in (True, False):
            rows = [i for i, flag in enumerate(adds) if flag is add]
            if rows:
                batch = self.tokenizer([texts[i] for i in rows], add_special_tokens=add)
                out |= zip(rows, batch["input_ids"], strict=True)
        return [out[i] for i in range(len(texts))]


def load_encoder(config: Config, checkpoint: Checkpoint, max_model_len: int) -> PromptEncoder:
    """Loads the tokenizer, unless the config says not to, and creates the encoder."""
    tokenizer, other = None, config.tokenizer
    if not config.skip_tokenizer_init:
        tokenizer = load_tokenizer(other) if other else checkpoint.load_tokenizer()
    return PromptEncoder(tokenizer, checkpoint.config.vocab_size, max_model_len)


def map_each(function: Callable[[Any], T], items: Iterable[Any]) -> list[T | Exception]:
    """Applies ``function`` to each item. Returns the results; a TypeError or ValueError that it
    raises is the item's result."""
    results: list[T | Exception] = []
    for item in items:
        try:
            results.append(function(item))
        except (TypeError, ValueError) as error:
            results.append(error)
    return results


def map_valid(function: Callable[[list[Any]], Iterable[T]], items: Seq[Any]) -> list[T | Exception]:
    """Calls ``function`` once with the list of all items that are not exceptions. Returns its
    results in order, with the exceptions in their places."""
    results = iter(function([item for item in items if not isinstance(item, Exception)]))
    return [item if isinstance(item, Exception) else next(results) for item in items]


def raise_errors(items: Seq[T | Exception], name: str) -> list[T]:
    """Returns the items if none is an exception. Otherwise raises one exception with the indices of
    all exceptions and the messages of the first few. ``name`` is what the message calls the items,
    such as "prompts"."""
    errors = {i: item for i, item in enumerate(items) if isinstance(item, Exception)}
    if not errors:
        return [item for item in items if not isinstance(item, Exception)]
    kind = TypeError if all(isinstance(e, TypeError) for e in errors.values()) else ValueError
    lines = [f"{name}[{i}]: {error}" for i, error in list(errors.items())[:MAX_MESSAGES]]
    if len(errors) > 1:
        lines.insert(0, f"{len(errors)} of {len(items)} {name} are invalid, so none was run:")
    if more := list(errors)[MAX_MESSAGES:]:
        lines.append(f"and {name} {', '.join(map(str, more))}")
    raise kind("\n".join(lines)) from next(iter(errors.values()))


def _with_tokens(encoded: list[tuple[str, list[int]]]) -> list[TokensPrompt]:
    return [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in encoded]


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _type_name(value: Any) -> str:
    return type(value).__name__
