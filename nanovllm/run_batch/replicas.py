"""Runs requests on several engines, which Ray distributes over the machines of a cluster."""

import logging
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, inf
from time import monotonic
from typing import Any
from uuid import uuid4

import ray

from nanovllm.run_batch.records import ID_PREFIX, Record
from nanovllm.run_batch.replica import Replica
from nanovllm.run_batch.request import BatchRequest
from nanovllm.run_batch.runner import EngineLostError, describe
from nanovllm.run_batch.stop import Stop

logger = logging.getLogger("nanovllm.run_batch")

MAX_DEATHS = 10  # per replica, since a request last finished; one request may cause three
RESTART_ATTEMPTS = 5  # attempts to create the engine of an actor that replaces another
POLL_SECONDS = 0.5
START_SECONDS = 60.0  # longest wait for the other replicas after the first one is ready
CLOSE_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class _ReplicaState:
    """What the driver knows of one replica. If its actor dies, a new actor replaces it.

    Attributes:
        journal_name: the name of the journal, which a new actor continues.
        requests: the requests that the replica has, by record id.
        actor: the handle of the ``Replica`` actor.
        call: the reference of the pending call of ``start`` or ``take``; None after the last call.
        node_id: the id of the actor's node in the Ray cluster.
        is_ready: whether the actor's engine is ready.
    """

    journal_name: str
    requests: dict[str, BatchRequest] = field(default_factory=dict)
    actor: Any = None
    call: Any = None
    node_id: str = ""
    is_ready: bool = False


class Replicas:
    """Runs requests on several engines, each in an actor of a Ray cluster.

    It has the interface of ``Runner``, which runs requests on one engine. Each replica has a
    bounded number of requests at a time. If its actor dies, a new actor gets these requests. If its
    machine is lost, any replica may get them.

    Args:
        options: the engines' options: the fields of Config.
        model_names: as for ``Runner``.
        num_replicas: the number of engines.
        num_requests: the number of requests to run, or an upper bound on it.

    Raises:
        OSError, ValueError: an engine does not fit in the cluster.
        EngineLostError: an engine cannot be created, or the engines' processes keep dying.
    """

    def __init__(
        self,
        options: dict[str, Any],
        model_names: Sequence[str],
        num_replicas: int,
        num_requests: int,
    ) -> None:
        # Twice a Runner's ``window``. A small job is divided evenly.
        self._max_requests = min(4 * options["max_num_seqs"], ceil(num_requests / num_replicas))
        self._unassigned: deque[BatchRequest] = deque()  # requests of lost machines
        self._num_deaths = 0  # since a request last finished
        self._is_stopping = False
        self._replicas = [
            _ReplicaState(f"nanovllm-{uuid4().hex}.journal") for _ in range(num_replicas)
        ]
        self._started_ray = _connect()
        try:
            resources, num_fitting = _find_resources(options, num_replicas)
            num_calls = 3  # ``take``, ``put`` and ``stop``
            self._make_actor = ray.remote(max_concurrency=num_calls, **resources)(Replica).remote
            device = "cuda" if resources["num_gpus"] else "cpu"
            self._arguments = options | {"device": device}, model_names
            for replica in self._replicas:
                self._start(replica, num_attempts=1)
            self._wait_for_replicas(min(num_replicas, num_fitting))
        except BaseException:
            self.close()
            raise

    def run(
        self, requests: Iterable[BatchRequest | Record], stop: Stop | None = None
    ) -> Iterator[Record]:
        """Yields the record of each request as it finishes. Records among ``requests`` are passed
        through.

        Reads only as many requests as the engines can take. Requests that ``stop`` ends get no
        record.

        Raises:
            EngineLostError: engines failed and could not be replaced.
        """
        source = iter(requests)
        is_exhausted = False
        while stop is None or not stop.requested:
            for replica in self._replicas:
                batch: list[BatchRequest] = []
                while replica.is_ready and len(replica.requests) + len(batch) < self._max_requests:
                    item = self._unassigned.popleft() if self._unassigned else next(source, None)
                    if item is None:
                        is_exhausted = True
                        break
                    if isinstance(item, BatchRequest):
                        batch.append(item)
                    else:
                        yield item
                replica.requests |= {f"{ID_PREFIX}{request.number}": request for request in batch}
                if batch:
                    replica.actor.put.remote(batch)
            if is_exhausted and not self._unassigned and not self._is_busy:
                return
            yield from self._wait()
        grace = max(0.0, stop.deadline - monotonic())
        logger.info("stopping: running requests have %.0f seconds to finish", grace)
        self._stop_all(grace)
        while self._is_busy and monotonic() < stop.deadline + CLOSE_SECONDS:
            yield from self._wait()

    def close(self) -> None:
        """Ends the engines, and Ray if this object started it."""
        self._stop_all(0.0)
        calls = [replica.call for replica in self._replicas if replica.call]
        with suppress(ray.exceptions.RayError):
            ray.wait(calls, num_returns=max(1, len(calls)), timeout=CLOSE_SECONDS)
            for replica in self._replicas:
                if replica.actor is not None:
                    ray.kill(replica.actor)
        if self._started_ray:
            ray.shutdown()

    @property
    def _is_busy(self) -> bool:
        return any(replica.requests for replica in self._replicas)

    def _start(self, replica: _ReplicaState, num_attempts: int) -> None:
        replica.actor = self._make_actor(*self._arguments, replica.journal_name, num_attempts)
        replica.call, replica.is_ready = replica.actor.start.remote(), False

    def _stop_all(self, grace: float) -> None:
        """Stops the replicas. Does not wait for those whose engines are not ready."""
        self._is_stopping = True
        for replica in self._replicas:
            if replica.is_ready:
                replica.actor.stop.remote(grace)
            else:
                self._end(replica)

    def _end(self, replica: _ReplicaState) -> None:
        replica.call = None
        replica.requests.clear()

    def _wait(self) -> list[Record]:
        """Waits up to POLL_SECONDS for a replica. Returns its records.

        Raises:
            EngineLostError: an engine cannot be created, or the engines' processes keep dying.
        """
        pending = {replica.call: replica for replica in self._replicas if replica.call}
        try:
            done, _ = ray.wait([*pending], timeout=POLL_SECONDS)
            if not done:
                return []
            replica = pending[done[0]]  # ``wait`` returns no more than one call
            try:
                result = ray.get(replica.call)
            except ray.exceptions.RayActorError as error:
                self._replace(replica, error)
                return []
        except ray.exceptions.RayError as error:
            raise EngineLostError(f"Ray does not respond: {describe(error)}") from error
        if not replica.is_ready:
            replica.node_id, failure = result
            if failure:
                raise EngineLostError(failure)
            replica.is_ready = True
            replica.actor.put.remote([*replica.requests.values()])
            result = []
        replica.call = replica.actor.take.remote()
        records = [record for record in result if record is not None]
        for record in records:
            del replica.requests[record["id"]]
            self._num_deaths = 0
        if len(records) < len(result):  # None in the result: the replica has stopped
            self._end(replica)
        return records

    def _replace(self, replica: _ReplicaState, error: Exception) -> None:
        """Starts a new actor for a replica whose actor has died."""
        if self._is_stopping:
            self._end(replica)
            return
        self._num_deaths += 1
        if self._num_deaths > MAX_DEATHS * len(self._replicas):
            raise EngineLostError(
                f"the engines' processes have died {self._num_deaths} times since a request last "
                f"finished: {describe(error)}"
            )
        logger.warning("a replica has died and will be replaced: %s", describe(error))
        if not any(node["Alive"] and node["NodeID"] == replica.node_id for node in ray.nodes()):
            self._unassigned.extend(replica.requests.values())
            replica.requests.clear()
        ray.kill(replica.actor)  # in case it is alive but was unreachable
        self._start(replica, RESTART_ATTEMPTS)

    def _wait_for_replicas(self, num_expected: int) -> None:
        """Waits for the first engine, however long it takes, and then at most START_SECONDS for the
        others."""
        logger.info("waiting for Ray to start %d engines", len(self._replicas))
        deadline, num_ready = inf, 0
        while num_ready < num_expected and monotonic() < deadline:
            self._wait()
            num_ready = sum(replica.is_ready for replica in self._replicas)
            if num_ready:
                deadline = min(deadline, monotonic() + START_SECONDS)
        logger.info("%d of %d engines are ready", num_ready, len(self._replicas))


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
        if signal.getsignal(signal.SIGTERM) is not handler:
            signal.signal(signal.SIGTERM, handler)
    return True


