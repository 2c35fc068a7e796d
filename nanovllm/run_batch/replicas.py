"""Runs requests on several engines, which Ray distributes over the machines of a cluster."""

import atexit
import logging
import os
import signal
import tempfile
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, inf
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError

from nanovllm.compat.llm import LLM
from nanovllm.config import DEFAULT_NUM_SEQS
from nanovllm.run_batch.journal import Journal
from nanovllm.run_batch.records import ID_PREFIX, Record
from nanovllm.run_batch.request import BatchRequest
from nanovllm.run_batch.runner import EngineLostError, Runner, describe, max_window
from nanovllm.run_batch.stop import StopOnSignal

logger = logging.getLogger("nanovllm.run_batch")

MAX_DEATHS = 10  # per replica, since a request last finished; one bad request causes up to three
MAX_CALLS = 2  # of ``run``: a replica runs one while the driver handles the result of another
RUN_SECONDS = 0.1
POLL_SECONDS = 0.5
CLOSE_SECONDS = 10.0


class Replica:
    """An actor that runs requests on one engine. Ray runs one call at a time, in their order.

    Args:
        options: the arguments of ``LLM``.
        model_names: as for ``Runner``.
        journal_name: the name of the journal in the folder for temporary files. If an earlier actor
            died and left its journal there, this one counts the death and continues the journal.
    """

    def __init__(
        self, options: dict[str, Any], model_names: Sequence[str], journal_name: str
    ) -> None:
        self._options, self._model_names = options, model_names
        self._journal = Journal(Path(tempfile.gettempdir(), journal_name), 0)
        self._requests: deque[BatchRequest] = deque()
        self._is_stopping = False
        # Skip the native destructors of Ray, which run at exit and can deadlock.
        atexit.register(os._exit, 0)

    def start(self) -> str:
        """Creates the engine. Returns the id of this node."""
        try:
            self._runner = Runner(lambda: LLM(**self._options), self._model_names, self._journal)
        except Exception:
            self._journal.close(is_done=False)
            raise
        return ray.get_runtime_context().get_node_id()

    def run(self, requests: list[BatchRequest]) -> list[Record | None]:
        """Adds requests, and runs the engine for RUN_SECONDS, or less if no request is left.
        Returns the records of requests that have finished. After ``stop``, None follows the last
        record."""
        self._requests.extend(requests)
        records: list[Record | None] = []
        end = monotonic() + RUN_SECONDS
        while monotonic() < end:
            new = self._runner.advance(self._pop_requests())
            if new is None:
                return [*records, None] if self._is_stopping else records
            records += new
        return records

    def stop(self) -> None:
        """Drops the requests that the engine is not running."""
        self._is_stopping = True
        self._requests.clear()
        self._runner.end_unstarted()

    def close(self) -> None:
        """Frees the engine and removes the journal."""
        self._runner.close()
        self._journal.close(is_done=True)

    def _pop_requests(self) -> Iterator[BatchRequest]:
        while self._requests:
            yield self._requests.popleft()


@dataclass(slots=True, eq=False)
class _ReplicaState:
    """What the driver knows of one replica. If its actor dies, a new actor replaces it.

    Attributes:
        journal_name: the name of the journal, which a new actor continues.
        requests: the requests that the replica has, by record id.
        actor: the handle of the ``Replica`` actor.
        calls: the references of pending calls, oldest first: one of ``start``, or up to MAX_CALLS
            of ``run``.
        node_id: the id of the actor's node in the Ray cluster; empty until the replica has had an
            engine.
        is_ready: whether the actor's engine is ready.
    """

    journal_name: str
    requests: dict[str, BatchRequest] = field(default_factory=dict)
    actor: Any = None
    calls: list[Any] = field(default_factory=list)
    node_id: str = ""
    is_ready: bool = False


