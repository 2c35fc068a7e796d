"""Worker processes of tensor parallelism: started, called, watched and ended by rank 0.

A call travels as a message through shared memory: rank 0 writes a chunk and wakes each worker by
its semaphore; the workers copy it out and acknowledge it; the next chunk waits for all
acknowledgements. What goes wrong on a worker comes back through a pipe; a thread of rank 0 waits
for that and for deaths, and cuts short what would wait for a dead rank.

Memory, semaphores and pipes have no names: workers inherit their descriptors. No other user can
open them, and a killed run leaves none behind.

Workers belong to the process that started them: a forked child of it neither calls nor ends them.
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
SPIN_SECONDS = 0.002  # a decode step on a GPU takes no longer; then the worker sleeps
GRACE_SECONDS = 3.0  # to end by themselves
_context = mp.get_context("spawn")


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Ctrl-C takes effect at the end: ranks that part in the middle of a step wait for ever."""
    pending: list[Any] = []
    handler = signal.getsignal(signal.SIGINT)  # None is not Python's, so not ours to replace
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
    """One way, from rank 0 to every worker: whole messages of any size. A process that is spawned
    with it shares its memory.

    Args:
        num_workers: how many read.
        fd: the memory of another Channel, which this one closes; None makes new memory.
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
        # Number of the chunk, its size, the message's bytes after it; last chunk of each worker.
        self.header, self.acknowledged = numbers[:3], numbers[3:]
        self.data = memoryview(self.memory)[8 * words :]

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited_channel, (len(self.acknowledged), reduction.DupFd(self.fd))

    def send(
        self, message: bytes | bytearray, wake: Callable[[], None], check: Callable[[], None]
    ) -> None:
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


def _inherited_channel(num_workers: int, handle: Any) -> Channel:
    return Channel(num_workers, handle.detach())


class Semaphore:
    """Wakes one worker, as often as it is released. Unlike multiprocessing's, it has no name."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) if fd is None else fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited_semaphore, (reduction.DupFd(self.fd),)

    def release(self) -> None:
        os.eventfd_write(self.fd, 1)

    def acquire(self, spin_seconds: float = 0.0) -> None:
        """Waits for a release: at first awake, which is faster, then asleep."""
        if spin_seconds:
            poll, end = select.poll(), monotonic() + spin_seconds
            poll.register(self.fd, select.POLLIN)
            while not poll.poll(0) and monotonic() < end:
                pass
        os.read(self.fd, 8)

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1  # the number may be another file's by now


def _inherited_semaphore(handle: Any) -> Semaphore:
    return Semaphore(handle.detach())


def encode(method: str, args: tuple[Any, ...]) -> bytearray:
    """A call as one message. Arrays travel as raw bytes beside the pickle."""
    buffers: list[Any] = []
    head = pickle.dumps((method, args), protocol=5, buffer_callback=buffers.append)
    message = bytearray()
    for part in (head, *(buffer.raw() for buffer in buffers)):
        message += len(part).to_bytes(8, "little")
        message += part
        message += b"\0" * (-len(message) % 8)  # what follows is aligned for its dtype
    return message


def decode(message: bytearray) -> tuple[str, tuple[Any, ...]]:
    """The call again; its arrays are views of the message."""
    left, parts = memoryview(message), []
    while left:
        size = int.from_bytes(left[:8], "little")
        parts.append(left[8 : 8 + size])
        left = left[8 + size + -size % 8 :]
    return pickle.loads(parts[0], buffers=parts[1:])


