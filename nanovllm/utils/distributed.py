"""The ranks that one model is split over, and the collectives between them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
# For ranks to meet; afterwards a dead peer is noticed by other means.
MEETING_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class TPGroup:
    """A tensor-parallel group as seen from one of its ranks.

    Attributes:
        backend: a gloo or NCCL process group of this engine's own, not registered anywhere, so
            that engines side by side in one process do not meet; None for a single rank.
        one_shots: each reduces small tensors of one dtype faster, where GPUs can write each
            other's memory.
    """

    rank: int = 0
    size: int = 1
    backend: Any = None
    one_shots: tuple[Any, ...] = ()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, of int64 the largest at each place; x itself is lost."""
        for one_shot in self.one_shots:
            if one_shot.serves(x):
                return one_shot(x)
        if self.size > 1:
            self._reduce(x, dist.ReduceOp.MAX if x.dtype == torch.int64 else dist.ReduceOp.SUM)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's x (all of one shape), in rank order, on rank 0; None elsewhere. There
        must be several."""
        options = dist.GatherOptions()
        options.rootRank, options.asyncOp = 0, False
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        _wait(self.backend.gather([parts] if parts else [], [x.contiguous()], options))
        return parts or None

    def min(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=device)
        self._reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor)

    def abort(self) -> None:
        """Ends collectives that wait for a dead peer."""
        for one_shot in self.one_shots:
            one_shot.abort()
        if self.backend is not None:
            self.backend.abort()

    def close(self) -> None:
        """Frees what the group holds; nothing may be running."""
        for one_shot in self.one_shots:
            one_shot.close()
        self.abort()

    def _reduce(self, x: torch.Tensor, op: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = op, False
        _wait(self.backend.allreduce([x], options))


def _wait(work: Any) -> None:
    if work is not None:  # on a GPU: makes the stream wait, not the host
        work.wait()


def open_store(folder: str) -> dist.Store:
    """Where ranks leave word for each other. The folder must be there: PyTorch would wait for it,
    and stop all of Python's threads meanwhile."""
    store = dist.FileStore(os.path.join(folder, "store"))
    store.set_timeout(MEETING_TIMEOUT)
    return store


def close_store(store: dist.Store) -> None:
    """Makes what still asks the store fail, in a second or so, once its folder is removed."""
    store.set_timeout(timedelta(milliseconds=1))


def make_tp_group(rank: int, size: int, store: dist.Store, device: torch.device) -> TPGroup:
    """Waits for the other ranks. The store is needed until the first collective is over. A GPU must
    be PyTorch's current device."""
    backend: Any
    if device.type == "cuda":
        # Otherwise NCCL's monitor asks the store every second, for as long as the group lives.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        backend = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    else:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = MEETING_TIMEOUT
        backend = gloo(store, rank, size, options)
    return TPGroup(rank, size, backend)


_tp_group: ContextVar[TPGroup] = ContextVar("nanovllm_tp_group")


def get_tp_group() -> TPGroup:
    """The group that layers built now belong to; each layer keeps the one it was built in."""
    return _tp_group.get(TPGroup())


@contextmanager
def use_tp_group(group: TPGroup) -> Iterator[None]:
    """Builds the layers of the enclosed block for ``group``."""
    token = _tp_group.set(group)
    try:
        yield
    finally:
        _tp_group.reset(token)
