"""Runs requests on several engines, which Ray Data distributes over the machines of a cluster."""

import logging
import os
import pickle
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import Any

import ray
import ray.data

from nanovllm.run_batch import feed
from nanovllm.run_batch.feed import Feed, Status, stream_batches
from nanovllm.run_batch.records import Record
from nanovllm.run_batch.replica import Replica, format_error
from nanovllm.run_batch.request import BatchRequest
from nanovllm.run_batch.runner import EngineLostError, Stop

logger = logging.getLogger("nanovllm.run_batch")
ray.cloudpickle.register_pickle_by_value(feed)  # its processes need not import PyTorch

CALLS_PER_REPLICA = 64  # batches that a replica runs at once
QUEUED_CALLS_PER_REPLICA = 8  # batches on their way to a replica
MIN_BATCHES_PER_REPLICA = 8  # a small job has smaller batches, so that each replica gets this many
BATCH_BYTES = 1 << 20
MAX_DEATHS = 10  # per replica, between two finished batches; one request may cause three
POLL_SECONDS = 0.5
LOG_SECONDS = 60.0
START_SECONDS = 60.0  # longest wait for the other replicas after the first one is ready
RESEND_SECONDS = 60.0  # shortest wait for a batch before batches of a lost machine are sent again
CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Resources:
    """The resources that a replica needs, and the number of replicas that fit in the cluster."""

    device: str
    num_cpus: int
    num_gpus: int
    num_slots: int


@dataclass(slots=True)
class _Batch:
    """A batch in flight: its pickled requests, and when they were first sent."""

    requests: bytes
    since: float = field(default_factory=monotonic)


