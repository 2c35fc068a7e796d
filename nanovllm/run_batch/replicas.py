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

MAX_DEATHS = 10  # per replica, between two records; one request may cause three
RESTART_ATTEMPTS = 5  # to create the engine of a new actor
POLL_SECONDS = 0.5
START_SECONDS = 60.0  # longest wait for the other replicas after the first one is ready
CLOSE_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class _Slot:
    """The place of one replica. If its actor dies, another takes its place.

    Attributes:
        journal_name: the name of its actors' journal.
        requests: the requests that the replica has, by record id.
        actor: the handle of the ``Replica``.
        call: the call of the actor's ``start`` or ``take`` that is running; None after the last.
        machine: the id of the actor's machine.
        is_ready: whether the actor's engine is ready.
    """

    journal_name: str
    requests: dict[str, BatchRequest] = field(default_factory=dict)
    actor: Any = None
    call: Any = None
    machine: str = ""
    is_ready: bool = False


class Replicas:
    """Runs requests on several engines, each in an actor of a Ray cluster.

    It has the interface of ``Runner``, which runs requests on one engine. Each replica has at most
    a fixed number of requests at a time. If its actor dies, another actor gets these requests; or
    the other replicas, if the machine is lost.

    Args:
        options: the engines' options: the fields of Config.
        model_names: as for ``Runner``.
        num_replicas: the number of engines.
        num_requests: the number of requests to run, or an upper bound of it.

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
        # Twice as many as a Runner has in flight; in a small job, a fair share.
        self._max_requests = min(4 * options["max_num_seqs"], ceil(num_requests / num_replicas))
        self._unassigned: deque[BatchRequest] = deque()  # requests of lost machines
        self._num_deaths = 0  # since a request last finished
        self._is_stopping = False
        self._slots = [_Slot(f"nanovllm-{uuid4().hex}.journal") for _ in range(num_replicas)]
        self._started_ray = _connect()
        try:
            resources, num_fitting = _find_resources(options, num_replicas)
            num_calls = 3  # ``take``, ``put`` and ``stop``
            self._make_actor = ray.remote(max_concurrency=num_calls, **resources)(Replica).remote
            device = "cuda" if resources["num_gpus"] else "cpu"
            self._arguments = options | {"device": device}, model_names
            for slot in self._slots:
                self._start(slot, num_attempts=1)
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
            for slot in self._slots:
                batch: list[BatchRequest] = []
                while slot.is_ready and len(slot.requests) + len(batch) < self._max_requests:
                    item = self._unassigned.popleft() if self._unassigned else next(source, None)
                    if item is None:
                        is_exhausted = True
                        break
                    if isinstance(item, BatchRequest):
                        batch.append(item)
                    else:
                        yield item
                slot.requests |= {f"{ID_PREFIX}{request.number}": request for request in batch}
                if batch:
                    slot.actor.put.remote(batch)
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
        calls = [slot.call for slot in self._slots if slot.call]
        with suppress(ray.exceptions.RayError):
            ray.wait(calls, num_returns=max(1, len(calls)), timeout=CLOSE_SECONDS)
            for slot in self._slots:
                if slot.actor is not None:
                    ray.kill(slot.actor)
        if self._started_ray:
            ray.shutdown()

    @property
    def _is_busy(self) -> bool:
        return any(slot.requests for slot in self._slots)

    def _start(self, slot: _Slot, num_attempts: int) -> None:
        slot.actor = self._make_actor(*self._arguments, slot.journal_name, num_attempts)
        slot.call, slot.is_ready = slot.actor.start.remote(), False

    def _stop_all(self, grace: float) -> None:
        """Stops the replicas, and drops those whose engines are not ready."""
        self._is_stopping = True
        for slot in self._slots:
            if slot.is_ready:
                slot.actor.stop.remote(grace)
            else:
                self._end(slot)

    def _end(self, slot: _Slot) -> None:
        slot.call = None
        slot.requests.clear()

    def _wait(self) -> list[Record]:
        """Waits up to POLL_SECONDS for a replica. Returns its records.

        Raises:
            EngineLostError: an engine cannot be created, or the engines' processes keep dying.
        """
        slots = {slot.call: slot for slot in self._slots if slot.call}
        try:
            done, _ = ray.wait([*slots], timeout=POLL_SECONDS)
            if not done:
                return []
            slot = slots[done[0]]  # ``wait`` returns no more than one call
            try:
                result = ray.get(slot.call)
            except ray.exceptions.RayActorError as error:
                self._replace(slot, error)
                return []
        except ray.exceptions.RayError as error:
            raise EngineLostError(f"Ray does not respond: {describe(error)}") from error
        if not slot.is_ready:
            slot.machine, failure = result
            if failure:
                raise EngineLostError(failure)
            slot.is_ready = True
            slot.actor.put.remote([*slot.requests.values()])
            result = []
        slot.call = slot.actor.take.remote()
        records = [record for record in result if record is not None]
        for record in records:
            del slot.requests[record["id"]]
            self._num_deaths = 0
        if len(records) < len(result):  # these were the last
            self._end(slot)
        return records

    def _replace(self, slot: _Slot, error: Exception) -> None:
        """Starts another actor in the place of one that has died."""
        if self._is_stopping:
            self._end(slot)
            return
        self._num_deaths += 1
        if self._num_deaths > MAX_DEATHS * len(self._slots):
            raise EngineLostError(
                f"the engines' processes have died {self._num_deaths} times since a request last "
                f"finished: {describe(error)}"
            )
        logger.warning("a replica has died, and another takes its place: %s", describe(error))
        if not any(node["Alive"] and node["NodeID"] == slot.machine for node in ray.nodes()):
            self._unassigned.extend(slot.requests.values())
            slot.requests.clear()
        ray.kill(slot.actor)  # in case that it is alive and out of reach
        self._start(slot, RESTART_ATTEMPTS)

    def _wait_for_replicas(self, num_expected: int) -> None:
        """Waits for the first engine without a limit, then for the others up to START_SECONDS."""
        logger.info("waiting for Ray to start %d engines", len(self._slots))
        deadline, num_ready = inf, 0
        while num_ready < num_expected and monotonic() < deadline:
            self._wait()
            num_ready = sum(slot.is_ready for slot in self._slots)
            if num_ready:
                deadline = min(deadline, monotonic() + START_SECONDS)
        logger.info("%d of %d engines are ready", num_ready, len(self._slots))


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
    """Returns the resources of a replica, as options of Ray, and the number of replicas that fit in
    the cluster. Raises ValueError if none fits."""
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
        shares = range(1, max(num_cpus, default=0) + 1)
        fitting = {share: sum(num // share for num in num_cpus) for share in shares}
        share = max((share for share in shares if fitting[share] >= num_replicas), default=1)
        resources = {"num_cpus": share, "num_gpus": 0}
        num_fitting = fitting.get(share, 0)
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
