"""How much memory a process can have, in containers too."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nanovllm.utils.memory import available_bytes

GIB = 1 << 30
STAT = "anon 1\nactive_file {0}\ninactive_file {0}\ntotal_active_file {1}\ntotal_inactive_file {1}"


@pytest.fixture
def machine(monkeypatch):
    """Has 64 GiB available."""
    memory = SimpleNamespace(available=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return memory


def write(root: Path, files: dict[str, Any]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def group(folder: str, most: Any, used: int, cache: int = 0) -> dict[str, Any]:
    """A control group of version 2, whose page cache is twice ``cache``."""
    values = {"max": most, "current": used, "stat": STAT.format(cache, 0)}
    return {f"sys/fs/cgroup/{folder}/memory.{name}": value for name, value in values.items()}


def old_group(folder: str, most: int, used: int, cache: int = 0) -> dict[str, Any]:
    """One of version 1."""
    values = {"limit_in": most, "usage_in": used}
    files = {f"sys/fs/cgroup/memory/{folder}/memory.{k}_bytes": v for k, v in values.items()}
    return files | {f"sys/fs/cgroup/memory/{folder}/memory.stat": STAT.format(0, cache)}


UNIFIED = {"proc/self/cgroup": "0::/a/b"}
HYBRID = {"proc/self/cgroup": "5:cpu,memory:/docker/0\n1:name=systemd:/x\n0::/"}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "no Linux": ({}, 64),
    "no limit": (UNIFIED | group("a/b", "max", 9 * GIB), 64),
    "a limit": (UNIFIED | group("a/b", 8 * GIB, 3 * GIB), 5),
    "a limit above": (UNIFIED | group("a/b", "max", 0) | group("a", 8 * GIB, 3 * GIB), 5),
    "the smallest limit": (UNIFIED | group("a/b", 8 * GIB, 0) | group("a", 8 * GIB, 3 * GIB), 5),
    "page cache": (UNIFIED | group("a/b", 8 * GIB, 8 * GIB, GIB), 2),
    "over the limit": (UNIFIED | group("a/b", 8 * GIB, 9 * GIB), 0),
    "the container's own at the top": (UNIFIED | group("", 8 * GIB, 3 * GIB), 5),
    "more than the machine has": (UNIFIED | group("a/b", 1 << 60, 0), 64),
    "version 1": (HYBRID | old_group("docker/0", 8 * GIB, 5 * GIB, GIB), 5),
    "version 1 in a container": (HYBRID | old_group("", 8 * GIB, 5 * GIB, GIB), 5),
    "version 1 without a limit": (HYBRID | old_group("docker/0", 9223372036854771712, 0), 64),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_available_is_within_the_limits_of_control_groups(
    name: str, machine: SimpleNamespace, tmp_path: Path
):
    """A container's limit was not looked at."""
    files, expected = CASES[name]
    assert available_bytes(write(tmp_path, files)) == expected * GIB


def test_this_machine_has_some():
    assert 1 << 20 < available_bytes() <= psutil.virtual_memory().total
