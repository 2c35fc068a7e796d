"""The tensor-parallel group of a model, and its collectives."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
# Limits the rendezvous only. Later, workers.py detects dead ranks.
RENDEZVOUS_TIMEOUT = timedelta(seconds=120)


class RankPart(NamedTuple):
    """This rank's part of a sum over the ranks, to which a residual is added, then a norm applied.

    Attributes:
        part: [N, D].
        one_shot: the all-reduce for it (kernels/comm). Its ``norm`` does all of this.
    """

    part: torch.Tensor
    one_shot: Any

    @property
    def is_cuda(self) -> bool:
        return self.part.is_cuda


@dataclass(frozen=True, slots=True)
class TPGroup:
    """A tensor-parallel group as seen from one of its ranks.

    Attributes:
        backend: a gloo or NCCL process group; None for a single rank. It is not registered with
            torch.distributed, so several engines in one process do not conflict.
        one_shots: faster all-reduces, one per dtype (kernels/comm), if NVLink connects the GPUs.
    """

    rank: int = 0
    size: int = 1
    backend: Any = None
    one_shots: tuple[Any, ...] = ()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the elementwise sum of a floating-point x over the ranks. May overwrite x."""
        assert x.is_floating_point()
        return self._all_reduce(x, dist.ReduceOp.SUM)

    def all_reduce_before_norm(self, x: torch.Tensor) -> torch.Tensor | RankPart:
        """Returns the sum over the ranks, or x as a RankPart, from which a norm's kernel computes
        it. All ranks pass the result, with a residual, to one norm, before they call another
        collective."""
        for one_shot in self.one_shots:
            if one_shot.supports_norm(x):
                return RankPart(x, one_shot)
        return self.all_reduce(x)

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the elementwise maximum of an int64 x over the ranks. May overwrite x."""
        assert x.dtype is torch.int64  # the one-shot all-reduce of int64 is a maximum
        return self._all_reduce(x, dist.ReduceOp.MAX)

    def _all_reduce(self, x: torch.Tensor, op: Any) -> torch.Tensor:
        for one_shot in self.one_shots:
            if one_shot.supports(x):
                return one_shot(x)
        if self.size > 1:
            self._reduce(x, op)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Gathers x from all ranks to rank 0. It must have the same shape on every rank, and the
        group must have at least two ranks.

        Returns:
            On rank 0 the tensors in rank order, on other ranks None.
        """
        options = dist.GatherOptions()
        options.rootRank, options.asyncOp = 0, False
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        _wait(self.backend.gather([parts] if parts else [], [x.contiguous()], options))
        return parts or None

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrites a contiguous x on the other ranks by that of rank 0. The group must have at
        least two ranks."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        _wait(self.backend.broadcast([x], options))

    def min(self, value: int, device: torch.device) -> int:
        """Returns the minimum of ``value`` over the ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=device)
        self._reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor)

    def abort(self) -> None:
        """Aborts collectives that wait for a dead rank."""
        for one_shot in self.one_shots:
            one_shot.abort()
        if self.backend is not None:
            self.backend.abort()

    def close(self) -> None:
        """Frees the group's resources. No collective may be running."""
        for one_shot in self.one_shots:
            one_shot.close()
        self.abort()

    def _reduce(self, x: torch.Tensor, op: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = op, False
        _wait(self.backend.allreduce([x], options))


class RankOrderTPGroup(TPGroup):
    """A group whose all-reduces add the ranks' tensors to zero in the order of the ranks, in fp32.
    One-shot all-reduces do the same. The result for an element does not depend on its position or
    on the shape of the tensor. Norms are kernels of their own, which add squares in one order."""

    __slots__ = ()

    def all_reduce_before_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if any(one_shot.supports(x) for one_shot in self.one_shots):
            return super().all_reduce(x)
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        options = dist.distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        _wait(self.backend.allgather([parts], [x.contiguous()], options))
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for part in parts:
            total += part
        return total.to(x.dtype)


def _wait(work: Any) -> None:
    if work is not None:  # on a GPU, wait() blocks the stream and not the host
        work.wait()


def open_store(folder: str) -> dist.Store:
    """Opens the key-value store for the ranks' rendezvous.

    The folder must exist. Otherwise PyTorch waits for it while holding the GIL.
    """
    store = dist.FileStore(os.path.join(folder, "store"))
    store.set_timeout(RENDEZVOUS_TIMEOUT)
    return store


def close_store(store: dist.Store) -> None:
    """Makes pending and later requests to the store fail within about a second after its folder is
    removed."""
    store.set_timeout(timedelta(milliseconds=1))


def make_tp_group(
    rank: int,
    size: int,
    store: dist.Store,
    device: torch.device,
    group_class: type[TPGroup] = TPGroup,
) -> TPGroup:
    """Makes the process group of all ranks and waits for the other ranks.

    Args:
        store: needed until the first collective has finished.
        device: if a GPU, it must be PyTorch's current device.
    """
    backend: Any
    if device.type == "cuda":
        # Otherwise a thread of PyTorch's NCCL group would poll the store every second, also after
        # ``close_store``.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        backend = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    else:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = RENDEZVOUS_TIMEOUT
        backend = gloo(store, rank, size, options)
    return group_class(rank, size, backend)


_tp_group: ContextVar[TPGroup] = ContextVar("nanovllm_tp_group")


def get_tp_group() -> TPGroup:
    """Returns the group for layers under construction. Each layer keeps the group that it was built
    with."""
    return _tp_group.get(TPGroup())


@contextmanager
def use_tp_group(group: TPGroup) -> Iterator[None]:
    """Context manager in which layers are built for ``group``."""
    token = _tp_group.set(group)
    try:
        yield
    finally:
        _tp_group.reset(token)
