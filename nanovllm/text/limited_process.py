"""A process with limited time and memory, for work on untrusted input.

``LimitedProcess`` is the parent's side. The child process runs this file as a script.
"""

import os
import select
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic

STARTUP_SECONDS = 60.0
WALL_SECONDS = 25.0  # for one request, even on a busy machine
# Less than a main thread's stack, so input that does not overflow the child's stack does not
# overflow the parent's either.
STACK_BYTES = 4 << 20
PIPE_BYTES = 1 << 16
MAX_RESPONSE_BYTES = 1 << 27
OUT_OF_MEMORY = 77  # exit status of a process that ran out of memory
LENGTH = struct.Struct("<Q")  # precedes each request and each response


class ProcessError(Exception):
    """A request has no response. The message is a predicate, such as "takes too much memory"."""


class ProcessTimeout(ProcessError):
    """The request exceeded its time limit."""


class LimitedProcess:
    """Handles requests in a separate process, so that a request that crashes or never ends fails
    alone.

    The process starts with the first request. It ends at ``close()``, when this object is garbage
    collected, or when the parent process ends. Several threads may call ``run``; they take turns.
    If the parent forks, its child does not use the same process, but starts its own.

    Args:
        module: the path of a Python file that defines ``handle(request: bytes) -> bytes``.
        cpu_seconds: the limit of CPU time for one request.
        memory_bytes: the limit of the process's address space.
    """

    def __init__(self, module: str, cpu_seconds: float, memory_bytes: int) -> None:
        self._module = module
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        _instances.add(self)

    def run(self, requests: Iterator[bytes]) -> list[bytearray | ProcessError]:
        """Returns the response to each request, or the error that explains why it has none.

        If a request ends the process, a new process handles the remaining requests.

        Raises:
            RuntimeError: the process does not start.
        """
        responses: list[bytearray | ProcessError] = []
        pending: deque[bytes] = deque()
        with self._lock:
            try:
                while (error := self._exchange(requests, pending, responses)) is not None:
                    responses.append(error)
                    pending.popleft()
                return responses
            except BaseException:
                self._stop()
                raise

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._stop()

    def _exchange(
        self,
        requests: Iterator[bytes],
        pending: deque[bytes],
        responses: list[bytearray | ProcessError],
    ) -> ProcessError | None:
        """Sends the pending requests, then new ones, and reads the responses.

        Returns None when every request has its response. If the process ends before that, returns
        the reason: the first pending request is the one that ended it."""
        process = self._ensure_started()
        assert process.stdin and process.stdout
        outgoing, incoming = bytearray().join(pending), bytearray()
        deadline = monotonic() + WALL_SECONDS
        while True:
            while len(outgoing) < PIPE_BYTES and (request := next(requests, None)) is not None:
                pending.append(LENGTH.pack(len(request)) + request)
                outgoing += pending[-1]
            if not pending:
                return None
            try:
                del outgoing[: process.stdin.write(outgoing) or 0]
            except BrokenPipeError:  # the process ended, but its last responses can still be read
                outgoing.clear()
            ready = _wait(process, bool(outgoing), deadline - monotonic())
            if not ready:
                self._stop()
                return ProcessTimeout(f"takes over {WALL_SECONDS:g} s")
            if process.stdout.fileno() in ready:
                data = process.stdout.read(PIPE_BYTES)
                if not data:
                    return self._exit_reason(process)
                incoming += data
                while pending and len(incoming) >= LENGTH.size:
                    end = LENGTH.size + LENGTH.unpack_from(incoming)[0]
                    if end > MAX_RESPONSE_BYTES:
                        self._stop()
                        return ProcessError("has too long a response")
                    if end > len(incoming):
                        break
                    responses.append(incoming[LENGTH.size : end])
                    del incoming[:end]
                    pending.popleft()
                    deadline = monotonic() + WALL_SECONDS

    def _exit_reason(self, process: subprocess.Popen[bytes]) -> ProcessError:
        """Waits for a process that has closed its output, and returns why it ended."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(WALL_SECONDS)
        self._stop()
        if process.returncode == -signal.SIGPROF:
            return ProcessTimeout(f"takes over {self._cpu_seconds:g} s")
        if process.returncode == OUT_OF_MEMORY:
            return ProcessError("takes too much memory")
        return ProcessError("ends its process")

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        """Returns the process. Starts it if it is not running."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        process = self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", os.path.abspath(__file__)),
                *(self._module, str(self._cpu_seconds), str(self._memory_bytes)),
                *filter(None, sys.path),  # imports resolve as in the parent
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # so that Ctrl-C interrupts only the parent
        )
        self._kill = weakref.finalize(self, _kill, process)
        assert process.stdin and process.stdout
        os.set_blocking(process.stdin.fileno(), False)
        is_ready = _wait(process, False, STARTUP_SECONDS)
        error = process.stdout.read(PIPE_BYTES) if is_ready else b"it takes too long"
        if error != b"\n":
            reason = error.decode(errors="replace").strip() or "it ended"
            raise RuntimeError(f"the process for {self._module} does not start: {reason}")
        return process

    def _stop(self) -> None:
        if self._process is not None:
            self._process = None
            self._kill()

    def _detach(self) -> None:
        """Forgets the process in a forked child, without ending it."""
        self._lock = threading.Lock()
        if (process := self._process) is not None:
            self._process = None
            self._kill.detach()
            with process:  # closes the pipes, so that the process's input ends when the parent ends
                process.returncode = 0  # only the parent can wait for the process


_instances: weakref.WeakSet[LimitedProcess] = weakref.WeakSet()


def _after_fork() -> None:
    for instance in list(_instances):
        instance._detach()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def _wait(process: subprocess.Popen[bytes], writes: bool, seconds: float) -> set[int]:
    """Waits until the process's output can be read or, if ``writes``, its input can be written.
    Returns the file descriptors that are ready, an empty set after ``seconds``."""
    assert process.stdin and process.stdout
    poll = select.poll()  # unlike select(), it takes descriptors above 1023
    poll.register(process.stdout, select.POLLIN)
    if writes:
        poll.register(process.stdin, select.POLLOUT)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, 1000 * seconds))}


def _kill(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes the pipes and waits until the process has ended
        process.kill()


def serve(module: str, cpu_seconds: float, memory_bytes: int) -> None:
    """Reads requests from standard input and writes the responses to standard output."""
    import resource
    from runpy import run_path

    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    try:
        handle = run_path(module)["handle"]
    except Exception as error:
        stdout.write(f"{type(error).__name__}: {error}".encode())
        return
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for limit, size in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        with suppress(OSError, ValueError):  # some systems refuse some limits
            resource.setrlimit(limit, (size, size))

    def loop() -> None:
        stdout.write(b"\n")
        stdout.flush()
        while len(head := stdin.read(LENGTH.size)) == LENGTH.size:
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF then ends the process
            try:
                data = handle(stdin.read(*LENGTH.unpack(head)))
                stdout.write(LENGTH.pack(len(data)) + data)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            stdout.flush()  # the next request may end the process

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()


if __name__ == "__main__":
    _, module, cpu_seconds, memory_bytes, *sys.path = sys.argv
    serve(module, float(cpu_seconds), int(memory_bytes))
