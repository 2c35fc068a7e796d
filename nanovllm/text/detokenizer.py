"""Text of a completion, token by token: whole characters only, and stop strings."""

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"  # what a tokenizer makes of bytes that are no whole character
MAX_CHARACTER_TOKENS = 3  # what may still become a character: it has at most 4 bytes
MAX_PENDING_TOKENS = 16


class IncrementalDetokenizer:
    """Turns tokens into text as they come, and finds stop strings.

    A token's text depends on the tokens before it (spaces, characters in several tokens), so the
    last piece that came out whole is decoded again together with what follows it.

    Args:
        tokenizer: a transformers tokenizer.
        context: tokens before the completion that its first ones depend on.
        skipped: tokens that have no text.
        stop: strings to look for.
        keep_stop: leave the one found in the text.
        options: for the tokenizer's ``decode``.

    Attributes:
        text: what is known for certain. Bytes that end the completion in the middle of a
            character are left out.
    """

    def __init__(
        self,
        tokenizer: Any,
        context: Sequence[int] = (),
        skipped: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        keep_stop: bool = False,
        **options: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.skipped = skipped
        self.stop = stop
        self.keep_stop = keep_stop
        self.options = options
        self.text = ""
        self._piece = list(context)  # the last one that came out whole
        self._pending: list[int] = []

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Adds a token. Returns the stop string that it completes, having cut the text there."""
        if token_id in self.skipped:
            return None
        self._pending.append(token_id)
        new = self._decode_pending()
        if new and not new.endswith(INCOMPLETE):
            self._piece, self._pending = self._pending, []
        elif len(self._pending) > MAX_PENDING_TOKENS:
            new = self._give_up_start(new)
        else:
            return None
        return self._add(new, may_stop)

    def finish(self, may_stop: bool = True) -> str | None:
        """Adds what is left but for an incomplete character; no token may follow."""
        new = self._decode_pending().rstrip(INCOMPLETE)
        self._pending = []
        return self._add(new, may_stop)

    def stable_text(self) -> str:
        """The text without an end that may turn out to begin a stop string."""
        if self.keep_stop:
            return self.text
        longest = max(map(len, self.stop), default=1) - 1
        for start in range(max(0, len(self.text) - longest), len(self.text)):
            if any(stop.startswith(self.text[start:]) for stop in self.stop):
                return self.text[:start]
        return self.text

    def _give_up_start(self, text: str) -> str:
        """Takes all but the last few pending tokens for what they are, no characters or no text
        at all, and cuts where that changes nothing. Keeps the work per token bounded."""
        for cut in range(len(self._pending) - MAX_CHARACTER_TOKENS, 0, -1):
            start, end = self._pending[:cut], self._pending[cut:]
            if text.endswith(rest := self._decode(end)):
                new = text[: len(text) - len(rest)]
                if self._decode(start) in (new, new.lstrip()):
                    self._piece, self._pending = start, end
                    return new
        return ""

    def _decode_pending(self) -> str:
        """What the pending tokens add to the last piece."""
        piece, both = self._decode(self._piece), self._decode(self._piece + self._pending)
        # Bytes that are no character can spoil those before them, for some tokenizers.
        return both[len(piece) :] if both.startswith(piece) else self._decode(self._pending)

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