class Replicas:
    """Runs requests on several engines, each in an actor of a Ray cluster.

    It has the interface of ``Runner``, which runs requests on one engine. Each replica has a
    bounded number of requests at a time. If its actor dies, a new actor gets these requests. If its
    machine is lost, any replica may get them.

    Args:
        options: the arguments of ``LLM``, with all fields of Config.
        model_names: as for ``Runner``.
        num_replicas: the number of engines.
        num_requests: the number of requests to run, or an upper bound on it.

    Raises:
        OSError: Ray cannot be reached.
        ValueError: no engine fits in the cluster.
        EngineLostError: the first engine cannot be created, or the engines' processes keep dying.
    """

    def __init__(
        self,
        options: dict[str, Any],
        model_names: Sequence[str],
        num_replicas: int,
        num_requests: int,
    ) -> None:
        # The ``window`` of a replica's Runner, or twice that if the engine does not reorder. The
        # engine may choose a larger max_num_seqs than the default. A small job is divided evenly.
        max_num_seqs = options["max_num_seqs"] or DEFAULT_NUM_SEQS
        reorders = options["enable_reordering"]
        max_requests = max_window(max_num_seqs) if reorders else 4 * max_num_seqs
        self._max_requests = min(max_requests, ceil(num_requests / num_replicas))
        self._unassigned: deque[BatchRequest] = deque()  # requests of lost machines
        self._num_deaths = 0  # since a request last finished
        self._is_stopping = False
        self._replicas = [
            _ReplicaState(f"nanovllm-{uuid4().hex}.journal") for _ in range(num_replicas)
        ]
        self._started_ray = _connect()
        try:
            resources = _find_resources(options, num_replicas)
            self._make_actor = ray.remote(**resources)(Replica).remote
            device = "cuda" if resources["num_gpus"] else "cpu"
            self._arguments = options | {"device": device}, model_names
            for replica in self._replicas:
                self._start(replica)
            logger.info("waiting for Ray to start %d engines", num_replicas)
            while not any(replica.is_ready for replica in self._replicas):
                self._wait()
        except BaseException:
            self.close()
            raise

    def run(
        self, requests: Iterable[BatchRequest | Record], stop: StopOnSignal | None = None
    ) -> Generator[Record, None, None]:
        """Yields the record of each request as it finishes. Records among ``requests`` are passed
        through.

        Reads only as many requests as the engines can take. Requests that ``stop`` ends get no
        record.

        Raises:
            EngineLostError: engines failed and could not be replaced.
        """
        source = iter(requests)
        end = inf
        while monotonic() < end:
            if stop is not None and stop.requested and not self._is_stopping:
                logger.info("stopping: waiting for running requests")
                source, end = iter(()), stop.deadline
                self._stop()
            for replica in self._replicas:
                if replica.is_ready:
                    yield from self._call(replica, source)
            is_busy = any(replica.requests for replica in self._replicas)
            is_ready = any(replica.is_ready for replica in self._replicas)
            if not is_busy and (is_ready or self._is_stopping):
                return  # no request is left: a replica that is ready would have got it
            yield from self._wait()

    def close(self) -> None:
        """Ends the engines, and Ray if this object started it."""
        with suppress(RayError):
            calls = [replica.actor.close.remote() for replica in self._replicas if replica.is_ready]
            ray.wait(calls, num_returns=max(1, len(calls)), timeout=CLOSE_SECONDS)
            for replica in self._replicas:
                if replica.actor is not None:
                    ray.kill(replica.actor)
        if self._started_ray:
            ray.shutdown()

    def _start(self, replica: _ReplicaState) -> None:
        replica.actor = self._make_actor(*self._arguments, replica.journal_name)
        replica.calls, replica.is_ready = [replica.actor.start.remote()], False

    def _call(
        self, replica: _ReplicaState, source: Iterator[BatchRequest | Record]
    ) -> Iterator[Record]:
        """Gives requests to a replica, and calls ``run`` if it has any. Yields records that are
        among the requests."""
        while len(replica.calls) < MAX_CALLS:
            batch: list[BatchRequest] = []
            while len(replica.requests) < self._max_requests:
                item = self._unassigned.popleft() if self._unassigned else next(source, None)
                if isinstance(item, BatchRequest):
                    replica.requests[f"{ID_PREFIX}{item.number}"] = item
                    batch.append(item)
                elif item is not None:
                    yield item
                else:
                    break
            if not replica.requests:
                return
            replica.calls.append(replica.actor.run.remote(batch))

    def _stop(self) -> None:
        """Drops the requests that are not running."""
        self._is_stopping = True
        self._unassigned.clear()
        for replica in self._replicas:
            if replica.is_ready:
                replica.actor.stop.remote()
            else:
                self._end(replica)

    def _end(self, replica: _ReplicaState) -> None:
        """Drops a replica's requests, and ignores the results of its calls."""
        replica.calls.clear()
        replica.requests.clear()

    def _wait(self) -> list[Record]:
        """Waits up to POLL_SECONDS for a replica. Returns its records.

        Raises:
            EngineLostError: the first engine cannot be created, or the engines' processes keep
                dying.
        """
        # Only the oldest call of each replica: Ray may have the result of a later call first.
        pending = {replica.calls[0]: replica for replica in self._replicas if replica.calls}
        try:
            done, _ = ray.wait([*pending], timeout=POLL_SECONDS)
            return self._finish_call(pending[done[0]]) if done else []
        except RayError as error:
            raise EngineLostError(f"Ray does not respond: {describe(error)}") from error

    def _finish_call(self, replica: _ReplicaState) -> list[Record]:
        """Handles the result of a replica's oldest call. Returns the records in it."""
        try:
            result = ray.get(replica.calls.pop(0))
        except RayError as error:  # the actor has died or raised an exception
            reason = describe(getattr(error, "cause", error))
            has_started = any(each.node_id for each in self._replicas)
            if isinstance(error, RayTaskError) and not has_started:  # there is no engine yet
                raise EngineLostError(reason) from error
            logger.warning("a replica has failed", exc_info=error)
            self._replace(replica, reason)
            return []
        if not replica.is_ready:
            replica.node_id, replica.is_ready = result, True
            replica.calls.append(replica.actor.run.remote([*replica.requests.values()]))
            num_ready = sum(replica.is_ready for replica in self._replicas)
            logger.info("%d of %d engines are ready", num_ready, len(self._replicas))
            return []
        records = [record for record in result if record is not None]
        for record in records:
            del replica.requests[record["id"]]
            self._num_deaths = 0
        if len(records) < len(result):  # None in the result: the replica has stopped
            self._end(replica)
        return records

    def _replace(self, replica: _ReplicaState, reason: str) -> None:
        """Starts a new actor for a replica whose actor has died or has no engine."""
        if self._is_stopping:
            self._end(replica)
            return
        self._num_deaths += 1
        if self._num_deaths > MAX_DEATHS * len(self._replicas):
            raise EngineLostError(
                f"the engines' processes have died {self._num_deaths} times since a request last "
                f"finished: {reason}"
            )
        logger.warning("a replica has died and will be replaced: %s", reason)
        if not any(node["Alive"] and node["NodeID"] == replica.node_id for node in ray.nodes()):
            self._unassigned.extend(replica.requests.values())
            replica.requests.clear()
        ray.kill(replica.actor)  # in case it is alive but was unreachable
        self._start(replica)