class Replicas:
    """Runs requests on several engines, each in an actor of a Ray cluster.

    It has the interface of ``Runner``, which runs requests on one engine. Batches of requests are
    the rows of an endless dataset. Only as many are in memory as the engines can take. Ray Data
    assigns batches to engines, restarts engines that have died, and repeats their batches. If a
    machine is lost and no batch finishes for a while, all batches in flight are sent again. If a
    batch finishes twice, only the first result is used.

    Args:
        options: the engines' options: the fields of Config.
        model_names: as for ``Runner``.
        num_replicas: the number of engines.
        num_requests: the number of requests to run, or an upper bound of it.

    Raises:
        OSError, ValueError: an engine cannot be created, or does not fit in the cluster.
        EngineLostError: the engines' processes keep dying.
    """

    def __init__(
        self,
        options: dict[str, Any],
        model_names: Sequence[str],
        num_replicas: int,
        num_requests: int,
    ) -> None:
        self._num_replicas = num_replicas
        # An engine's calls together hold twice as many requests as its Runner has in flight.
        most = min(
            4 * options["max_num_seqs"] // CALLS_PER_REPLICA,
            num_requests // num_replicas // MIN_BATCHES_PER_REPLICA,
        )
        self._batch_size = max(1, most)
        self._in_flight: dict[int, _Batch] = {}  # by key
        self._num_batches = 0
        self._results: SimpleQueue[dict[str, Any] | Exception] = SimpleQueue()
        self._resend_seconds = RESEND_SECONDS
        self._deadline = inf  # when batches are sent again, if none finishes before
        self._last_check = -inf
        self._num_starts: int | None = None  # replica starts when a batch last finished
        self._feed: Any = None
        self._thread = Thread(target=self._iterate, daemon=True)
        self._started_ray = _connect()
        try:
            self._num_losses = _count_dead_nodes()
            resources = _find_resources(options, num_replicas)
            this_node = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
            self._feed = ray.remote(num_cpus=0, label_selector=this_node)(Feed).remote()
            arguments = (options | {"device": resources.device}, model_names, self._feed)
            self._dataset = _make_dataset(self._feed, this_node, arguments, resources, num_replicas)
            self._thread.start()
            self._wait_for_replicas(resources.num_slots)
        except BaseException:
            self.close()
            raise

    def run(
        self, requests: Iterable[BatchRequest | Record], stop: Stop | None = None
    ) -> Iterator[Record]:
        """Yields the record of each request when its batch finishes. Records among ``requests`` are
        passed through.

        Reads only as many requests as the engines can take. Requests that ``stop`` ends get no
        record.

        Raises:
            EngineLostError: engines failed and could not be replaced.
        """
        source = iter(requests)
        is_exhausted = False
        self._deadline = monotonic() + self._resend_seconds
        max_batches = self._num_replicas * (CALLS_PER_REPLICA + QUEUED_CALLS_PER_REPLICA)
        while stop is None or not stop.requested:
            while not is_exhausted and len(self._in_flight) < max_batches:
                batch: list[bytes] = []
                while len(batch) < self._batch_size and sum(map(len, batch)) < BATCH_BYTES:
                    item = next(source, None)
                    if item is None:
                        is_exhausted = True
                        break
                    if isinstance(item, BatchRequest):
                        batch.append(pickle.dumps(item))
                    else:
                        yield item
                if batch:
                    self._in_flight[self._num_batches] = _Batch(pickle.dumps(batch))
                    self._put(self._num_batches)
                    self._num_batches += 1
            if not self._in_flight:
                return
            with suppress(Empty):
                yield from self._take()
            self._check()
        grace = max(0.0, stop.deadline - monotonic())
        logger.info("stopping: running requests have %.0f seconds to finish", grace)
        self._feed.stop.remote(grace)
        while self._in_flight and monotonic() < stop.deadline + CLOSE_SECONDS:
            if not self._thread.is_alive() and self._results.empty():
                return
            with suppress(Empty, EngineLostError):
                yield from self._take()

    def close(self) -> None:
        """Ends the engines, and Ray if this object started it."""
        if self._feed is not None:
            with suppress(ray.exceptions.RayError):
                ray.get(self._feed.stop.remote(0.0), timeout=CLOSE_SECONDS)
                self._join(CLOSE_SECONDS)
                for replica in ray.get(self._feed.replicas.remote(), timeout=CLOSE_SECONDS):
                    ray.kill(replica)
            self._join(CLOSE_SECONDS)
            ray.kill(self._feed)
            self._feed = None
        if self._started_ray:
            ray.shutdown()

    def _join(self, seconds: float) -> None:
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _iterate(self) -> None:
        """Runs the dataset and puts its rows, or its error, into the results. Runs in a thread."""
        try:
            # With prefetching, a finished batch would wait for the next one.
            batches = self._dataset.iter_batches(
                batch_size=None, prefetch_batches=0, batch_format="pyarrow"
            )
            for batch in batches:
                for row in batch.to_pylist():
                    self._results.put(row)
        except Exception as error:
            self._results.put(error)

    def _put(self, key: int) -> None:
        self._feed.put.remote(key, self._in_flight[key].requests)

    def _take(self) -> list[Record]:
        """Waits for a batch to finish and returns its records.

        Raises:
            Empty: no batch has finished within POLL_SECONDS.
            EngineLostError: the dataset has failed, so no batch will finish.
        """
        result = self._results.get(timeout=POLL_SECONDS)
        if isinstance(result, Exception):
            raise EngineLostError(f"Ray Data has failed: {format_error(result)}") from result
        batch = self._in_flight.pop(result["key"], None)
        if batch is None:  # it was sent twice and has finished before
            return []
        self._resend_seconds = max(self._resend_seconds, 2 * (monotonic() - batch.since))
        self._deadline = monotonic() + self._resend_seconds
        self._num_starts = None
        return pickle.loads(result["records"])

    def _wait_for_replicas(self, num_slots: int) -> None:
        """Waits for the first engine without a limit, then for the others up to START_SECONDS."""
        logged, first = monotonic(), inf
        while True:
            status = self._status()
            if status.failure:
                raise ValueError(status.failure)
            if not self._results.empty():
                self._take()
            if status.num_starts > (1 + MAX_DEATHS) * self._num_replicas:
                raise EngineLostError("the engines' processes keep dying before they are ready")
            now = monotonic()
            if status.num_ready:
                first = min(first, now)
            if status.num_ready >= num_slots or now - first > START_SECONDS:
                logger.info("%d of %d engines are ready", status.num_ready, self._num_replicas)
                return
            if now - logged > LOG_SECONDS:
                logged = now
                logger.info("waiting for Ray to start engines")
            sleep(0.1)

    def _check(self) -> None:
        """Checks every POLL_SECONDS that the replicas are alive. Sends batches again if a machine
        was lost."""
        if monotonic() - self._last_check < POLL_SECONDS:
            return
        self._last_check = monotonic()
        status = self._status()
        if status.failure:
            raise EngineLostError(status.failure)
        if self._num_starts is None:
            self._num_starts = status.num_starts
        num_deaths = status.num_starts - self._num_starts
        if num_deaths > MAX_DEATHS * self._num_replicas:
            raise EngineLostError(
                f"the engines' processes have died {num_deaths} times since a batch last finished"
            )
        if monotonic() > self._deadline:
            self._deadline = monotonic() + self._resend_seconds
            num_losses = status.num_reruns + _count_dead_nodes()
            if num_losses > self._num_losses:
                self._num_losses = num_losses
                logger.warning("sending %d unfinished batches again", len(self._in_flight))
                for key in self._in_flight:
                    self._put(key)

    def _status(self) -> Status:
        try:
            return ray.get(self._feed.status.remote())
        except ray.exceptions.RayError as error:
            raise EngineLostError(f"Ray does not respond: {format_error(error)}") from error


