"""One engine of several, in a process of Ray's."""

import atexit
import logging
import os
import pickle
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import ray

from nanovllm.llm import LLM
from nanovllm.run_batch.journal import Journal, note_death
from nanovllm.run_batch.records import ID_PREFIX, Record
from nanovllm.run_batch.request import BatchRequest
from nanovllm.run_batch.runner import Runner, describe

logger = logging.getLogger("nanovllm.run_batch")

RESTART_ATTEMPTS, RESTART_SECONDS = 5, 5.0


@dataclass(slots=True, eq=False)
class _Batch:
    """Requests that came together, and their records as far as there are any."""

    requests: list[BatchRequest]
    records: list[Record] = field(default_factory=list)
    is_over: Event = field(default_factory=Event)


class _Stop:
    """See ``runner.Stop``."""

    def __init__(self) -> None:
        self.event = Event()
        self.deadline = inf

    @property
    def requested(self) -> bool:
        return self.event.is_set()


class Replica:
    """One engine, and the records of batches that it is called with: an actor of the second stage.

    It is called from several threads at once. A thread of its own has the engine: there the
    requests of a batch join those of others. If no engine can be made, it says so to the feed, and
    does nothing until the stop. If the engine is lost, or anything else goes wrong, the process
    ends; Ray starts it again, and repeats the calls that it had.

    Args:
        options: of the engine: the fields of Config.
        model_names: as ``Runner``'s.
        feed: the Feed.
    """

    def __init__(self, options: dict[str, Any], model_names: Sequence[str], feed: Any) -> None:
        self._options, self._model_names, self._feed = options, model_names, feed
        self._inbox: SimpleQueue[_Batch | None] = SimpleQueue()  # None is to look at the stop
        self._stop = _Stop()
        # The destructors of Ray's process, which run after Python's end, can wait for themselves.
        atexit.register(os._exit, 0)
        Thread(target=self._serve, daemon=True).start()
        Thread(target=self._await_stop, daemon=True).start()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """A batch's records, pickled; after the stop some may be missing."""
        batch = _Batch([pickle.loads(request) for request in pickle.loads(row["requests"])])
        if batch.requests:
            self._inbox.put(batch)
            batch.is_over.wait()
        return {"key": row["key"], "records": pickle.dumps(batch.records)}

    def _await_stop(self) -> None:
        grace = 0.0
        with suppress(ray.exceptions.RayError):  # if the driver is gone
            grace = ray.get(self._feed.wait_for_stop.remote())
        self._stop.deadline = monotonic() + grace
        self._stop.event.set()
        self._inbox.put(None)

    def _serve(self) -> None:
        try:
            if runner := self._make_runner():
                self._run_batches(runner)
                runner.close()
            else:
                self._stop.event.wait()
            while True:  # until Ray ends the process
                if batch := self._inbox.get():
                    batch.is_over.set()
        except BaseException:
            logger.exception("a replica ends, to be started again")
            os._exit(1)

    def _make_runner(self) -> Runner | None:
        context = ray.get_runtime_context()
        folder = tempfile.mkdtemp(prefix="nanovllm-")
        start = (context.get_actor_id(), context.current_actor, folder)
        before = ray.get(self._feed.note_start.remote(*start))
        self._journal = _inherit_journal(before, folder)
        # The dead may hold their GPUs a while.
        num_attempts = 1 if before is None else RESTART_ATTEMPTS
        while True:
            try:
                runner = Runner(lambda: LLM(**self._options), self._model_names, self._journal)
                break
            except Exception as error:
                num_attempts -= 1
                if not num_attempts:
                    ray.get(self._feed.note_failure.remote(explain(error)))
                    return None
                logger.warning("the engine does not start yet: %s", explain(error))
                sleep(RESTART_SECONDS)
        ray.get(self._feed.note_ready.remote())
        return runner

    def _run_batches(self, runner: Runner) -> None:
        """Runs what comes in until the stop."""
        waiting: deque[tuple[BatchRequest, _Batch]] = deque()
        running: dict[str, list[_Batch]] = {}  # by the id of the record; a line may be there twice

        def deliver(records: Iterable[Record]) -> None:
            for record in records:
                batches = running[record["id"]]
                batch = batches.pop()
                if not batches:
                    del running[record["id"]]
                batch.records.append(record)
                if len(batch.records) == len(batch.requests):
                    batch.is_over.set()

        while not self._stop.requested:
            while not self._inbox.empty() or (runner.is_idle and not waiting):
                batch = self._inbox.get()
                if batch is None:
                    break
                waiting.extend((request, batch) for request in batch.requests)
            while waiting and runner.has_room:
                request, batch = waiting.popleft()
                running.setdefault(f"{ID_PREFIX}{request.number}", []).append(batch)
                deliver(runner.add(request))
            deliver(runner.step())
        deliver(runner.run([], self._stop))
        self._journal.close(is_done=True)
        shutil.rmtree(self._journal.path.parent, ignore_errors=True)
        for batch in [*chain(*running.values()), *(batch for _, batch in waiting)]:
            batch.is_over.set()


def _inherit_journal(before: str | None, folder: str) -> Journal:
    """A journal in a new folder, with the deaths that this replica's earlier processes have noted,
    and the last one's, if that was on this machine."""
    path = Path(folder, "journal")
    if before and Path(before).is_dir():
        earlier = Path(before, path.name)
        note_death(earlier)
        if earlier.exists():
            os.replace(earlier, path)
        shutil.rmtree(before, ignore_errors=True)
    return Journal(path, 0)


def explain(error: Exception) -> str:
    """On one line. A ValueError, OSError or TypeError says by itself what is wrong."""
    if isinstance(error, (OSError, TypeError, ValueError)):
        return str(error).partition("\n")[0]
    return describe(error)
