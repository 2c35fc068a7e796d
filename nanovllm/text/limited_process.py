"""A process with limited time and memory, for work on untrusted input.

``LimitedProcess`` is the parent's side. The child process runs this file as a script.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

STARTUP_SECONDS = 60.0
WALL_SECONDS = 25.0  # for one request, even on a busy machine
# Less than a main thread's stack, so input that does not overflow the child's stack does not
# overflow the parent's either.
STACK_BYTES = 4 << 20
MAX_RESPONSE_BYTES = 1 << 27
OUT_OF_MEMORY, TOO_LONG = 77, 78  # exit statuses of the process
EXIT_REASONS = {OUT_OF_MEMORY: "takes too much memory", TOO_LONG: "has too long a response"}


class ProcessError(Exception):
    """A request has no response. The message is a predicate, such as "takes too much memory"."""


class LimitedProcess:
    """Handles requests in a separate process, so that a request that crashes or never ends fails
    alone.

    The process starts with the first request. It ends at ``close()``, when this object is garbage
    collected, or when the parent process ends. Several threads may call ``run``; they take turns.
    If the parent forks, its child does not use the same process, but starts its own.

    Args:
        module: the path of a Python file that defines ``handle(request) -> bytes``.
        cpu_seconds: the limit of CPU time for one request.
        memory_bytes: the limit of the process's address space.
    """

    def __init__(self, module: str, cpu_seconds: float, memory_bytes: int) -> None:
        self._module = module
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._lock = threading.Lock()
        _instances.add(self)

    def run(self, requests: list[Any]) -> list[bytes | ProcessError]:
        """Returns the response to each request, or the error that explains why it has none.
        Requests are pickled.

        If a request ends the process, a new process handles the remaining requests.

        Raises:
            RuntimeError: the process does not start.
        """
        responses: list[bytes | ProcessError] = []
        with self._lock:
            try:
                while len(responses) < len(requests):
                    self._exchange(requests[len(responses) :], responses)
                return responses
            except BaseException:
                self._stop()
                raise

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._stop()

    def _exchange(self, requests: list[Any], responses: list[bytes | ProcessError]) -> None:
        """Sends requests and appends the responses. Returns after a request that ends the process,
        with the reason as its response."""
        process, pipe = self._ensure_started()
        # The pipe holds only a few requests, and the process may wait until a response is read.
        sender = threading.Thread(target=_send, args=(pipe, requests))
        sender.start()
        try:
            for _ in requests:
                if not pipe.poll(WALL_SECONDS):
                    self._stop()
                    responses.append(ProcessError(f"takes over {WALL_SECONDS:g} s"))
                    break
                responses.append(pipe.recv_bytes(MAX_RESPONSE_BYTES))
        except (EOFError, OSError):
            responses.append(self._exit_reason(process))
        sender.join()

    def _exit_reason(self, process: subprocess.Popen[bytes]) -> ProcessError:
        """Waits for a process that has closed its pipe, and returns why it ended."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(WALL_SECONDS)
        self._stop()
        reasons = {**EXIT_REASONS, -signal.SIGPROF: f"takes over {self._cpu_seconds:g} s"}
        return ProcessError(reasons.get(process.returncode, "ends its process"))

    def _ensure_started(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """Returns the process and the pipe to it. Starts the process if it is not running."""
        if self._running is not None and self._running[0].poll() is None:
            return self._running
        self._stop()
        pipe, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", os.path.abspath(__file__)),
                    *(self._module, str(self._cpu_seconds), str(self._memory_bytes)),
                    *filter(None, sys.path),  # imports resolve as in the parent
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C interrupts only the parent
            )
        self._running = process, pipe
        self._kill = weakref.finalize(self, _kill, process)
        reason = b"it takes too long"
        if pipe.poll(STARTUP_SECONDS):
            try:
                reason = pipe.recv_bytes()
            except (EOFError, OSError):
                reason = b"it ended"
        if reason:
            text = reason.decode(errors="replace")
            raise RuntimeError(f"the process for {self._module} does not start: {text}")
        return self._running

    def _stop(self) -> None:
        if self._running is not None:
            self._running = None  # closes the pipe when no thread uses it any more
            self._kill()

    def _detach(self) -> None:
        """Forgets the process in a forked child, without ending it."""
        self._lock = threading.Lock()
        if self._running is not None:
            process, pipe = self._running
            self._running = None
            self._kill.detach()
            pipe.close()  # otherwise the process would not notice that the parent has ended
            process.returncode = 0  # only the parent can wait for the process


_instances: weakref.WeakSet[LimitedProcess] = weakref.WeakSet()


def _after_fork() -> None:
    for instance in list(_instances):
        instance._detach()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def _send(pipe: Connection, requests: list[Any]) -> None:
    with suppress(OSError):  # the process has ended
        for request in requests:
            pipe.send_bytes(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def serve(module: str, cpu_seconds: float, memory_bytes: int) -> None:
    """Receives requests and sends responses through standard input, which is a two-way pipe. An
    empty first message means that the process is ready, another that it cannot start."""
    import resource
    from runpy import run_path

    pipe = Connection(sys.stdin.fileno())
    try:
        handle = run_path(module)["handle"]
    except Exception as error:
        pipe.send_bytes(f"{type(error).__name__}: {error}".encode())
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
        response = b""
        while True:
            try:
                pipe.send_bytes(response)
                request = pipe.recv()
                signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF then ends the process
                response = handle(request)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            if len(response) > MAX_RESPONSE_BYTES:
                os._exit(TOO_LONG)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()


if __name__ == "__main__":
    _, module, cpu_seconds, memory_bytes, *sys.path = sys.argv
    serve(module, float(cpu_seconds), int(memory_bytes))
