"""Runs requests on several engines, which Ray Data spreads over the machines of a cluster."""

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
from nanovllm.run_batch.feed import Feed, Status, bring_batches
from nanovllm.run_batch.records import Record
from nanovllm.run_batch.replica import Replica, explain
from nanovllm.run_batch.request import BatchRequest
from nanovllm.run_batch.runner import EngineLostError, Stop

logger = logging.getLogger("nanovllm.run_batch")
ray.cloudpickle.register_pickle_by_value(feed)  # its processes need not import PyTorch

CALLS = 64  # batches that a replica has at once
CALLS_WAITING = 8  # and for each replica those on their way
BATCHES_EACH = 8  # of a small job, for each replica
BATCH_BYTES = 1 << 20
MAX_DEATHS = 10  # for each replica, while nothing is finished; a request may cause three
POLL_SECONDS = 0.5
LOG_SECONDS = 60.0
START_SECONDS = 60.0  # that the first replica waits for the others
PATIENCE_SECONDS = 60.0  # with what a lost machine may have had
CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Place:
    """What a replica needs, and how many such places the cluster has."""

    device: str
    num_cpus: int
    num_gpus: int
    num_places: int


@dataclass(slots=True)
class _Batch:
    """Requests, pickled, that have been handed out."""

    requests: bytes
    since: float = field(default_factory=monotonic)


