"""A replica: one of several engines, in a Ray actor's process."""

import atexit
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import Any

import ray

from nanovllm.llm import LLM
from nanovllm.run_batch.journal import Journal, note_death
from nanovllm.run_batch.records import Record
from nanovllm.run_batch.request import BatchRequest
from nanovllm.run_batch.runner import Runner, describe
from nanovllm.run_batch.stop import Stop

logger = logging.getLogger("nanovllm.run_batch")

RESTART_SECONDS = 5.0  # between attempts to create the engine
TAKE_SECONDS = 0.1  # how long ``take`` collects records after the first one


class Replica:
    """An actor that runs requests on one engine.

    The engine has a thread of its own. If the engine is lost, or anything else fails, the process
    exits, and the driver starts another actor.

    Args:
        options: the engine's options: the fields of Config.
        model_names: as for ``Runner``.
        journal_name: the name of the journal in the folder for temporary files. If an earlier actor
            died and left its journal there, this one counts the death and continues the journal.
        num_attempts: the maximum number of attempts to create the engine. An attempt may fail
            because the process of a dead actor still holds the GPUs for a while.
    """

    def __init__(
        self,
        options: dict[str, Any],
        model_names: Sequence[str],
        journal_name: str,
        num_attempts: int,
    ) -> None:
        self._options, self._model_names = options, model_names
        self._journal_path = Path(tempfile.gettempdir(), journal_name)
        self._num_attempts = num_attempts
        self._start_result: SimpleQueue[str] = SimpleQueue()
        self._inbox: SimpleQueue[list[BatchRequest]] = SimpleQueue()
        self._records: SimpleQueue[Record | None] = SimpleQueue()
        self._stop = Stop()
        # Skip the native destructors of Ray, which run at exit and can deadlock.
        atexit.register(os._exit, 0)
        Thread(target=self._serve, daemon=True).start()

    def start(self) -> tuple[str, str]:
        """Waits for the engine. Returns the id of this node, and the reason why the engine could
        not be created, or "" if it is ready."""
        return ray.get_runtime_context().get_node_id(), self._start_result.get()

    def put(self, requests: list[BatchRequest]) -> None:
        """Adds requests."""
        self._inbox.put(requests)

    def take(self) -> list[Record | None]:
        """Waits for records and returns them. After ``stop``, None follows the last record."""
        records = [self._records.get()]
        sleep(TAKE_SECONDS)
        while not self._records.empty():
            records.append(self._records.get())
        return records

    def stop(self, grace: float) -> None:
        """Ends the run. Running requests have ``grace`` seconds to finish."""
        self._stop.deadline = monotonic() + grace
        self._stop.requested = True
        self._inbox.put([])

    def _serve(self) -> None:
        try:
            note_death(self._journal_path)
            journal = Journal(self._journal_path, 0)
            try:
                runner = self._make_runner(journal)
            except Exception as error:
                journal.close(is_done=True)
                self._start_result.put(describe(error))
                return
            self._start_result.put("")
            for record in runner.run(self._requests(runner), self._stop):
                self._records.put(record)
            runner.close()
            journal.close(is_done=True)
            self._records.put(None)
        except BaseException:
            logger.exception("a replica has failed and will be replaced")
            os._exit(1)

    def _make_runner(self, journal: Journal) -> Runner:
        while True:
            try:
                return Runner(lambda: LLM(**self._options), self._model_names, journal)
            except Exception as error:
                self._num_attempts -= 1
                if not self._num_attempts:
                    raise
                logger.warning("the engine did not start, trying again: %s", describe(error))
                sleep(RESTART_SECONDS)

    def _requests(self, runner: Runner) -> Iterator[BatchRequest | None]:
        """Yields incoming requests. Before the next request arrives, yields None while the engine
        has work, and waits while it is idle."""
        while not self._stop.requested:
            if self._inbox.empty() and not runner.is_idle:
                yield None
            else:
                yield from self._inbox.get()
