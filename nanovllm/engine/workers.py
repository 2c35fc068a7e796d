"""The worker processes of tensor parallelism. Rank 0 starts, calls, monitors and ends them.

A call is a message through shared memory. Rank 0 writes a chunk and wakes each worker by its
semaphore. The workers copy the chunk and acknowledge it. Rank 0 writes the next chunk when all have
acknowledged. A worker reports an error through a pipe. A monitoring thread of rank 0 reads the
pipes. When a worker fails or dies, the thread kills all workers and aborts collectives that wait
for them.

Shared memory, semaphores and pipes have no names: workers inherit their descriptors. No other user
can open them, and nothing is left behind when a run is killed.

Workers belong to the process that started them. A forked child neither calls nor ends them.
"""

import mmap
import multiprocessing as mp
import os
import pickle
import secrets
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
from functools import partial
from multiprocessing import process as mp_process
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from time import monotonic, sleep
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nanovllm.utils.distributed import close_store, open_store
from nanovllm.utils.forks import leave_to_parent

CHUNK_BYTES = 1 << 20
SPIN_SECONDS = 0.002  # about a decode step on a GPU; after that the worker sleeps
GRACE_SECONDS = 3.0  # for workers to end before they are killed
_context = mp.get_context("spawn")


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delays Ctrl-C until the end of the block. If one rank left in the middle of a step, the
    others would wait for it forever."""
    pending: list[Any] = []
    handler = signal.getsignal(signal.SIGINT)  # None: not set from Python, so it cannot be replaced
    delays = handler is not None and threading.current_thread() is threading.main_thread()
    if delays:
        signal.signal(signal.SIGINT, lambda *args: pending.append(args))
    try:
        yield
    finally:
        if delays:
            signal.signal(signal.SIGINT, handler)
        if pending:
            signal.raise_signal(signal.SIGINT)


class WorkerError(RuntimeError):
    """A worker failed; the message has its rank, the cause and its traceback."""


class Channel:
    """Sends messages of any size from rank 0 to all workers, through memory that spawned processes
    share.

    Args:
        num_workers: how many workers read.
        fd: a descriptor of another Channel's memory, closed with this Channel; None allocates new
            memory.
    """

    def __init__(self, num_workers: int, fd: int | None = None) -> None:
        words = 3 + num_workers
        size = 8 * words + CHUNK_BYTES
        if fd is None:
            fd = os.memfd_create("nanovllm-calls")
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size)
        self.fd, self.memory = fd, mmap.mmap(fd, size)
        numbers = np.frombuffer(self.memory, np.int64, words)
        # header: chunk number, chunk size, size of the rest of the message.
        # acknowledged: the number of the last chunk that each worker has copied.
        self.header, self.acknowledged = numbers[:3], numbers[3:]
        self.data = memoryview(self.memory)[8 * words :]

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, (Channel, reduction.DupFd(self.fd), len(self.acknowledged))

    def send(self, message: bytes, wake: Callable[[], None], check: Callable[[], None]) -> None:
        """Writes a message. ``check`` is called while waiting for workers, and may raise."""
        left = memoryview(message)
        while True:
            chunk, left = left[:CHUNK_BYTES], left[CHUNK_BYTES:]
            number = int(self.header[0])
            while self.acknowledged.min() < number:
                check()
                sleep(0)
            self.data[: len(chunk)] = chunk
            self.header[:] = number + 1, len(chunk), len(left)
            wake()
            if not left:
                return

    def receive(self, worker: int, sleep_until_woken: Callable[[], None]) -> bytearray:
        message = bytearray()
        while True:
            sleep_until_woken()
            number, size, left = self.header.tolist()
            message += self.data[:size]
            self.acknowledged[worker] = number
            if not left:
                return message

    def close(self) -> None:
        del self.header, self.acknowledged
        self.data.release()
        self.memory.close()
        os.close(self.fd)


class Semaphore:
    """Wakes one worker once for each release. Unlike multiprocessing's, it has no name."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) if fd is None else fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, (Semaphore, reduction.DupFd(self.fd))

    def release(self) -> None:
        os.eventfd_write(self.fd, 1)

    def acquire(self, spin_seconds: float = 0.0) -> None:
        """Waits for a release: spins for ``spin_seconds``, which reacts faster, then sleeps."""
        if spin_seconds:
            poll, end = select.poll(), monotonic() + spin_seconds
            poll.register(self.fd, select.POLLIN)
            while not poll.poll(0) and monotonic() < end:
                pass
        os.read(self.fd, 8)

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1  # another file may get this number


def _inherited(kind: Callable[..., Any], handle: Any, *args: Any) -> Any:
    """Rebuilds a Channel or a Semaphore in a worker."""
    return kind(*args, handle.detach())


def encode(method: str, args: tuple[Any, ...]) -> bytes:
    """Encodes a call as one message."""
    return pickle.dumps((method, args), protocol=5)