class Replicas:
    """Runs requests on several engines, each an actor of a Ray cluster, as ``Runner`` on one.

    Batches of requests go into a dataset without an end, in memory no more of them than the
    engines have room for, and come back as records. Ray Data says which engine gets which batch,
    starts engines again that have died, and gives them again what they had. If a machine is gone,
    and nothing comes back any more, what has not come is handed out again; what comes back twice
    counts once.

    Args:
        options: of the engines: the fields of Config.
        model_names: as ``Runner``'s.
        num_replicas: number of engines.
        num_requests: at most so many there are to run.

    Raises:
        OSError, ValueError: an engine cannot be made, or has no place in the cluster.
        EngineLostError: the engines' processes die.
    """

    def __init__(
        self,
        options: dict[str, Any],
        model_names: Sequence[str],
        num_replicas: int,
        num_requests: int,
    ) -> None:
        self._num_replicas = num_replicas
        # Twice as much as an engine's Runner has in flight; of a small job something for each.
        most = min(
            4 * options["max_num_seqs"] // CALLS, num_requests // num_replicas // BATCHES_EACH
        )
        self._batch_size = max(1, most)
        self._out: dict[int, _Batch] = {}  # by key: what has not come back
        self._num_batches = 0
        self._results: SimpleQueue[dict[str, Any] | Exception] = SimpleQueue()
        self._patience = PATIENCE_SECONDS  # while nothing comes back
        self._deadline = inf  # of the patience
        self._checked = -inf
        self._num_starts: int | None = None  # of replicas, when something last came back
        self._feed: Any = None
        self._thread = Thread(target=self._iterate, daemon=True)
        self._is_ours = _connect()
        try:
            self._num_losses = _count_dead_nodes()
            place = _find_place(options, num_replicas)
            here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
            self._feed = ray.remote(num_cpus=0, label_selector=here)(Feed).remote()
            arguments = (options | {"device": place.device}, model_names, self._feed)
            self._dataset = _make_dataset(self._feed, here, arguments, place, num_replicas)
            self._thread.start()
            self._await_replicas(place.num_places)
        except BaseException:
            self.close()
            raise

    def run(
        self, requests: Iterable[BatchRequest | Record], stop: Stop | None = None
    ) -> Iterator[Record]:
        """Yields the record of each request when its batch has come back, and records among the
        requests as they are.

        Reads no further than there is room. Requests that ``stop`` ends have no record.

        Raises:
            EngineLostError: engines broke, and no new ones could be made.
        """
        source = iter(requests)
        is_read = False
        self._deadline = monotonic() + self._patience
        room = self._num_replicas * (CALLS + CALLS_WAITING)
        while stop is None or not stop.requested:
            while not is_read and len(self._out) < room:
                batch: list[bytes] = []
                while len(batch) < self._batch_size and sum(map(len, batch)) < BATCH_BYTES:
                    item = next(source, None)
                    if item is None:
                        is_read = True
                        break
                    if isinstance(item, BatchRequest):
                        batch.append(pickle.dumps(item))
                    else:
                        yield item
                if batch:
                    self._out[self._num_batches] = _Batch(pickle.dumps(batch))
                    self._put(self._num_batches)
                    self._num_batches += 1
            if not self._out:
                return
            with suppress(Empty):
                yield from self._take()
            self._check()
        grace = max(0.0, stop.deadline - monotonic())
        logger.info("ending: what is running has %.0f seconds to finish", grace)
        self._feed.stop.remote(grace)
        while self._out and monotonic() < stop.deadline + CLOSE_SECONDS:
            if not self._thread.is_alive() and self._results.empty():
                return
            with suppress(Empty, EngineLostError):
                yield from self._take()

    def close(self) -> None:
        """Ends the engines, and Ray if it was not there before."""
        if self._feed is not None:
            with suppress(ray.exceptions.RayError):
                ray.get(self._feed.stop.remote(0.0), timeout=CLOSE_SECONDS)
                self._join(CLOSE_SECONDS)
                for replica in ray.get(self._feed.replicas.remote(), timeout=CLOSE_SECONDS):
                    ray.kill(replica)
            self._join(CLOSE_SECONDS)
            ray.kill(self._feed)
            self._feed = None
        if self._is_ours:
            ray.shutdown()

    def _join(self, seconds: float) -> None:
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _iterate(self) -> None:
        """Where Ray Data works: a thread of its own."""
        try:
            # Without prefetching a batch would wait here for the next.
            batches = self._dataset.iter_batches(
                batch_size=None, prefetch_batches=0, batch_format="pyarrow"
            )
            for batch in batches:
                for row in batch.to_pylist():
                    self._results.put(row)
        except Exception as error:
            self._results.put(error)

    def _put(self, key: int) -> None:
        self._feed.put.remote(key, self._out[key].requests)

    def _take(self) -> list[Record]:
        """The records of a batch. Raises Empty if none comes now, EngineLostError if none will."""
        result = self._results.get(timeout=POLL_SECONDS)
        if isinstance(result, Exception):
            raise EngineLostError(f"Ray Data has failed: {explain(result)}") from result
        batch = self._out.pop(result["key"], None)
        if batch is None:  # it has come before
            return []
        self._patience = max(self._patience, 2 * (monotonic() - batch.since))
        self._deadline = monotonic() + self._patience
        self._num_starts = None
        return pickle.loads(result["records"])

    def _await_replicas(self, num_places: int) -> None:
        """Waits for an engine as long as it takes, for the others a while."""
        logged, first = monotonic(), inf
        while True:
            status = self._status()
            if status.failure:
                raise ValueError(status.failure)
            if not self._results.empty():
                self._take()
            if status.num_starts > (1 + MAX_DEATHS) * self._num_replicas:
                raise EngineLostError("the engines' processes die before they are ready")
            now = monotonic()
            if status.num_ready:
                first = min(first, now)
            if status.num_ready >= num_places or now - first > START_SECONDS:
                logger.info("%d of %d engines are ready", status.num_ready, self._num_replicas)
                return
            if now - logged > LOG_SECONDS:
                logged = now
                logger.info("waiting for Ray to start engines")
            sleep(0.1)

    def _check(self) -> None:
        """Now and then, whether what is waited for can come."""
        if monotonic() - self._checked < POLL_SECONDS:
            return
        self._checked = monotonic()
        status = self._status()
        if status.failure:
            raise EngineLostError(status.failure)
        if self._num_starts is None:
            self._num_starts = status.num_starts
        num_deaths = status.num_starts - self._num_starts
        if num_deaths > MAX_DEATHS * self._num_replicas:
            raise EngineLostError(
                f"the engines' processes have died {num_deaths} times since the last batch came"
            )
        if monotonic() > self._deadline:
            self._deadline = monotonic() + self._patience
            num_losses = status.num_reruns + _count_dead_nodes()
            if num_losses > self._num_losses:
                self._num_losses = num_losses
                logger.warning("handing out again %d batches that have not come", len(self._out))
                for key in self._out:
                    self._put(key)

    def _status(self) -> Status:
        try:
            return ray.get(self._feed.status.remote())
        except ray.exceptions.RayError as error:
            raise EngineLostError(f"Ray does not answer: {explain(error)}") from error


