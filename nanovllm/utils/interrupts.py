"""Delays Ctrl-C while ranks must stay in step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delays Ctrl-C until the end of the block. If one rank left in the middle of a step, the
    others would wait for it forever."""
    pending: list[Any] = []
    handler = signal.getsignal(signal.SIGINT)  # None: not set from Python, so it cannot be replaced
    delays = handler is not None and threading.current_thread() is threading.main_thread()
    if delays:
        signal.signal(signal.SIGINT, lambda *args: pending.append(args))
    try:
        yield
    finally:
        if delays:
            signal.signal(signal.SIGINT, handler)
        if pending:
            signal.raise_signal(signal.SIGINT)
