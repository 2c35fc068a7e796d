"""How much memory a process can have, in containers too, and how many KV blocks that holds."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nanovllm.engine.kv_cache import num_blocks_on_cpu, num_blocks_on_gpu
from nanovllm.engine.memory import available_bytes

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


def test_a_cache_on_a_cpu_needs_no_sysconf(machine: SimpleNamespace, monkeypatch):
    """The number of free pages was asked for, which macOS does not have, so every start failed."""
    monkeypatch.setattr(os, "sysconf", lambda name: {}[name])
    assert num_blocks_on_cpu(1 << 20, 16, 256, 4096) == 4096, "within 4 GiB"
    assert num_blocks_on_cpu(1 << 20, 16, 1, 160) == 10, "of as many as sequences can fill"


def test_the_page_cache_of_a_busy_machine_is_available(machine: SimpleNamespace, monkeypatch):
    """Free pages, of which a busy machine has few, were all that counted."""
    monkeypatch.setattr(os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 10)
    machine.available = 2 * GIB
    assert num_blocks_on_cpu(1 << 20, 16, 256, 4096) == 1024, "half of what is available"
    machine.available = 0
    assert num_blocks_on_cpu(1 << 20, 16, 256, 4096) == 1


def on_gpu(**changes: Any) -> int:
    settings: dict[str, Any] = {
        "total_bytes": 80 * GIB,
        "free_bytes": 70 * GIB,
        "own_bytes": 8 * GIB,
        "peak_bytes": 10 * GIB,
        "graph_bytes": GIB,
        "utilization": 0.5,
        "bytes_per_block": 16 << 20,
        "block_size": 256,
        "max_model_len": 131_072,
        "may_shorten": False,
    }
    return num_blocks_on_gpu(**{**settings, **changes})


def test_blocks_fill_what_is_left_of_a_gpu():
    assert on_gpu() == (40 - 8 - 2 - 1) * 64
    assert on_gpu(free_bytes=20 * GIB) == (20 - 2 - 1) * 64, "others have the rest"


def test_a_gpu_with_too_little_for_the_longest_sequence():
    """Refused if the length was asked for; by default sequences become shorter."""
    little: dict[str, Any] = {"free_bytes": 4 * GIB}
    with pytest.raises(ValueError, match=r"max_model_len=131072 takes 8.00 GiB, but 1.00 GiB are"):
        on_gpu(**little)
    assert on_gpu(**little, may_shorten=True) == 64
    with pytest.raises(ValueError, match=r"but 0.00 GiB are left"):
        on_gpu(free_bytes=3 * GIB, may_shorten=True)
