"""Objects that a forked child process must not destroy, and what it cannot do."""

import ctypes
import os
from typing import Any, NoReturn
from weakref import WeakSet

import torch

_owned: WeakSet[Any] = WeakSet()
_pids: set[int] = set()  # of this process and those it was forked from, the ones with an engine


def leave_to_parent(thing: Any) -> None:
    """Prevents child processes that are forked later from destroying their copy of an object.

    The child never frees the copy, nor the objects in its attributes at the time of the fork. In
    the child, destructors of process groups, stores and CUDA objects would wait for threads that
    exist only in the parent, or destroy resources that the parent still uses.

    Args:
        thing: an object with a ``__dict__`` and support for weak references.
    """
    _owned.add(thing)


def claim_threads() -> None:
    """Called before an engine starts PyTorch's threads in this process. Raises ValueError if they
    exist only in its parent: the first parallel operation would wait for them forever. With one
    thread (``torch.set_num_threads(1)``) there is nothing to wait for."""
    if _pids - {os.getpid()} and torch.get_num_threads() > 1:
        raise ValueError(
            "this process is the forked child of one that has had an engine, and PyTorch's threads "
            "do not survive a fork: start processes with spawn, for example by "
            "multiprocessing.set_start_method('spawn')"
        )
    _pids.add(os.getpid())


class LeftToParent:
    """An object that a forked child process must neither destroy nor use."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        leave_to_parent(self)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that made the object."""
        return os.getpid() != self._pid

    def check_not_forked(self) -> None:
        if self.is_forked:
            raise ValueError(
                f"this engine belongs to process {self._pid}, and this process is a forked child: "
                f"start processes with spawn, and make another engine there"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine cannot be pickled: make it in the process that uses it")


def _keep_alive() -> None:
    # Leaks a reference, because the interpreter clears globals and closures when it exits.
    for thing in _owned:
        for held in (thing, *vars(thing).values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_keep_alive)
