"""Texts of single tokens, for log-probabilities and for fast detokenization."""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from nanovllm.checkpoints.tokenizer_growth import nested_steps
from nanovllm.utils.panics import is_failure

REPLACEMENT_CHAR = "\ufffd"  # tokenizers decode bytes of an incomplete character to this
MAX_PARTIAL_TOKENS = 3  # tokens of an incomplete character: a character has at most 4 bytes
# Decoders of the tokenizers library that treat the first token of a text differently.
START_DECODERS = {"Metaspace", "Strip", "WordPiece"}
# Decoders that map each token on its own, apart from the first.
TOKEN_DECODERS = START_DECODERS | {"ByteFallback", "Replace"}
# Decoders that join all tokens into one text.
JOINING_DECODERS = {"ByteLevel", "Fuse"}
CHARACTER_CACHE_SIZE = 1 << 14  # texts of characters that take several tokens
STOPS_CACHE_SIZE = 64  # sets of stop strings


class TokenTexts(dict[int, str]):
    """Maps each token id to the text that the token has after other tokens. A token is decoded when
    its text is first needed.

    REPLACEMENT_CHAR in the text of a token means that the token holds part of a character, which
    the tokens before or after it complete.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens, spaces_between_special_tokens: options of its ``decode``.

    Attributes:
        needs_context: whether tokens at the start of a text decode differently. SentencePiece
            tokenizers, for example, drop a leading space there.
        concatenates: whether the text of several tokens is the concatenation of their texts, as
            long as no text contains REPLACEMENT_CHAR.
        skipped_ids: the special tokens that decode to no text.
        decode: decodes a list of token ids at the start of a text.
        decode_within: decodes a tuple of token ids that follow whole characters.
        stop_candidates: returns the StopCandidates for a frozenset of last characters.
    """

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        super().__init__()
        self.decode, steps = _decoder_of(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        added = tokenizer.added_tokens_decoder.items() if skip_special_tokens else ()
        self.skipped_ids = frozenset(i for i, token in added if token.special)
        ids = tokenizer(" a", add_special_tokens=False)["input_ids"]
        once, twice = tokenizer.decode(ids), tokenizer.decode(ids + ids)
        has_start_decoder = not START_DECODERS.isdisjoint(step["type"] for step in steps)
        self.needs_context = has_start_decoder or once + once != twice
        # A token to decode before others, so that these are not at the start of the text.
        self._anchor = ids[-1:] if self.needs_context else []
        self._anchor_length = len(self.decode(self._anchor))
        self.concatenates = _concatenates(steps) and (
            not self.needs_context or self._anchor_length > 0
        )
        self.decode_within = lru_cache(CHARACTER_CACHE_SIZE)(self._decode_within)
        self.stop_candidates = lru_cache(STOPS_CACHE_SIZE)(partial(StopCandidates, self))

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._decode_within((token_id,))
        return text

    def decode_after(self, context: Sequence[int], token_id: int) -> str:
        """Returns the text that a token adds to the tokens before it.

        A token that ends within a character has the text "", and the token that completes the
        character has the whole character. So the texts of successive tokens concatenate.

        Args:
            context: the tokens before it. Only the last MAX_PARTIAL_TOKENS, which may belong to the
                same character, are used.
            token_id: the token.
        """
        text = self[token_id]
        token_ids: tuple[int, ...] = (token_id,)
        for previous in reversed(context[-MAX_PARTIAL_TOKENS:]):
            if not (text.endswith(REPLACEMENT_CHAR) and self[previous].endswith(REPLACEMENT_CHAR)):
                break
            token_ids = (previous, *token_ids)
            text = self.decode_within(token_ids)
        return "" if text.endswith(REPLACEMENT_CHAR) else text

    def _decode_within(self, token_ids: tuple[int, ...]) -> str:
        return self.decode([*self._anchor, *token_ids])[self._anchor_length :]


class StopCandidates(dict[int, bool]):
    """Maps each token id to whether that token, after whole characters, may complete a stop string.

    A token may complete a stop string if its text contains the last character of one, or if it
    holds part of a character.

    Args:
        texts: the texts of the tokenizer's tokens.
        last_characters: the last characters of the stop strings.
    """

    def __init__(self, texts: TokenTexts, last_characters: frozenset[str]) -> None:
        super().__init__({-1: False})  # -1 stands for no token
        self._texts = texts
        self._last_characters = last_characters | {REPLACEMENT_CHAR}

    def __missing__(self, token_id: int) -> bool:
        try:
            may = not self._last_characters.isdisjoint(self._texts[token_id])
        except BaseException as error:  # the tokenizer's code may raise anything
            if not is_failure(error):
                raise
            return True  # the caller then decodes the token and handles the error
        self[token_id] = may
        return may


def _decoder_of(
    tokenizer: Any, **options: bool
) -> tuple[Callable[[list[int]], str], list[dict[str, Any]]]:
    """Returns a tokenizer's ``decode`` and its decoder steps in the tokenizers library's format.

    A fast tokenizer is called without its transformers wrapper, in a fifth of the time. A tokenizer
    that overrides ``decode`` has no known steps."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if issubclass(kind, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode):
        backend, skip = tokenizer.backend_tokenizer, options["skip_special_tokens"]
        return lambda token_ids: backend.decode(token_ids, skip), decoder_steps(backend)
    return lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False, **options), []


def decoder_steps(backend: Any) -> list[dict[str, Any]]:
    """Returns the steps of a ``tokenizers.Tokenizer``'s decoder, as in its tokenizer.json."""
    if backend.decoder is None:
        return []
    steps = nested_steps(json.loads(backend.decoder.__getstate__()))
    return [step for step in steps if step["type"] != "Sequence"]


def _concatenates(decoders: list[dict[str, Any]]) -> bool:
    """Returns whether the text of each token after the first is independent of the other tokens,
    except for tokens with parts of one character."""
    steps = iter(decoders)
    for step in steps:
        if step["type"] in JOINING_DECODERS:
            # Later steps see the whole text.
            return all(later["type"] == "Strip" and not later["stop"] for later in steps)
        if step["type"] not in TOKEN_DECODERS:
            return False
    return bool(decoders)
