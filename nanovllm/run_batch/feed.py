"""Passes requests from the driver to its replicas. Imports only Ray."""

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any

import ray


@dataclass
class Status:
    """The state of the replicas.

    Attributes:
        num_starts: the number of times that a replica has started, restarts included.
        num_ready: the number of times that a replica's engine became ready.
        failure: why an engine could not be created; "" if none has failed.
        num_reruns: the number of times that Ray Data has rerun the ``stream_batches`` task.
    """

    num_starts: int = 0
    num_ready: int = 0
    failure: str = ""
    num_reruns: int = 0


class Feed:
    """A Ray actor with the queue of batches from the driver, and with the state of the replicas.

    Batches are read by position, and deleted when the next one is read. A rerun task therefore
    reads empty batches at the positions that it read before.
    """

    def __init__(self) -> None:
        self._batches: dict[int, dict[str, Any]] = {}
        self._num_batches = self._num_taken = 0
        self._status = Status()
        self._replicas: dict[str, Any] = {}  # handles, by actor id
        self._folders: dict[str, str] = {}  # folders of their journals, by actor id
        self._deadline: float | None = None  # set by ``stop``
        self._changed = asyncio.Condition()

    async def put(self, key: int, requests: bytes) -> None:
        """Adds a batch.

        Args:
            key: the driver's number for the batch.
            requests: the pickled list of pickled requests.
        """
        self._batches[self._num_batches] = {"key": key, "requests": requests}
        self._num_batches += 1
        await self._notify()

    async def take(self, position: int) -> dict[str, Any] | None:
        """Waits for the batch at a position and returns it. Returns None after ``stop``."""
        self._batches.pop(position - 1, None)
        self._status.num_reruns += position < self._num_taken
        self._num_taken = position
        async with self._changed:
            await self._changed.wait_for(
                lambda: position < self._num_batches or self._deadline is not None
            )
        if self._deadline is not None:
            return None
        return self._batches.get(position, {"key": -1, "requests": pickle.dumps([])})

    async def stop(self, grace: float) -> None:
        """Ends the job. Running requests have ``grace`` seconds to finish."""
        self._deadline = monotonic() + grace
        await self._notify()

    async def wait_for_stop(self) -> float:
        """Waits for ``stop``. Returns the seconds that are left until its deadline."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._deadline is not None)
        assert self._deadline is not None
        return self._deadline - monotonic()

    async def status(self) -> Status:
        return self._status

    async def note_start(self, actor_id: str, replica: Any, folder: str = "") -> str | None:
        """Stores a replica's handle and the folder of its journal. Returns the folder of its
        previous start, or None at its first start."""
        self._status.num_starts += 1
        before = self._folders.get(actor_id)
        self._replicas[actor_id], self._folders[actor_id] = replica, folder
        return before

    async def replicas(self) -> list[Any]:
        """Returns the handles of all replicas that have ever started."""
        return list(self._replicas.values())

    async def note_ready(self) -> None:
        self._status.num_ready += 1

    async def note_failure(self, message: str) -> None:
        self._status.failure = self._status.failure or message

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def stream_batches(row: dict[str, Any], feed: Any) -> Iterator[dict[str, Any]]:
    """Yields the batches of a feed, one per row, until ``Feed.stop``. This is the only task of the
    dataset's first stage."""
    position = 0
    while (batch := ray.get(feed.take.remote(position))) is not None:
        yield batch
        position += 1
