"""Lets the calls of an object run one at a time, and ends waiting calls when it is closed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Thread, current_thread

POLL_SECONDS = 1.0  # how often a waiting call checks for threads that ended without notifying it


class Turns:
    """Lets only one thread at a time run a call of an object.

    Args:
        name: the object's name in messages.

    Attributes:
        is_closed: whether ``close`` has been called. Every later call raises ValueError.
    """

    def __init__(self, name: str) -> None:
        self.is_closed = False
        self._closed = f"this {name} is closed: make a new one"
        self._closed_meanwhile = f"this {name} was closed by another call before this call finished"
        self._turn = Condition()  # the running call holds its lock

    def check_open(self) -> None:
        if self.is_closed:
            raise ValueError(self._closed)

    def check_still_open(self) -> None:
        """Like ``check_open``, for a call that has already begun."""
        if self.is_closed:
            raise ValueError(self._closed_meanwhile)

    def close(self) -> None:
        """Ends waiting calls. The running call ends when it next calls ``check_still_open``."""
        self.is_closed = True

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the lock during the block. Calls in other threads wait for it."""
        with self._turn:
            try:
                yield
            finally:
                self._turn.notify_all()

    @contextmanager
    def turn_after(self, owners: Callable[[], set[Thread]], conflict: str) -> Iterator[None]:
        """Like ``turn``, but first waits until no thread has unfinished work.

        Args:
            owners: returns the threads with unfinished work.
            conflict: the message of the error.

        Raises:
            ValueError: the wait would never end, because the work belongs to this thread, or only
                to threads that have ended.
        """
        self.check_open()
        with self.turn():
            while not self.is_closed and (threads := owners()):
                if current_thread() in threads or not any(t.is_alive() for t in threads):
                    raise ValueError(conflict)
                self._turn.wait(POLL_SECONDS)
            self.check_still_open()
            yield

    @contextmanager
    def until_closed(self) -> Iterator[None]:
        """If the object is closed during the block, an error in it becomes a ValueError that says
        so."""
        self.check_open()
        try:
            yield
        except Exception:
            if self.is_closed:
                raise ValueError(self._closed_meanwhile) from None
            raise