def _connect() -> bool:
    """Connects to Ray, or starts it. Returns False if this process was already connected. Raises
    OSError if Ray cannot be reached."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(logging_level=logging.ERROR)
    except SystemExit:  # Ray's own SIGTERM handler raises it
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, handler)
    return True


def _find_resources(options: dict[str, Any], num_replicas: int) -> dict[str, int]:
    """Returns the resources of a replica, as arguments of ``ray.remote``. Raises ValueError if no
    replica fits in the cluster."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    size, device = options["tensor_parallel_size"], options["device"]
    if device.startswith("cuda:"):
        raise ValueError(f"replicas get their GPUs from Ray: use device='cuda', not {device!r}")
    uses_gpus = device == "cuda" or (device == "auto" and any("GPU" in node for node in nodes))
    counts = [int(node.get("GPU" if uses_gpus else "CPU", 0)) for node in nodes]
    if uses_gpus:
        resources = {"num_cpus": 1, "num_gpus": size}
        needs = f"{size} {'GPU' if size == 1 else 'GPUs'} of one machine"
    else:  # the largest number of CPUs with which all replicas fit
        sizes = range(max(counts, default=1), 1, -1)
        size = next((n for n in sizes if _num_fitting(counts, n) >= num_replicas), 1)
        resources = {"num_cpus": size, "num_gpus": 0}
        needs = "a CPU"
    needs += f"; the machines of the cluster have {counts}"
    num_fitting = _num_fitting(counts, size)
    if not num_fitting:
        raise ValueError(f"a replica needs {needs}")
    if num_fitting < num_replicas:
        message = "only %d of %d replicas fit in the cluster: each needs %s"
        logger.warning(message, num_fitting, num_replicas, needs)
    return resources


def _num_fitting(counts: list[int], size: int) -> int:
    """Returns how many replicas of a size fit in machines with these counts of GPUs or CPUs."""
    return sum(count // size for count in counts)
