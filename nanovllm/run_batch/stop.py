"""Stops a run early on SIGTERM or SIGINT."""

import signal
from math import inf
from time import monotonic
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Tells a run to end early.

    Attributes:
        requested: whether the run should end.
        deadline: the time (``time.monotonic``) until which running requests may finish.
    """

    requested = False
    deadline = inf


class StopOnSignal(Stop):
    """Handles SIGTERM and SIGINT within its ``with`` block.

    The signals raise KeyboardInterrupt until ``is_running`` is set. From then on, the first signal
    sets ``requested``, which the running code checks. A second SIGINT raises KeyboardInterrupt.

    Args:
        grace: seconds from the first signal to the deadline.

    Attributes:
        is_running: set by the caller while the running code checks ``requested``.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.is_running = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopOnSignal":
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # ignored in background jobs of a shell
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
        if raises:  # ``requested`` is set as well: in a destructor, the exception is lost
            raise KeyboardInterrupt
