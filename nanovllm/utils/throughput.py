"""Measures recent throughput."""

from time import perf_counter

WINDOW_SECONDS = 5.0


class Throughput:
    """Counts tokens, and measures tokens per second in windows of at least WINDOW_SECONDS.

    The rates are those of the last full window. Before the first window is full, they are those of
    the current window.

    Attributes:
        num_generated_tokens: the number of tokens generated since this object was created.
    """

    def __init__(self) -> None:
        self.num_generated_tokens = 0
        self.restart()

    def restart(self) -> None:
        """Starts a new window; the time before it does not count."""
        self._start = perf_counter()
        self._tokens = [0, 0]  # prefilled, generated
        self._full: tuple[float, float] | None = None

    def add(self, num_prefilled: int, num_generated: int) -> bool:
        """Counts a step. Returns whether it completed a window."""
        self.num_generated_tokens += num_generated
        self._tokens = [self._tokens[0] + num_prefilled, self._tokens[1] + num_generated]
        # A window without tokens goes on: they are counted after their step, which may be long.
        if perf_counter() - self._start < WINDOW_SECONDS or not any(self._tokens):
            return False
        rates = self._rates()
        self.restart()
        self._full = rates
        return True

    def rates(self) -> tuple[float, float]:
        """Returns the tokens prefilled and the tokens generated per second."""
        return self._full or self._rates()

    def _rates(self) -> tuple[float, float]:
        seconds = max(perf_counter() - self._start, 1e-9)
        return self._tokens[0] / seconds, self._tokens[1] / seconds
