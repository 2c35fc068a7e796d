"""Objects of a process that a forked child of it must leave alone."""

import ctypes
import os
from typing import Any
from weakref import WeakSet

_owned: WeakSet[Any] = WeakSet()


def leave_to_parent(thing: Any) -> None:
    """Keeps every process that is forked from now on from destroying its copy of an object.

    The copy, and what its attributes hold at the time of the fork, are never freed in the child.
    Destructors of process groups, stores and CUDA objects would wait there for threads that exist
    in the parent alone, or end what the parent still uses.

    Args:
        thing: an object with a ``__dict__`` that can be referenced weakly.
    """
    _owned.add(thing)


def _keep_alive() -> None:
    # Neither a global nor a closure would do: the interpreter clears those when it ends.
    for thing in _owned:
        for held in (thing, *vars(thing).values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_keep_alive)
