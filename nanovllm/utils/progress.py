"""Progress bars that do not garble log lines."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

BAR_SECONDS = 1.0  # shorter work gets no bar of its own
SETTLED_SECONDS = 0.1  # time after which the total time can be extrapolated


class NoBar:
    """Takes the place of a progress bar that is not shown. A disabled tqdm would start a thread and
    take tqdm's lock, which a KeyboardInterrupt at that moment leaves locked for ever."""

    n = 0

    def __init__(self, **settings: Any) -> None:
        pass

    def update(self, n: int = 1) -> None:
        pass

    def set_postfix(self, **values: Any) -> None:
        pass

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass


def bar_maker(use_tqdm: bool | Callable[..., tqdm]) -> Callable[..., Any]:
    """Returns a function that makes progress bars: ``use_tqdm`` itself if it is callable, otherwise
    tqdm or NoBar."""
    if callable(use_tqdm):
        return use_tqdm
    return tqdm if use_tqdm else NoBar


@contextmanager
def closing_bar(bar: Any) -> Iterator[Any]:
    """Context manager that closes a progress bar on exit. Inside it, the bar is cleared before each
    log line of nanovllm, and the bar's next update draws it again below that line."""
    logger = logging.getLogger("nanovllm")

    def clear(record: logging.LogRecord) -> bool:
        bar.clear()
        return True

    logger.addFilter(clear)
    try:
        yield bar
    finally:
        logger.removeFilter(clear)
        bar.close()


def slices(
    count: int, size: int, make_bar: Callable[..., Any] | None = None, desc: str = ""
) -> Iterator[slice]:
    """Yields slices of ``size`` that together cover ``count`` items. Shows a progress bar if all
    items are expected to take longer than a second."""
    start, bar = perf_counter(), None
    try:
        for done in range(0, count, size):
            seconds = perf_counter() - start
            if make_bar and not bar and SETTLED_SECONDS < seconds > BAR_SECONDS * done / count:
                bar = make_bar(total=count, desc=desc)
            if bar:
                bar.update(done - bar.n)
            yield slice(done, done + size)
        if bar:
            bar.update(count - bar.n)
    finally:
        if bar:
            bar.close()