class Workers:
    """Ranks 1 to size - 1, as rank 0 sees them.

    Args:
        size: ranks in all.
        target: what a worker runs: ``target(worker, *args)``, a function of some module.
        args: further arguments, sent to the processes by pickle.

    Raises:
        ValueError: this is not Linux.
    """

    def __init__(self, size: int, target: Callable[..., None], *args: Any) -> None:
        if sys.platform != "linux":
            raise ValueError("tensor_parallel_size > 1 needs Linux: leave it at 1")
        # Its name is random, and it is made only when the ranks are ready to use it.
        self._folder = os.path.join(tempfile.gettempdir(), f"nanovllm-{secrets.token_hex(16)}")
        self.channel = Channel(size - 1)
        self._semaphores = [Semaphore() for _ in range(size - 1)]
        pipes = [_context.Pipe(duplex=False) for _ in range(size - 1)]
        own, processes = (self._folder, torch.get_num_threads(), self.channel), []
        for rank, (semaphore, pipe) in enumerate(zip(self._semaphores, pipes, strict=True), 1):
            worker = Worker(rank, size, *own, semaphore, pipe[1])
            name = f"nanovllm-rank{rank}"
            all_args = worker, target, args
            processes.append(
                _context.Process(target=_worker_main, args=all_args, name=name, daemon=True)
            )
        self._state = _State(processes, self._folder)
        self._times_awaited = 0
        leave_to_parent(self)
        # Also at the end of the interpreter, and when the engine is collected.
        self.close = weakref.finalize(self, _end, self._state, self.channel, self._semaphores)
        with _main_hidden(), _interrupts_blocked():
            for process in processes:
                process.start()
        # multiprocessing would end them at the exit of a forked child too.
        mp_process._children.difference_update(processes)  # type: ignore[attr-defined]
        for _, theirs in pipes:
            theirs.close()
        ours = [pipe[0] for pipe in pipes]
        watcher = threading.Thread(target=_watch, args=(self._state, ours), daemon=True)
        watcher.start()
        self._state.watcher = watcher

    def wait_ready(self) -> None:
        """Waits until every worker has got as far (``Worker.report_ready``)."""
        state = self._state
        self._times_awaited += 1
        with state.changed:
            while min(state.times_ready) < self._times_awaited and not state.failure:
                state.changed.wait(1.0)  # in slices, so that Ctrl-C gets through
        self.check()

    @contextmanager
    def open_store(self) -> Iterator[dist.Store]:
        """Where ranks leave word for each other while they make their process groups; all enter
        this at once. No rank needs it any more when rank 0 leaves: then it is gone.

        Raises:
            WorkerError: a worker has failed. One that fails later ends waiting for the store.
        """
        state = self._state
        os.mkdir(self._folder, 0o700)  # for this user alone; never one that is there already
        try:
            state.store = open_store(self._folder)
            self.check()
            yield state.store
        finally:
            state.end_store()
            shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, method: str, args: tuple[Any, ...]) -> None:
        """Makes every worker call a method of its runner."""
        self.check()
        self.channel.send(encode(method, args), self._wake, self.check)

    def check(self) -> None:
        """Raises WorkerError if a worker has failed."""
        if self._state.failure:
            raise WorkerError(self._state.failure)

    def on_failure(self, action: Callable[[], None]) -> None:
        """What else to do, in the watching thread, when a worker fails."""
        self._state.actions.append(action)

    def fail(self, error: BaseException) -> None:
        """Rank 0 is out of step with the others: ends them. Raises WorkerError if one of them
        turns out to be the cause."""
        state = self._state
        if isinstance(error, RuntimeError):  # as collectives raise where a peer is gone
            with state.changed:
                state.changed.wait_for(lambda: bool(state.failure), 1.0)
            if state.failure and not isinstance(error, WorkerError):
                raise WorkerError(state.failure) from error
        state.fail(f"rank 0 failed: {type(error).__name__}: {error}")

    def _wake(self) -> None:
        for semaphore in self._semaphores:
            semaphore.release()


@dataclass
class Worker:
    """Rank 0 and its calls, as one worker sees them.

    Attributes:
        rank, size: of this worker, and of all.
        store_folder: where rank 0 puts the store, once all are ready.
        num_threads: for PyTorch, as many as rank 0 has.
    """

    rank: int
    size: int
    store_folder: str
    num_threads: int
    channel: Channel
    semaphore: Semaphore
    pipe: Connection

    def report_ready(self) -> None:
        self.pipe.send(None)

    @contextmanager
    def open_store(self) -> Iterator[dist.Store]:
        """As rank 0's."""
        while not os.path.exists(self.store_folder):
            sleep(0.001)
        # Kept, since its destructor would look for a file that rank 0 is about to remove.
        self._store = open_store(self.store_folder)
        yield self._store
        close_store(self._store)

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """The next call: a method and its arguments."""
        return decode(self.channel.receive(self.rank - 1, self._sleep_until_woken))

    def _sleep_until_woken(self) -> None:
        # With a GPU the next step is near, and a core can be spared.
        self.semaphore.acquire(SPIN_SECONDS if torch.cuda.is_initialized() else 0.0)


