"""Text of a completion as it grows: whole characters only, and stop strings."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from nanovllm.text.token_text import INCOMPLETE, MAX_CHARACTER_TOKENS, TokenTexts

MAX_PENDING_TOKENS = 16
ANY_TOKEN: Mapping[int, bool] = defaultdict(lambda: True)


class IncrementalDetokenizer:
    """Turns tokens into text as they come, and finds stop strings.

    Most tokens have a text that is known. Others are parts of characters, or belong to a tokenizer
    whose tokens do not add up: they are decoded together with those before them, as far back as the
    last that came out whole.

    Args:
        texts: the tokenizer's.
        context: tokens before the completion that its first ones depend on.
        stop: strings to look for.
        keep_stop: leave the one found in the text.

    Attributes:
        num_tokens: how many tokens it has got.
    """

    def __init__(
        self,
        texts: TokenTexts,
        context: Sequence[int] = (),
        stop: Sequence[str] = (),
        keep_stop: bool = False,
    ) -> None:
        self.stop = stop
        self.keep_stop = keep_stop
        self.num_tokens = 0
        self._texts = texts
        self._last_characters = frozenset(string[-1] for string in stop)
        self._ending_tokens = texts.ends_with(self._last_characters) if stop else None
        self._longest_start = max(map(len, stop), default=1) - 1
        self._known = [""]  # the text in pieces
        # Tokens to decode before the pending ones; None for any whole ones.
        self._piece = None if texts.add_up and not texts.needs_context else list(context)
        self._pending: list[int] = []
        self._is_whole = self._piece is None  # the next token may have its own text

    @property
    def text(self) -> str:
        """What is known for certain. Bytes that end the completion in the middle of a character are
        left out."""
        if len(self._known) > 1:
            self._known = ["".join(self._known)]
        return self._known[0]

    @property
    def ending_tokens(self) -> Mapping[int, bool] | None:
        """Whether the next token, by its id, may complete a stop string, so that it has to be the
        last that ``extend`` gets; None if there is nothing to look for."""
        return self._ending_tokens if self._is_whole or not self.stop else ANY_TOKEN

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Adds a token. Returns the stop string that it completes, having cut the text there."""
        self.num_tokens += 1
        if not self._is_whole or INCOMPLETE in (new := self._texts[token_id]):
            new = self._append_part(token_id)
        return self._add(new, may_stop)

    def extend(self, token_ids: list[int], may_stop: bool = True) -> str | None:
        """Adds tokens of which only the last may complete a stop string, and returns that, having
        cut the text there."""
        if not token_ids:
            return None
        *others, last = token_ids
        if self._is_whole:
            new = "".join(map(self._texts.__getitem__, others))
            if INCOMPLETE not in new:
                self._known.append(new)
                self.num_tokens += len(others)
                others = []
        for token_id in others:
            self.append(token_id, may_stop=False)
        return self.append(last, may_stop)

    def finish(self, may_stop: bool = True) -> str | None:
        """Adds what is left but for an incomplete character; no token may follow."""
        new = self._decode_pending().rstrip(INCOMPLETE) if self._pending else ""
        self._pending = []
        return self._add(new, may_stop)

    def stable_text(self) -> str:
        """The text without an end that may turn out to begin a stop string."""
        text = self.text
        if self.keep_stop:
            return text
        for start in range(max(0, len(text) - self._longest_start), len(text)):
            if any(stop.startswith(text[start:]) for stop in self.stop):
                return text[:start]
        return text

    def _append_part(self, token_id: int) -> str:
        """Decodes the pending tokens with one more; returns "" while they may change their text."""
        if token_id in self._texts.skipped:
            return ""
        self._pending.append(token_id)
        self._is_whole = False
        new = self._decode_pending()
        if new and not new.endswith(INCOMPLETE):
            self._pass(self._pending, [])
        elif len(self._pending) > MAX_PENDING_TOKENS:
            new = self._give_up_start(new)
        else:
            return ""
        return new

    def _give_up_start(self, text: str) -> str:
        """Takes all but the last few pending tokens for what they are, no characters or no text
        at all, and cuts where that changes nothing. Keeps the work per token bounded."""
        decode = self._texts.decode
        for cut in range(len(self._pending) - MAX_CHARACTER_TOKENS, 0, -1):
            start, end = self._pending[:cut], self._pending[cut:]
            if text.endswith(rest := decode(end)):
                new = text[: len(text) - len(rest)]
                if decode(start) in (new, new.lstrip()):
                    self._pass(start, end)
                    return new
        return ""

    def _pass(self, token_ids: list[int], pending: list[int]) -> None:
        """Notes that the text of pending tokens is known."""
        self._piece = None if self._texts.add_up else token_ids
        self._pending = pending
        self._is_whole = self._piece is None and not pending

    def _decode_pending(self) -> str:
        """What the pending tokens add to those before them."""
        if self._piece is None:
            return self._texts.decode_within(tuple(self._pending))
        decode = self._texts.decode
        piece, both = decode(self._piece), decode(self._piece + self._pending)
        # Bytes that are no character can spoil those before them, for some tokenizers.
        return both[len(piece) :] if both.startswith(piece) else decode(self._pending)

    def _add(self, new: str, may_stop: bool) -> str | None:
        if new:
            self._known.append(new)
        # No stop string ends here without its last character.
        if self._last_characters.isdisjoint(new) or not may_stop:
            return None
        first, size = len(self._known) - 1, 0
        while first and size < self._longest_start:
            first -= 1
            size += len(self._known[first])
        end = "".join(self._known[first:])
        found = find_stop(end, len(end) - len(new), self.stop)
        if found is None:
            return None
        place, stop = found
        self._known[first:] = [end[: place if self.keep_stop else place - len(stop)]]
        return stop


def find_stop(text: str, start: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string to be complete ends, after ``start``, and which it is.

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