def _connect() -> bool:
    """Connects to Ray, or starts it; returns whether it did. Raises OSError."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"ray\.data\.")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised as well
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(logging_level=logging.ERROR)
    except SystemExit:  # as its handler of SIGTERM does
        raise KeyboardInterrupt from None
    finally:
        if signal.getsignal(signal.SIGTERM) is not handler:
            signal.signal(signal.SIGTERM, handler)
    return True


def _count_dead_nodes() -> int:
    return sum(not node["Alive"] for node in ray.nodes())


def _find_place(options: dict[str, Any], num_replicas: int) -> _Place:
    """Raises ValueError if the cluster has no place for a replica."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    size, device = options["tensor_parallel_size"], options["device"]
    if device.startswith("cuda:"):
        raise ValueError(f"replicas get their GPUs from Ray: use device='cuda', not {device!r}")
    num_gpus = [int(node.get("GPU", 0)) for node in nodes]
    num_cpus = [int(node.get("CPU", 0)) for node in nodes]
    if device == "cuda" or (device == "auto" and any(num_gpus)):
        num_places = sum(num // size for num in num_gpus)
        place = _Place("cuda", 1, size, num_places)
        noun = "GPU" if size == 1 else "GPUs"
        needs = f"{size} {noun} of one machine; the machines of the cluster have {num_gpus}"
    else:
        shares = range(1, max(num_cpus, default=0) + 1)
        places = {share: sum(num // share for num in num_cpus) for share in shares}
        share = max((share for share in shares if places[share] >= num_replicas), default=1)
        place = _Place("cpu", share, 0, places.get(share, 0))
        needs = f"a CPU; the machines of the cluster have {num_cpus}"
    if not place.num_places:
        raise ValueError(f"a replica needs {needs}")
    if place.num_places < num_replicas:
        logger.warning(
            "there is room for %d of %d replicas: each needs %s",
            place.num_places,
            num_replicas,
            needs,
        )
    return place


def _make_dataset(
    source: Any, here: dict[str, str], arguments: tuple[Any, ...], place: _Place, num_replicas: int
) -> Any:
    """The batches of a Feed, and what replicas made with these arguments make of them."""
    dataset = ray.data.from_items([{"key": -1}])
    context = dataset.context
    context.enable_progress_bars = False
    context.execution_no_progress_timeout_s = -1
    context.target_max_block_size = 1  # each row by itself: one task for each, and one result
    context._max_num_blocks_in_streaming_gen_buffer = None  # batches come no faster than wanted
    return dataset.flat_map(
        bring_batches,
        fn_kwargs={"feed": source},
        num_cpus=0,
        label_selector=here,
    ).map(
        Replica,
        fn_constructor_args=arguments,
        num_cpus=place.num_cpus,
        num_gpus=place.num_gpus or None,
        compute=ray.data.ActorPoolStrategy(
            size=num_replicas,
            max_tasks_in_flight_per_actor=CALLS,
            max_concurrent_calls_per_actor=CALLS,
            enable_true_multi_threading=True,
        ),
    )
