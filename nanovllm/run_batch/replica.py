"""A replica: one of several engines, in a Ray actor's process."""

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
    """The requests of one call, and the records of those that have finished."""

    requests: list[BatchRequest]
    records: list[Record] = field(default_factory=list)
    is_finished: Event = field(default_factory=Event)


class _Stop:
    """Implements ``runner.Stop``."""

    def __init__(self) -> None:
        self.event = Event()
        self.deadline = inf

    @property
    def requested(self) -> bool:
        return self.event.is_set()


class Replica:
    """An actor of the dataset's second stage: runs batches of requests on one engine.

    Ray Data calls it from several threads at once. The engine runs in one thread of its own, which
    serves the requests of all calls together. If the engine cannot be created, the replica reports
    that to the feed and does nothing until the stop. If the engine is lost, or anything else fails,
    the process exits; Ray restarts it and repeats the calls that were running.

    Args:
        options: the engine's options: the fields of Config.
        model_names: as for ``Runner``.
        feed: the handle of the Feed actor.
    """

    def __init__(self, options: dict[str, Any], model_names: Sequence[str], feed: Any) -> None:
        self._options, self._model_names, self._feed = options, model_names, feed
        self._inbox: SimpleQueue[_Batch | None] = SimpleQueue()  # None: check the stop
        self._stop = _Stop()
        # Destructors of Ray's process, which run after Python's exit, can deadlock.
        atexit.register(os._exit, 0)
        Thread(target=self._serve, daemon=True).start()
        Thread(target=self._wait_for_stop, daemon=True).start()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Runs a batch. Returns its pickled records; after the stop some may be missing."""
        batch = _Batch([pickle.loads(request) for request in pickle.loads(row["requests"])])
        if batch.requests:
            self._inbox.put(batch)
            batch.is_finished.wait()
        return {"key": row["key"], "records": pickle.dumps(batch.records)}

    def _wait_for_stop(self) -> None:
        grace = 0.0
        with suppress(ray.exceptions.RayError):  # the driver may have died
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
                    batch.is_finished.set()
        except BaseException:
            logger.exception("a replica has failed and will be restarted")
            os._exit(1)

    def _make_runner(self) -> Runner | None:
        context = ray.get_runtime_context()
        folder = tempfile.mkdtemp(prefix="nanovllm-")
        start = (context.get_actor_id(), context.current_actor, folder)
        before = ray.get(self._feed.note_start.remote(*start))
        self._journal = _continue_journal(before, folder)
        # After a restart, the previous process may hold its GPUs for a while, so retry.
        num_attempts = 1 if before is None else RESTART_ATTEMPTS
        while True:
            try:
                runner = Runner(lambda: LLM(**self._options), self._model_names, self._journal)
                break
            except Exception as error:
                num_attempts -= 1
                if not num_attempts:
                    ray.get(self._feed.note_failure.remote(format_error(error)))
                    return None
                logger.warning("the engine does not start yet: %s", format_error(error))
                sleep(RESTART_SECONDS)
        ray.get(self._feed.note_ready.remote())
        return runner

    def _run_batches(self, runner: Runner) -> None:
        """Runs incoming requests until the stop."""
        waiting: deque[tuple[BatchRequest, _Batch]] = deque()
        running: dict[str, list[_Batch]] = {}  # by record id; a batch may have been sent twice

        def deliver(records: Iterable[Record]) -> None:
            for record in records:
                batches = running[record["id"]]
                batch = batches.pop()
                if not batches:
                    del running[record["id"]]
                batch.records.append(record)
                if len(batch.records) == len(batch.requests):
                    batch.is_finished.set()

        while not self._stop.requested:
            while not self._inbox.empty() or (runner.is_idle and not waiting):
                batch = self._inbox.get()
                if batch is None:
                    break
                waiting.extend((request, batch) for request in batch.requests)
            while waiting and runner.has_capacity:
                request, batch = waiting.popleft()
                running.setdefault(f"{ID_PREFIX}{request.number}", []).append(batch)
                deliver(runner.add(request))
            deliver(runner.step())
        deliver(runner.run([], self._stop))
        self._journal.close(is_done=True)
        shutil.rmtree(self._journal.path.parent, ignore_errors=True)
        for batch in [*chain(*running.values()), *(batch for _, batch in waiting)]:
            batch.is_finished.set()


def _continue_journal(before: str | None, folder: str) -> Journal:
    """Creates a journal in a new folder. If the replica's previous process ran on this machine,
    continues its journal and counts its death."""
    path = Path(folder, "journal")
    if before and Path(before).is_dir():
        earlier = Path(before, path.name)
        note_death(earlier)
        if earlier.exists():
            os.replace(earlier, path)
        shutil.rmtree(before, ignore_errors=True)
    return Journal(path, 0)


def format_error(error: Exception) -> str:
    """Formats an error in one line, without the type's name if the message explains itself."""
    if isinstance(error, (OSError, TypeError, ValueError)):
        return str(error).partition("\n")[0]
    return describe(error)
