"""The worker processes of tensor parallelism. Rank 0 starts, calls, monitors and ends them.

Rank 0 and each worker share a two-way pipe. Rank 0 writes its calls into every pipe. A worker
writes that it has reached a barrier, or why it has failed. A monitoring thread of rank 0 reads
these messages. When a worker fails or dies, this thread kills all workers and aborts collectives
that wait for them.

A pipe is a pair of sockets without names, which workers inherit. No other process can open it, and
nothing is left behind when a run is killed.

Workers belong to the process that started them. A forked child neither calls nor ends them.
"""

import multiprocessing as mp
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import process as mp_process
from multiprocessing.connection import Connection, wait
from time import monotonic
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.utils.distributed import close_store, open_store
from nanovllm.utils.forks import leave_to_parent
from nanovllm.utils.interrupts import interrupts_delayed

SPIN_SECONDS = 0.002  # about a decode step on a GPU; after that the worker sleeps
GRACE_SECONDS = 3.0  # for workers to end before they are killed
_context = mp.get_context("spawn")


class WorkerError(RuntimeError):
    """A worker failed; the message has its rank, the cause and its traceback."""


class Workers:
    """Rank 0's handle on ranks 1 to size - 1.

    Args:
        size: number of ranks, rank 0 included.
        target: a function at the top level of a module. Each worker runs ``target(worker, *args)``.
        args: further arguments; they are pickled.

    Raises:
        ValueError: this is not Linux.
    """

    rank = 0

    def __init__(self, size: int, target: Callable[..., None], *args: Any) -> None:
        if sys.platform != "linux":
            raise ValueError("tensor_parallel_size > 1 needs Linux: leave it at 1")
        pipes, processes = [_context.Pipe() for _ in range(size - 1)], []
        for rank, (_, theirs) in enumerate(pipes, 1):
            name = f"nanovllm-rank{rank}"
            all_args = Worker(rank, torch.get_num_threads(), theirs), target, args
            processes.append(
                _context.Process(target=_worker_main, args=all_args, name=name, daemon=True)
            )
        self._state = _State(processes, [ours for ours, _ in pipes])
        self._num_barriers = 0
        leave_to_parent(self)
        # Also runs when the interpreter exits, and when the engine is garbage collected.
        self.close = weakref.finalize(self, _end, self._state)
        with _main_hidden(), _interrupts_blocked():
            for process in processes:
                process.start()
        # Otherwise multiprocessing would end them when a forked child exits.
        mp_process._children.difference_update(processes)  # type: ignore[attr-defined]
        for _, theirs in pipes:
            theirs.close()
        watcher = threading.Thread(target=_watch, args=(self._state,), daemon=True)
        watcher.start()
        self._state.watcher = watcher

    def barrier(self) -> None:
        """Waits for every worker: returns when each has called its ``barrier`` as often as rank 0
        has called this."""
        state = self._state
        self._num_barriers += 1
        with state.changed:
            while min(state.barrier_counts) < self._num_barriers and not state.failure:
                state.changed.wait(1.0)  # with a timeout, so that Ctrl-C is handled
        self.check()

    @contextmanager
    def open_store(self) -> Iterator[dist.Store]:
        """Opens the store through which ranks make their process groups. All ranks enter this at
        the same time. The store is removed when rank 0 leaves, after all ranks have used it.

        Raises:
            WorkerError: a worker has failed. If one fails later, waiting for the store ends.
        """
        state = self._state
        state.store_folder = tempfile.mkdtemp(prefix="nanovllm-")  # for this user only
        try:
            state.store = open_store(state.store_folder)
            self.send(state.store_folder)
            yield state.store
        finally:
            state.end_store()
            shutil.rmtree(state.store_folder, ignore_errors=True)

    def send(self, message: Any) -> None:
        """Sends a message to every worker."""
        self.check()
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for pipe in self._state.pipes:
            pipe.send_bytes(data)

    def check(self) -> None:
        """Raises WorkerError if a worker has failed."""
        if self._state.failure:
            raise WorkerError(self._state.failure)

    def on_failure(self, action: Callable[[], None]) -> None:
        """Adds a function that the monitoring thread calls when a worker fails."""
        self._state.actions.append(action)

    def fail(self, error: BaseException) -> None:
        """Ends the workers after a call has failed on rank 0, because the ranks' states now differ.
        Raises WorkerError if a worker is the cause."""
        state = self._state
        # If a worker has died, a collective raises RuntimeError, and its pipe OSError.
        if isinstance(error, (RuntimeError, OSError)):
            with state.changed:
                state.changed.wait_for(lambda: bool(state.failure), 1.0)
            if state.failure and not isinstance(error, WorkerError):
                raise WorkerError(state.failure) from error
        state.fail(f"rank 0 failed: {type(error).__name__}: {error}")