class _State:
    """What the watching thread and rank 0's other threads share."""

    def __init__(self, processes: list[Any], store_folder: str) -> None:
        self.pid = os.getpid()
        self.processes = processes
        self.store_folder = store_folder
        self.store: dist.Store | None = None
        self.changed = threading.Condition()
        self.times_ready = [0] * len(processes)
        self.failure = ""
        self.closing = False
        self.watcher: threading.Thread | None = None
        self.actions: list[Callable[[], None]] = []

    def set_ready(self, rank: int) -> None:
        with self.changed:
            self.times_ready[rank - 1] += 1
            self.changed.notify_all()

    def fail(self, failure: str) -> None:
        """Ends all workers, for good; the first reason counts."""
        if os.getpid() != self.pid:
            return
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()
        for process in self.processes:
            process.kill()
        self.end_store()

    def end_store(self) -> None:
        """Removes the store, if it is there. Waiting for it ends within two seconds."""
        if self.store is not None:
            close_store(self.store)
            shutil.rmtree(self.store_folder, ignore_errors=True)


def _watch(state: _State, pipes: list[Connection]) -> None:
    """Rank 0's thread: reads the workers' pipes until one of them ends."""
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
                state.set_ready(rank)
                continue
            if not state.closing:
                state.fail(_cause(state.processes, rank, error))
                for action in state.actions:
                    with suppress(Exception):
                        action()
            return


def _cause(processes: list[Any], rank: int, error: str) -> str:
    """What went wrong first: a death rather than the error that a peer of the dead reports."""
    if not error:
        processes[rank - 1].join(GRACE_SECONDS)
    for dead, process in enumerate(processes, start=1):
        if wait([process.sentinel], 0):  # its files are closed, so its exit code is near
            process.join(GRACE_SECONDS)
        if (process.exitcode or 0) < 0:
            reason = signal.strsignal(-process.exitcode) or f"signal {-process.exitcode}"
            return f"rank {dead} failed: its process was ended from outside: {reason}"
    code = processes[rank - 1].exitcode
    return f"rank {rank} failed: {error or f'its process ended with exit code {code}'}"


def _end(state: _State, channel: Channel, semaphores: list[Semaphore]) -> None:
    """Ends the workers, by themselves if they can, and frees what they shared with rank 0; does
    nothing in a forked child."""
    if os.getpid() != state.pid:
        return
    state.closing = True
    end = monotonic() + (0.0 if state.failure else GRACE_SECONDS)

    def wake() -> None:
        for semaphore in semaphores:
            semaphore.release()

    def check() -> None:
        if monotonic() > end:
            raise TimeoutError

    with interrupts_delayed():
        with suppress(TimeoutError):
            channel.send(encode("exit", ()), wake, check)
        for process in state.processes:
            if process.pid is not None:
                process.join(max(0.0, end - monotonic()))
                process.kill()
                process.join()
        if state.watcher not in (None, threading.current_thread()):
            state.watcher.join(GRACE_SECONDS)  # it holds the pipes, which have just ended
        state.end_store()
        channel.close()
        for semaphore in semaphores:
            semaphore.close()


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keeps spawned processes from importing the program's main module, which they do not need
    and which would run a script without a ``__name__ == "__main__"`` guard once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # which comes from no file
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Ctrl-C arrives at the end, and never at the processes started within: a terminal sends it
    to all, but rank 0 decides what it means."""
    with interrupts_delayed():  # the mask is this thread's alone, and others may get the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worker_main(worker: Worker, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        target(worker, *args)
        os._exit(0)  # at once: libraries' destructors may wait for peers
    except BaseException as error:
        with suppress(OSError):  # rank 0 may be gone
            worker.pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        os._exit(1)


def _follow_parent() -> None:
    """Ends this process with rank 0's, whatever the main thread is stuck in."""
    parent = mp.parent_process()
    assert parent is not None
    while os.getppid() == parent.pid:
        parent.join(1.0)  # which other children of rank 0 may keep from noticing
    os._exit(1)
