"""Results that several tests need and that take long, computed once for all processes of xdist."""

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest


def once(folders: pytest.TempPathFactory, name: str, compute: Callable[[], Any]) -> Any:
    """Returns the result of ``compute``, which JSON must be able to represent. The first process
    that asks for ``name`` computes it, and the others wait."""
    root = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    path = root / f"{name}.json"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(compute()))
        return json.loads(path.read_text())
