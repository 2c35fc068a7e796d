"""Text of a completion while it grows. Used only where somebody has to see it before its end."""

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"  # what a tokenizer makes of bytes that are no whole character


class IncrementalDetokenizer:
    """Turns tokens into text as they come, whole characters only, and finds stop strings.

    A token's text depends on the tokens before it (spaces, characters in several tokens), so the
    last piece that came out whole is decoded again together with what follows it. Together the
    pieces are the text of all tokens decoded at once.

    Args:
        tokenizer: a transformers tokenizer.
        stop: strings to look for.
        keep_stop: leave the one found in the text.
        options: for the tokenizer's ``decode``.

    Attributes:
        text: what is known for certain.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        keep_stop: bool = False,
        **options: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.keep_stop = keep_stop
        self.options = options
        self.text = ""
        self._token_ids: list[int] = []
        self._piece_start = 0  # of the last piece that came out whole
        self._piece_end = 0

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Adds a token. Returns the stop string that it completes, having cut the text there."""
        self._token_ids.append(token_id)
        piece, both = self._decode_tail()
        if both.endswith(INCOMPLETE) or len(both) <= len(piece):
            return None
        self._piece_start, self._piece_end = self._piece_end, len(self._token_ids)
        return self._add(both[len(piece) :], may_stop)

    def finish(self, may_stop: bool = True) -> str | None:
        """Adds what is left, incomplete characters as U+FFFD; no token may follow."""
        piece, both = self._decode_tail()
        self._piece_start = self._piece_end = len(self._token_ids)
        return self._add(both[len(piece) :], may_stop)

    def stable_text(self) -> str:
        """The text without an end that may turn out to begin a stop string."""
        if self.keep_stop:
            return self.text
        longest = max(map(len, self.stop), default=1) - 1
        for start in range(max(0, len(self.text) - longest), len(self.text)):
            if any(stop.startswith(self.text[start:]) for stop in self.stop):
                return self.text[:start]
        return self.text

    def _decode_tail(self) -> tuple[str, str]:
        """Text of the last whole piece, and of that and all tokens after it."""
        tail = self._token_ids[self._piece_start :]
        length = self._piece_end - self._piece_start
        return self._decode(tail[:length]), self._decode(tail)

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False, **self.options)

    def _add(self, new: str, may_stop: bool) -> str | None:
        start = len(self.text)
        self.text += new
        found = find_stop(self.text, start, self.stop) if may_stop else None
        if found is None:
            return None
        end, stop = found
        self.text = self.text[: end if self.keep_stop else end - len(stop)]
        return stop


def find_stop(text: str, start: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string to be complete ends, at or after ``start``, and which it is.

    First complete, not first listed or first begun: so it does not matter how the text is cut
    into tokens. Of two that end together it is the longer one.
    """
    found = []
    for stop in stops:
        place = text.find(stop, max(0, start - len(stop) + 1))
        if place >= 0:
            found.append((place + len(stop), -len(stop), stop))
    if not found:
        return None
    end, _, stop = min(found)
    return end, stop