def _find_resources(options: dict[str, Any], num_replicas: int) -> tuple[dict[str, int], int]:
    """Returns the resources of a replica, as arguments of ``ray.remote``, and how many replicas fit
    in the cluster. Raises ValueError if none fits."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    size, device = options["tensor_parallel_size"], options["device"]
    if device.startswith("cuda:"):
        raise ValueError(f"replicas get their GPUs from Ray: use device='cuda', not {device!r}")
    num_gpus = [int(node.get("GPU", 0)) for node in nodes]
    num_cpus = [int(node.get("CPU", 0)) for node in nodes]
    if device == "cuda" or (device == "auto" and any(num_gpus)):
        resources = {"num_cpus": 1, "num_gpus": size}
        num_fitting = sum(num // size for num in num_gpus)
        noun = "GPU" if size == 1 else "GPUs"
        needs = f"{size} {noun} of one machine; the machines of the cluster have {num_gpus}"
    else:
        cpu_counts = range(1, max(num_cpus, default=0) + 1)
        fitting = {cpus: sum(num // cpus for num in num_cpus) for cpus in cpu_counts}
        cpus = max((cpus for cpus in cpu_counts if fitting[cpus] >= num_replicas), default=1)
        resources = {"num_cpus": cpus, "num_gpus": 0}
        num_fitting = fitting.get(cpus, 0)
        needs = f"a CPU; the machines of the cluster have {num_cpus}"
    if not num_fitting:
        raise ValueError(f"a replica needs {needs}")
    if num_fitting < num_replicas:
        logger.warning(
            "only %d of %d replicas fit in the cluster: each needs %s",
            num_fitting,
            num_replicas,
            needs,
        )
    return resources, num_fitting
