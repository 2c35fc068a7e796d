"""How much memory a process can use, and which errors mean that it ran out."""

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from nanovllm.utils.cuda_vmm import arena_bytes

# In messages of libraries that do not raise PyTorch's OutOfMemoryError.
MESSAGES = ("out of memory", "can't allocate memory", "_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)
    )


def release_unused(device: torch.device) -> None:
    """Releases the GPU memory that PyTorch caches, or the memory that malloc caches for a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)  # glibc's; other C libraries have none


def held_bytes(device: torch.device) -> int | None:
    """Returns the bytes of GPU memory that PyTorch and arenas have reserved in this process; None
    on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.memory_reserved(device) + arena_bytes(device)


def allocated_bytes(device: torch.device) -> int:
    """Returns the bytes of a GPU that tensors of this process take."""
    return torch.cuda.memory_allocated(device) + arena_bytes(device)


def describe_memory(device: torch.device) -> str:
    """Describes the memory in use, for a message."""
    if device.type != "cuda":
        return "CPU memory"
    free, total = torch.cuda.mem_get_info(device)
    used, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    figures = [f"{num_bytes / 2**30:.2f} GiB" for num_bytes in (total, free, used, held)]
    return "{}, {} free; of this process {} in use, {} held by PyTorch".format(*figures)


def available_bytes(root: Path = Path("/")) -> int:
    """Returns how much memory this process can still use without swapping, within its container's
    limits. The page cache does not count as used, because it can be dropped."""
    return min([psutil.virtual_memory().available, *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Yields what is left of each memory limit of this process's control groups (v1 or v2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not on Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        # Limits of parent groups count too. In a container the path may be the host's, which does
        # not exist; the container's own group is at the top.
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            left = _left_in_cgroup(folder, *names) if folder.is_relative_to(top) else None
            if left is not None:
                yield left


def _left_in_cgroup(group: Path, limit: str, usage: str, prefix: str) -> int | None:
    """Returns what is left of one control group's limit; None if it has no limit."""
    try:
        most, used = (int((group / name).read_text()) for name in (limit, usage))
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        stat = {name: int(value) for name, value in lines}
    except (OSError, ValueError):  # no such group, or "max"
        return None
    cache = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
    return max(0, most - used + cache)
