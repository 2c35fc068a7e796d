"""Ends a run early when a signal says so."""

import signal
from time import monotonic
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal:
    """Within its ``with`` block, takes SIGTERM and SIGINT for the wish to end.

    Until ``is_running`` is set they raise KeyboardInterrupt; from then on they set ``requested``,
    for whoever runs to see, but for another SIGINT: that raises KeyboardInterrupt again.

    Args:
        grace: seconds from the request to the deadline.

    Attributes:
        is_running: whether somebody looks at ``requested``.
        requested: whether to end.
        deadline: when (``time.monotonic``) to have ended.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.is_running = False
        self.requested = False
        self.deadline = float("inf")
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopOnSignal":
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # as for a job in a shell's background
                self._before[number] = before
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raises = not self.is_running or (self.requested and number == signal.SIGINT)
        if not self.requested:
            self.requested = True
            self.deadline = monotonic() + self.grace
        if raises:  # which may come to nothing, in a destructor
            raise KeyboardInterrupt
