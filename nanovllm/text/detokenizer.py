"""Incremental detokenization: decodes a completion token by token, and finds stop strings."""

from collections.abc import Mapping, Sequence

from nanovllm.text.token_text import MAX_PARTIAL_TOKENS, REPLACEMENT_CHAR, TokenTexts

MAX_PENDING_TOKENS = 16


class EveryToken(dict[int, bool]):
    """Maps any token id to True, and stores none."""

    def __missing__(self, token_id: int) -> bool:
        return True


EVERY_TOKEN: Mapping[int, bool] = EveryToken()


class IncrementalDetokenizer:
    """Detokenizes a completion token by token, and looks for stop strings.

    The text of most tokens is looked up in a table. Other tokens become pending: those that hold
    part of a character, and all tokens of a tokenizer whose token texts do not concatenate. Pending
    tokens are decoded together, until later tokens can no longer change their text. If their text
    depends on the tokens before them, some of these are decoded with them, as a prefix.

    Args:
        texts: the texts of the tokenizer's tokens.
        context: the prompt tokens that the text of the first tokens depends on.
        stop: the stop strings.
        keep_stop: whether the text keeps the stop string that is found.

    Attributes:
        num_tokens: the number of tokens added so far.
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
        self._stop_candidates = texts.stop_candidates(self._last_characters) if stop else None
        self._max_overlap = max(map(len, stop), default=1) - 1
        self._chunks = [""]  # concatenated, they are the text
        # The tokens to decode before the pending ones; None if the text does not depend on them.
        self._prefix = None if texts.concatenates and not texts.needs_context else list(context)
        self._pending: list[int] = []
        self._at_boundary = self._prefix is None  # the next token's text can be looked up

    @property
    def text(self) -> str:
        """The text that later tokens cannot change, without an incomplete character at the end."""
        if len(self._chunks) > 1:
            self._chunks = ["".join(self._chunks)]
        return self._chunks[0]

    @property
    def stop_candidates(self) -> Mapping[int, bool] | None:
        """Maps each token id to whether that token, if it comes next, may complete a stop string.
        Such a token must be the last in a call of ``extend``. None without stop strings."""
        return self._stop_candidates if self._at_boundary or not self.stop else EVERY_TOKEN

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Adds a token. If it completes a stop string, cuts the text there and returns the stop
        string."""
        self.num_tokens += 1
        if not self._at_boundary or REPLACEMENT_CHAR in (new := self._texts[token_id]):
            new = self._append_pending(token_id)
        return self._add(new, may_stop)

    def extend(self, token_ids: list[int], may_stop: bool = True) -> str | None:
        """Adds several tokens at once. Only the last one may complete a stop string: if it does,
        cuts the text there and returns the stop string."""
        if not token_ids:
            return None
        *others, last = token_ids
        if self._at_boundary:
            new = "".join(map(self._texts.__getitem__, others))
            if REPLACEMENT_CHAR not in new:
                self._chunks.append(new)
                self.num_tokens += len(others)
                others = []
        for token_id in others:
            self.append(token_id, may_stop=False)
        return self.append(last, may_stop)

    def finish(self, may_stop: bool = True) -> str | None:
        """Adds the text of the pending tokens, without an incomplete character at the end. If it
        completes a stop string, cuts the text there and returns the stop string. No token may be
        added after this."""
        new = self._decode_pending().rstrip(REPLACEMENT_CHAR) if self._pending else ""
        self._pending = []
        return self._add(new, may_stop)

    def stable_text(self) -> str:
        """Returns the text, without the part at its end that may be the start of a stop string."""
        text = self.text
        if self.keep_stop:
            return text
        for start in range(max(0, len(text) - self._max_overlap), len(text)):
            if any(stop.startswith(text[start:]) for stop in self.stop):
                return text[:start]
        return text

    def _append_pending(self, token_id: int) -> str:
        """Adds a pending token and decodes them all. Returns the text that has become final: ""
        while the next token may still change it."""
        if token_id in self._texts.skipped_ids:
            return ""
        self._pending.append(token_id)
        self._at_boundary = False
        new = self._decode_pending()
        if new and not new.endswith(REPLACEMENT_CHAR):
            self._commit(self._pending, [])
        elif len(self._pending) > MAX_PENDING_TOKENS:
            new = self._flush_start(new)
        else:
            return ""
        return new

    def _flush_start(self, text: str) -> str:
        """Splits off the first pending tokens and returns their text, or "" if no split preserves
        the text. Bounds the work per token when bytes never complete a character, or tokens have
        no text."""
        decode = self._texts.decode
        for cut in range(len(self._pending) - MAX_PARTIAL_TOKENS, 0, -1):
            start, end = self._pending[:cut], self._pending[cut:]
            if text.endswith(rest := decode(end)):
                new = text[: len(text) - len(rest)]
                if decode(start) in (new, new.lstrip()):
                    self._commit(start, end)
                    return new
        return ""

    def _commit(self, token_ids: list[int], pending: list[int]) -> None:
        """Makes the text of ``token_ids`` final and keeps ``pending`` as the pending tokens."""
        self._prefix = None if self._texts.concatenates else token_ids
        self._pending = pending
        self._at_boundary = self._prefix is None and not pending

    def _decode_pending(self) -> str:
        """Returns the text that the pending tokens add to the prefix."""
        if self._prefix is None:
            return self._texts.decode_within(tuple(self._pending))
        decode = self._texts.decode
        prefix, both = decode(self._prefix), decode(self._prefix + self._pending)
        # With some tokenizers, invalid bytes change the text of the tokens before them.
        return both[len(prefix) :] if both.startswith(prefix) else decode(self._pending)

    def _add(self, new: str, may_stop: bool) -> str | None:
        if new:
            self._chunks.append(new)
        # A stop string can end in the new text only if its last character is there.
        if self._last_characters.isdisjoint(new) or not may_stop:
            return None
        first, size = len(self._chunks) - 1, 0
        while first and size < self._max_overlap:
            first -= 1
            size += len(self._chunks[first])
        end = "".join(self._chunks[first:])
        found = find_stop(end, len(end) - len(new), self.stop)
        if found is None:
            return None
        stop_end, stop = found
        self._chunks[first:] = [end[: stop_end if self.keep_stop else stop_end - len(stop)]]
        return stop


def find_stop(text: str, start: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Finds the stop string that ends first after ``start``.

    The order of ``stops`` does not matter, and neither does how the text is split into tokens. If
    two stop strings end at the same position, the longer one is returned.

    Returns:
        The position where the stop string ends, and the stop string; None if there is none.
    """
    found = []
    for stop in stops:
        begin = text.find(stop, max(0, start - len(stop) + 1))
        if begin >= 0:
            found.append((begin + len(stop), -len(stop), stop))
    if not found:
        return None
    end, _, stop = min(found)
    return end, stop