def _connect() -> bool:
    """Connects to Ray, or starts it. Returns False if this process was already connected. Raises
    OSError if Ray cannot be reached."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"ray\.data\.")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised as well
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(logging_level=logging.ERROR)
    except SystemExit:  # Ray's own SIGTERM handler raises it
        raise KeyboardInterrupt from None
    finally:
        if signal.getsignal(signal.SIGTERM) is not handler:
            signal.signal(signal.SIGTERM, handler)
    return True


def _count_dead_nodes() -> int:
    return sum(not node["Alive"] for node in ray.nodes())


def _find_resources(options: dict[str, Any], num_replicas: int) -> _Resources:
    """Returns the resources of a replica. Raises ValueError if none fits in the cluster."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    size, device = options["tensor_parallel_size"], options["device"]
    if device.startswith("cuda:"):
        raise ValueError(f"replicas get their GPUs from Ray: use device='cuda', not {device!r}")
    num_gpus = [int(node.get("GPU", 0)) for node in nodes]
    num_cpus = [int(node.get("CPU", 0)) for node in nodes]
    if device == "cuda" or (device == "auto" and any(num_gpus)):
        num_slots = sum(num // size for num in num_gpus)
        resources = _Resources("cuda", 1, size, num_slots)
        noun = "GPU" if size == 1 else "GPUs"
        needs = f"{size} {noun} of one machine; the machines of the cluster have {num_gpus}"
    else:
        shares = range(1, max(num_cpus, default=0) + 1)
        slots = {share: sum(num // share for num in num_cpus) for share in shares}
        share = max((share for share in shares if slots[share] >= num_replicas), default=1)
        resources = _Resources("cpu", share, 0, slots.get(share, 0))
        needs = f"a CPU; the machines of the cluster have {num_cpus}"
    if not resources.num_slots:
        raise ValueError(f"a replica needs {needs}")
    if resources.num_slots < num_replicas:
        logger.warning(
            "only %d of %d replicas fit in the cluster: each needs %s",
            resources.num_slots,
            num_replicas,
            needs,
        )
    return resources


def _make_dataset(
    source: Any,
    this_node: dict[str, str],
    arguments: tuple[Any, ...],
    resources: _Resources,
    num_replicas: int,
) -> Any:
    """Returns the dataset that maps the batches of a Feed to their records. ``arguments`` are those
    of ``Replica``."""
    dataset = ray.data.from_items([{"key": -1}])
    context = dataset.context
    context.enable_progress_bars = False
    context.execution_no_progress_timeout_s = -1
    context.target_max_block_size = 1  # one task and one result per row
    context._max_num_blocks_in_streaming_gen_buffer = None  # read no more batches than needed
    return dataset.flat_map(
        stream_batches,
        fn_kwargs={"feed": source},
        num_cpus=0,
        label_selector=this_node,
    ).map(
        Replica,
        fn_constructor_args=arguments,
        num_cpus=resources.num_cpus,
        num_gpus=resources.num_gpus or None,
        compute=ray.data.ActorPoolStrategy(
            size=num_replicas,
            max_tasks_in_flight_per_actor=CALLS_PER_REPLICA,
            max_concurrent_calls_per_actor=CALLS_PER_REPLICA,
            enable_true_multi_threading=True,
        ),
    )
