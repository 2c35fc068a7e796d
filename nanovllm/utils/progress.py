"""Progress bars, and log lines beside them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter

from tqdm.auto import tqdm

BAR_SECONDS = 1.0  # work that takes less has no bar of its own
SETTLED_SECONDS = 0.1  # after which the pace says how long it takes


def bar_maker(use_tqdm: bool | Callable[..., tqdm]) -> Callable[..., tqdm]:
    """What makes a bar: ``use_tqdm`` itself, or tqdm, shown or not."""
    return use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)


@contextmanager
def shown(bar: tqdm) -> Iterator[tqdm]:
    """Closes a bar in the end. Until then it makes way for log lines, and the next update draws it
    below them."""
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


def portions(
    count: int, size: int, make_bar: Callable[..., tqdm] | None = None, desc: str = ""
) -> Iterator[slice]:
    """Cuts ``count`` items into slices of ``size``. Shows a bar of those that are done if all of
    them will take over a second."""
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
