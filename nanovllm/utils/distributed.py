"""The ranks that one model is split over, and the collectives between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class TPGroup:
    """A tensor-parallel group as seen from one of its ranks; size 1 needs no process group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's x (all of one shape), in rank order, on rank 0; None elsewhere."""
        if self.size == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x, parts, group=self.group, group_dst=0)
        return parts


_SINGLE = TPGroup()
_tp_group: ContextVar[TPGroup] = ContextVar("nanovllm_tp_group", default=_SINGLE)


def get_tp_group() -> TPGroup:
    """The group that layers built now belong to; each layer keeps the one it was built in."""
    return _tp_group.get()


@contextmanager
def use_tp_group(group: TPGroup) -> Iterator[None]:
    """Builds the layers of the enclosed block for ``group``."""
    token = _tp_group.set(group)
    try:
        yield
    finally:
        _tp_group.reset(token)
