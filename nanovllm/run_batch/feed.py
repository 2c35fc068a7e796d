"""The way of requests from the driver to its replicas. Needs nothing but Ray."""

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any

import ray


@dataclass
class Status:
    """How the replicas are.

    Attributes:
        num_starts: how many times one was started, again or not.
        num_ready: how many times one had its engine.
        failure: why an engine could not be made; empty if none has failed.
        num_reruns: how many times the task that brings batches was run again.
    """

    num_starts: int = 0
    num_ready: int = 0
    failure: str = ""
    num_reruns: int = 0


class Feed:
    """What the driver hands to the replicas, and what it knows of them: an actor.

    Batches are taken by their position. Those before the last one taken are gone: a task that is
    run again finds empty ones in their place.
    """

    def __init__(self) -> None:
        self._batches: dict[int, dict[str, Any]] = {}
        self._num_batches = self._num_taken = 0
        self._status = Status()
        self._replicas: dict[str, Any] = {}  # handles, by actor id
        self._folders: dict[str, str] = {}  # the same
        self._deadline: float | None = None  # of the stop
        self._changed = asyncio.Condition()

    async def put(self, key: int, requests: bytes) -> None:
        """Adds a batch: a list of requests, all pickled, and the driver's name for it."""
        self._batches[self._num_batches] = {"key": key, "requests": requests}
        self._num_batches += 1
        await self._notify()

    async def take(self, position: int) -> dict[str, Any] | None:
        """Waits for a batch; None after the stop."""
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
        """Ends the job; requests that are running have so many seconds to finish."""
        self._deadline = monotonic() + grace
        await self._notify()

    async def wait_for_stop(self) -> float:
        """Seconds from the time that this returns to the deadline."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._deadline is not None)
        assert self._deadline is not None
        return self._deadline - monotonic()

    async def status(self) -> Status:
        return self._status

    async def note_start(self, actor_id: str, replica: Any, folder: str = "") -> str | None:
        """Takes a replica's handle and the folder of its notes; returns the folder that it had when
        it last started, None at its first start."""
        self._status.num_starts += 1
        before = self._folders.get(actor_id)
        self._replicas[actor_id], self._folders[actor_id] = replica, folder
        return before

    async def replicas(self) -> list[Any]:
        """The handles of all that have ever started."""
        return list(self._replicas.values())

    async def note_ready(self) -> None:
        self._status.num_ready += 1

    async def note_failure(self, message: str) -> None:
        self._status.failure = self._status.failure or message

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def bring_batches(row: dict[str, Any], feed: Any) -> Iterator[dict[str, Any]]:
    """Yields a feed's batches, one a row, until the stop: the one task of the first stage."""
    position = 0
    while (batch := ray.get(feed.take.remote(position))) is not None:
        yield batch
        position += 1
