"""Python's garbage collector, for loops that make many objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

# Python 3.12 itself freezes about 400 objects when it starts. A program that calls gc.freeze
# freezes many thousands.
FROZEN_BY_PYTHON = 1000
_has_frozen = Event()  # set while objects are frozen by ``collecting_new_objects_only``
_program_has_frozen = Event()  # set once the program itself is found to have frozen objects


@contextmanager
def collecting_new_objects_only() -> Iterator[None]:
    """Makes the garbage collector skip objects from before the block, until the block ends.

    The collector visits all objects of the process whenever their number has grown by a quarter.
    With PyTorch and transformers imported, this takes 0.1 to 0.5 s, as long as about a hundred
    decode steps of a small model. Does nothing while another thread is in such a block. Once a
    block has found objects that the program has frozen, later blocks do nothing either.
    """
    if _objects_are_frozen():
        yield
        return
    try:
        _has_frozen.set()  # first, so that an interrupted block is undone
        gc.freeze()
        yield
    finally:
        _unfreeze()


def collect_all() -> None:
    """Collects garbage among all objects, also within a block of another thread."""
    _unfreeze()
    gc.collect()


def _objects_are_frozen() -> bool:
    if _has_frozen.is_set() or _program_has_frozen.is_set():
        return True
    # Asked until there are some: counting visits all of them, which takes 40 ms for a million.
    if gc.get_freeze_count() > FROZEN_BY_PYTHON:
        _program_has_frozen.set()
    return _program_has_frozen.is_set()


def _unfreeze() -> None:
    """Unfreezes the objects that a block has frozen, if any."""
    if _has_frozen.is_set():
        gc.unfreeze()  # first: else another thread would count what this block has frozen
        _has_frozen.clear()
