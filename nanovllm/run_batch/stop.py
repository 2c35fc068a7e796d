"""Stops a run early on SIGTERM or SIGINT. Imports only the standard library, for the supervisor."""

import signal
from math import inf
from time import monotonic
from types import FrameType
from typing import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal:
    """Tells a run to end early on SIGTERM and SIGINT within its ``with`` block. Signals that are
    ignored stay ignored, for example SIGINT in background jobs of a shell.

    The signals raise KeyboardInterrupt until ``is_running`` is set. From then on, the first signal
    sets ``requested``, which the running code checks. A second SIGINT raises KeyboardInterrupt.

    Args:
        grace: seconds from the first signal to the deadline.

    Attributes:
        requested: whether the run should end.
        deadline: the time (``time.monotonic``) until which running requests may finish.
        is_running: whether the caller is in code that checks ``requested``. The caller sets it.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.requested = False
        self.deadline = inf
        self.is_running = False

    def __enter__(self) -> Self:
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self._before = {n: handler for n, handler in before.items() if handler != signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raises = not self.is_running or (self.requested and number == signal.SIGINT)
        if not self.requested:
            self.requested = True
            self.deadline = monotonic() + self.grace
        if raises:
            # Python drops an exception that is raised in a destructor, but ``requested`` stays set.
            raise KeyboardInterrupt
