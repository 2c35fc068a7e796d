"""Texts of single tokens, as log-probabilities name them."""

from collections.abc import Sequence
from typing import Any

from nanovllm.text.detokenizer import INCOMPLETE, MAX_CHARACTER_TOKENS


class TokenTexts:
    """Decodes tokens one at a time, so that the texts of successive tokens add up to their text.

    Args:
        tokenizer: a transformers tokenizer.
        anchor: token ids to decode before a token, for tokenizers that drop a space at the start
            of a text; empty for the others.
    """

    def __init__(self, tokenizer: Any, anchor: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._anchor = list(anchor)
        self._anchor_length = len(self._decode(self._anchor))
        self._alone: dict[int, str] = {}  # texts of single tokens without context

    def decode(self, context_token_ids: Sequence[int], token_ids: Sequence[int]) -> list[str]:
        """Texts of the candidates for one position. A token that ends within a character has no
        text; the token that completes the character has all of it.

        Args:
            context_token_ids: the tokens before the position. Only those that may belong to the
                same character matter: the last MAX_CHARACTER_TOKENS.
            token_ids: the candidates.
        """
        return [self._decode_in(context_token_ids, token_id) for token_id in token_ids]

    def _decode_in(self, context: Sequence[int], token_id: int) -> str:
        text = self._decode_alone(token_id)
        token_ids = [token_id]
        for previous in reversed(context[-MAX_CHARACTER_TOKENS:]):
            if not (
                text.endswith(INCOMPLETE) and self._decode_alone(previous).endswith(INCOMPLETE)
            ):
                break
            token_ids.insert(0, previous)
            text = self._decode_after_anchor(token_ids)
        return "" if text.endswith(INCOMPLETE) else text

    def _decode_alone(self, token_id: int) -> str:
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self._decode_after_anchor([token_id])
        return text

    def _decode_after_anchor(self, token_ids: list[int]) -> str:
        return self._decode(self._anchor + token_ids)[self._anchor_length :]

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
