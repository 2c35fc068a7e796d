"""Texts of single tokens: what log-probabilities name, and what longer texts are made of."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from nanovllm.utils.panics import is_failure

INCOMPLETE = "\ufffd"  # what a tokenizer makes of bytes that are no whole character
MAX_CHARACTER_TOKENS = 3  # what may still become a character: it has at most 4 bytes
# The tokenizers library's decoders: those that treat the first token of a text apart, those that
# treat each of the others alike, and those after which there is but one.
START_DECODERS = {"Metaspace", "Strip", "WordPiece"}
TOKEN_DECODERS = START_DECODERS | {"ByteFallback", "Replace"}
JOINING_DECODERS = {"ByteLevel", "Fuse"}
FALLBACK_BYTE = re.compile("<0x[0-9a-fA-F]{2}>")  # what ByteFallback makes a byte of
NUM_CHARACTERS = 1 << 14  # of several tokens, whose texts are remembered
NUM_STOPS = 64  # sets of stop strings, of which it is remembered what tokens complete them


class TokenTexts(dict[int, str]):
    """Texts of tokens that stand within a text, by token id; each is decoded at its first use.

    A text that contains INCOMPLETE belongs to a token with a part of a character, which only the
    tokens around it complete.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens, spaces_between_special_tokens: options of its ``decode``.

    Attributes:
        needs_context: a token's text at the start of a text differs from its text within one, as in
            SentencePiece's family, which drops a space there.
        add_up: tokens have the text of each, one after the other, where none is INCOMPLETE.
        skipped: special tokens that have no text.
        decode: the text of token ids that stand at the start of a text.
        decode_within: the text of a tuple of token ids that follow whole characters.
        ends_with: the EndingTokens of a set of characters.
    """

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        super().__init__()
        self.decode, steps = _open(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        added = tokenizer.added_tokens_decoder.items() if skip_special_tokens else ()
        self.skipped = frozenset(i for i, token in added if token.special)
        ids = tokenizer(" a", add_special_tokens=False)["input_ids"]
        once, twice = tokenizer.decode(ids), tokenizer.decode(ids + ids)
        starts_apart = not START_DECODERS.isdisjoint(step["type"] for step in steps)
        self.needs_context = starts_apart or once + once != twice
        self._anchor = ids[-1:] if self.needs_context else []
        self._anchor_length = len(self.decode(self._anchor))
        self.add_up = _adds_up(steps, tokenizer) and (
            not self.needs_context or self._anchor_length > 0
        )
        self.decode_within = lru_cache(NUM_CHARACTERS)(self._decode_within)
        self.ends_with = lru_cache(NUM_STOPS)(partial(EndingTokens, self))

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._decode_within((token_id,))
        return text

    def decode_candidates(
        self, context_token_ids: Sequence[int], token_ids: Sequence[int]
    ) -> list[str]:
        """Texts of the candidates for one position, such that the texts of successive tokens add up
        to their text. A token that ends within a character has no text; the token that completes
        the character has all of it.

        Args:
            context_token_ids: the tokens before the position. Only those that may belong to the
                same character matter: the last MAX_CHARACTER_TOKENS.
            token_ids: the candidates.
        """
        return [self._decode_in(context_token_ids, token_id) for token_id in token_ids]

    def _decode_within(self, token_ids: tuple[int, ...]) -> str:
        return self.decode([*self._anchor, *token_ids])[self._anchor_length :]

    def _decode_in(self, context: Sequence[int], token_id: int) -> str:
        text = self[token_id]
        token_ids: tuple[int, ...] = (token_id,)
        for previous in reversed(context[-MAX_CHARACTER_TOKENS:]):
            if not (text.endswith(INCOMPLETE) and self[previous].endswith(INCOMPLETE)):
                break
            token_ids = (previous, *token_ids)
            text = self.decode_within(token_ids)
        return "" if text.endswith(INCOMPLETE) else text


class EndingTokens(dict[int, bool]):
    """Whether a token after whole characters, by its id, may complete a string that ends with one
    of some characters, or is a part of a character."""

    def __init__(self, texts: TokenTexts, last_characters: frozenset[str]) -> None:
        super().__init__({-1: False})  # no token
        self._texts = texts
        self._last_characters = last_characters | {INCOMPLETE}

    def __missing__(self, token_id: int) -> bool:
        try:
            may = not self._last_characters.isdisjoint(self._texts[token_id])
        except BaseException as error:  # whatever the tokenizer's code runs into
            if not is_failure(error):
                raise
            return True  # whoever looks will run into it
        self[token_id] = may
        return may


def _open(
    tokenizer: Any, **options: bool
) -> tuple[Callable[[list[int]], str], list[dict[str, Any]]]:
    """``decode`` of a transformers tokenizer, and the tokenizers library's decoders that make it
    up; none if there is more to it. That library takes a fifth of the time without its wrapper."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if issubclass(kind, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode):
        backend, skip = tokenizer.backend_tokenizer, options["skip_special_tokens"]
        decoder = backend.decoder
        steps = [] if decoder is None else [*_flatten(json.loads(decoder.__getstate__()))]
        return lambda token_ids: backend.decode(token_ids, skip), steps
    return lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False, **options), []


def _flatten(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _flatten(step)
    else:
        yield decoder


def _adds_up(decoders: list[dict[str, Any]], tokenizer: Any) -> bool:
    """Whether each token after the first has a text that does not depend on the others, unless they
    are parts of one character."""
    steps = iter(decoders)
    for step in steps:
        if step["type"] in JOINING_DECODERS:
            break
        if step["type"] not in TOKEN_DECODERS:
            return False
    else:
        return bool(decoders)
    # What comes next sees the whole text. transformers before 5.23 puts a ByteLevel last for GGUF.
    after = [other for other in steps if other["type"] != "Strip" or other["stop"]]
    types = [step["type"], *(other["type"] for other in after)]
    return not after or (
        types in (["Fuse", "Replace", "ByteLevel"], ["Fuse", "ByteLevel"])
        and _is_byte_level(tokenizer, after)
    )


def _is_byte_level(tokenizer: Any, after: list[dict[str, Any]]) -> bool:
    """Whether a ByteLevel decoder maps the characters of every token of a vocabulary to a byte each
    (one that it does not know makes it pass the whole text as it is), and other decoders change
    none of them."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = tokenizer.get_vocab()
    characters = set().union(*vocabulary)
    patterns = [step["pattern"].get("String") for step in after if step["type"] == "Replace"]
    return (
        characters <= set(ByteLevel.alphabet())
        and all(pattern and not characters.issuperset(pattern) for pattern in patterns)
        and not any(FALLBACK_BYTE.fullmatch(token) for token in vocabulary)
    )