@dataclass
class Worker:
    """A worker's handle on rank 0.

    Attributes:
        rank: of this worker.
        num_threads: the number of PyTorch's threads, as on rank 0.
    """

    rank: int
    num_threads: int
    pipe: Connection

    def barrier(self) -> None:
        """Tells rank 0 that this worker has reached the barrier. Does not wait."""
        self.pipe.send(None)

    @contextmanager
    def open_store(self) -> Iterator[dist.Store]:
        """Opens rank 0's store; see ``Workers.open_store``."""
        # Never freed: its destructor needs a file that rank 0 is about to remove.
        self._store = open_store(self.receive())
        yield self._store
        close_store(self._store)

    def receive(self) -> Any:
        """Returns rank 0's next message. Arrays in it are aligned and writable."""
        if torch.cuda.is_initialized():  # the next step comes soon, so it is worth a core
            poll, end = select.poll(), monotonic() + SPIN_SECONDS
            poll.register(self.pipe, select.POLLIN)
            while not poll.poll(0) and monotonic() < end:
                pass
        return pickle.loads(self.pipe.recv_bytes())


class _State:
    """State that the monitoring thread and rank 0's other threads share."""

    def __init__(self, processes: list[Any], pipes: list[Any]) -> None:
        self.pid = os.getpid()
        self.processes = processes
        self.pipes = pipes
        self.store: dist.Store | None = None
        self.store_folder = ""
        self.changed = threading.Condition()
        self.barrier_counts = [0] * len(processes)
        self.failure = ""
        self.closing = False
        self.watcher: threading.Thread | None = None
        self.actions: list[Callable[[], None]] = []

    def fail(self, failure: str) -> None:
        """Kills all workers. The first failure is the one that is reported."""
        if os.getpid() != self.pid:
            return
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()
        for process in self.processes:
            process.kill()
        self.end_store()

    def end_store(self) -> None:
        """Removes the store if it exists. Ranks that wait for it stop within two seconds."""
        if self.store is not None:
            close_store(self.store)
            shutil.rmtree(self.store_folder, ignore_errors=True)


def _watch(state: _State) -> None:
    """Reads the workers' pipes, in a thread of rank 0, until one of the workers ends."""
    while not state.closing:
        for pipe in wait(state.pipes):
            assert isinstance(pipe, Connection)
            rank = state.pipes.index(pipe) + 1
            try:
                error = pipe.recv()
            except (EOFError, OSError):
                error = ""
            if error is None:
                with state.changed:
                    state.barrier_counts[rank - 1] += 1
                    state.changed.notify_all()
                continue
            if not state.closing:
                state.fail(_cause(state.processes, rank, error))
                for action in state.actions:
                    with suppress(Exception):
                        action()
            return


def _cause(processes: list[Any], rank: int, error: str) -> str:
    """Returns the message of a failure. If a signal killed a worker, that is the cause, whatever
    its peers report."""
    if not error:
        processes[rank - 1].join(GRACE_SECONDS)
    for dead, process in enumerate(processes, start=1):
        if wait([process.sentinel], 0):  # it is exiting, so its exit code comes soon
            process.join(GRACE_SECONDS)
        if (process.exitcode or 0) < 0:
            reason = signal.strsignal(-process.exitcode) or f"signal {-process.exitcode}"
            return f"rank {dead} failed: its process was killed: {reason}"
    code = processes[rank - 1].exitcode
    return f"rank {rank} failed: {error or f'its process ended with exit code {code}'}"


def _end(state: _State) -> None:
    """Asks the workers to exit, kills those that do not, and frees what they share with rank 0.
    Does nothing in a forked child."""
    if os.getpid() != state.pid:
        return
    state.closing = True
    end = monotonic() + (0.0 if state.failure else GRACE_SECONDS)
    with interrupts_delayed():
        for pipe in state.pipes:
            os.set_blocking(pipe.fileno(), False)  # the worker may be stuck and its pipe full
            with suppress(OSError):
                pipe.send_bytes(pickle.dumps(("exit", ())))
        for process in state.processes:
            if process.pid is not None:
                process.join(max(0.0, end - monotonic()))
                process.kill()
                process.join()
        if state.watcher not in (None, threading.current_thread()):
            state.watcher.join(GRACE_SECONDS)  # the workers' ends of the pipes are closed
        state.end_store()
        for pipe in state.pipes:
            pipe.close()


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keeps spawned processes from importing the program's main module. They do not need it, and
    it would run a script without an ``if __name__ == "__main__"`` guard again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # has no file to import
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Delays Ctrl-C until the end of the block, and blocks it in processes started in the block: a
    terminal sends it to all processes, but rank 0 handles it."""
    with interrupts_delayed():  # the mask is of this thread only; others may get the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worker_main(worker: Worker, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        target(worker, *args)
        os._exit(0)  # without destructors of libraries, which may wait for peers
    except BaseException as error:
        with suppress(OSError):  # rank 0 may be gone
            worker.pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        os._exit(1)


def _follow_parent() -> None:
    """Ends this process when rank 0's ends, even if the main thread is blocked."""
    parent = mp.parent_process()
    assert parent is not None
    while os.getppid() == parent.pid:
        parent.join(1.0)  # may miss the end if other children of rank 0 keep its pipe open
    os._exit(1)