def decode(message: bytearray) -> tuple[str, tuple[Any, ...]]:
    """Decodes a message of ``encode``. Arrays are aligned and writable."""
    return pickle.loads(message)


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
        # The name is random. The folder is created when the ranks are ready to use it.
        self._folder = os.path.join(tempfile.gettempdir(), f"nanovllm-{secrets.token_hex(16)}")
        self.channel = Channel(size - 1)
        self._semaphores = [Semaphore() for _ in range(size - 1)]
        pipes = [_context.Pipe(duplex=False) for _ in range(size - 1)]
        own, processes = (self._folder, torch.get_num_threads(), self.channel), []
        for rank, (semaphore, pipe) in enumerate(zip(self._semaphores, pipes, strict=True), 1):
            worker = Worker(rank, *own, semaphore, pipe[1])
            name = f"nanovllm-rank{rank}"
            all_args = worker, target, args
            processes.append(
                _context.Process(target=_worker_main, args=all_args, name=name, daemon=True)
            )
        self._state = _State(processes, self._folder)
        self._num_barriers = 0
        leave_to_parent(self)
        # Also runs when the interpreter exits, and when the engine is garbage collected.
        self.close = weakref.finalize(self, _end, self._state, self.channel, self._semaphores)
        with _main_hidden(), _interrupts_blocked():
            for process in processes:
                process.start()
        # Otherwise multiprocessing would end them when a forked child exits.
        mp_process._children.difference_update(processes)  # type: ignore[attr-defined]
        for _, theirs in pipes:
            theirs.close()
        ours = [pipe[0] for pipe in pipes]
        watcher = threading.Thread(target=_watch, args=(self._state, ours), daemon=True)
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
        os.mkdir(self._folder, 0o700)  # for this user only; raises if it exists
        try:
            state.store = open_store(self._folder)
            self.check()
            yield state.store
        finally:
            state.end_store()
            shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, method: str, args: tuple[Any, ...]) -> None:
        """Sends a call of a runner's method to every worker."""
        self.check()
        self.channel.send(encode(method, args), partial(_wake, self._semaphores), self.check)

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
        if isinstance(error, RuntimeError):  # which a collective raises if a peer has died
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
        store_folder: where rank 0 creates the store when all ranks are ready.
        num_threads: the number of PyTorch's threads, as on rank 0.
    """

    rank: int
    store_folder: str
    num_threads: int
    channel: Channel
    semaphore: Semaphore
    pipe: Connection

    def barrier(self) -> None:
        """Tells rank 0 that this worker has reached the barrier. Does not wait."""
        self.pipe.send(None)

    @contextmanager
    def open_store(self) -> Iterator[dist.Store]:
        """Opens rank 0's store; see ``Workers.open_store``."""
        while not os.path.exists(self.store_folder):
            sleep(0.001)
        # Never freed: its destructor needs a file that rank 0 is about to remove.
        self._store = open_store(self.store_folder)
        yield self._store
        close_store(self._store)

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """Returns the next call: a method's name and its arguments."""
        return decode(self.channel.receive(self.rank - 1, self._sleep_until_woken))

    def _sleep_until_woken(self) -> None:
        # On a GPU the next step comes soon, so spinning for it is worth a core.
        self.semaphore.acquire(SPIN_SECONDS if torch.cuda.is_initialized() else 0.0)


class _State:
    """State that the monitoring thread and rank 0's other threads share."""

    def __init__(self, processes: list[Any], store_folder: str) -> None:
        self.pid = os.getpid()
        self.processes = processes
        self.store_folder = store_folder
        self.store: dist.Store | None = None
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


def _watch(state: _State, pipes: list[Connection]) -> None:
    """Reads the workers' pipes, in a thread of rank 0, until one of the workers ends."""
    ranks = {pipe: rank for rank, pipe in enumerate(pipes, start=1)}
    while not state.closing:
        for pipe in wait(list(ranks)):
            assert isinstance(pipe, Connection)
            rank = ranks[pipe]
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


def _wake(semaphores: list[Semaphore]) -> None:
    for semaphore in semaphores:
        semaphore.release()


def _end(state: _State, channel: Channel, semaphores: list[Semaphore]) -> None:
    """Asks the workers to exit, kills those that do not, and frees what they share with rank 0.
    Does nothing in a forked child."""
    if os.getpid() != state.pid:
        return
    state.closing = True
    end = monotonic() + (0.0 if state.failure else GRACE_SECONDS)

    def check() -> None:
        if monotonic() > end:
            raise TimeoutError

    with interrupts_delayed():
        with suppress(TimeoutError):
            channel.send(encode("exit", ()), partial(_wake, semaphores), check)
        for process in state.processes:
            if process.pid is not None:
                process.join(max(0.0, end - monotonic()))
                process.kill()
                process.join()
        if state.watcher not in (None, threading.current_thread()):
            state.watcher.join(GRACE_SECONDS)  # the pipes are closed, so it ends
        state.end_store()
        channel.close()
        for semaphore in semaphores:
            semaphore.close()


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
