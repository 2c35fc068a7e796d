"""A process that works on untrusted input under limits of time and memory.

Run as a script, this file is that process.
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
WALL_SECONDS = 25.0  # of one question, on a busy machine too
STACK_BYTES = 4 << 20  # less than a main thread has, so that what passes here fits there
PIPE_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 27
OUT_OF_MEMORY = 77  # an exit status
LENGTH = struct.Struct("<Q")  # stands before each question and each answer


class Unanswered(Exception):
    """Why a question has no answer: a predicate, such as "takes too much memory"."""


class OutOfTime(Unanswered):
    """The question took longer than it may."""


class LimitedProcess:
    """Answers questions in a process of its own, where a question that crashes or never ends does
    no other harm.

    The process starts with the first question. It ends at ``close()``, with this object, or when
    the owner's process ends. Threads take turns. A forked child of the owner leaves the process
    alone and starts another.

    Args:
        module: the path of a Python file that defines ``answer(question: bytes) -> bytes``.
        cpu_seconds: CPU time of one question.
        memory_bytes: address space of the process.
    """

    def __init__(self, module: str, cpu_seconds: float, memory_bytes: int) -> None:
        self._module = module
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        _instances.add(self)

    def ask(self, questions: Iterator[bytes]) -> list[bytearray | Unanswered]:
        """Returns the answer to each question, or why it has none. After a question that ends the
        process, another process answers the rest.

        Raises:
            RuntimeError: the process does not start.
        """
        answers: list[bytearray | Unanswered] = []
        pending: deque[bytes] = deque()
        with self._lock:
            try:
                while (end := self._exchange(questions, pending, answers)) is not None:
                    answers.append(end)
                    pending.popleft()
                return answers
            except BaseException:
                self._end()
                raise

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _exchange(
        self,
        questions: Iterator[bytes],
        pending: deque[bytes],
        answers: list[bytearray | Unanswered],
    ) -> Unanswered | None:
        """Asks the pending questions again, then the others. Returns None when all have answers,
        or what ended the process: then the first pending question is the one that did it."""
        process = self._running()
        assert process.stdin and process.stdout
        outgoing, incoming = bytearray().join(pending), bytearray()
        deadline = monotonic() + WALL_SECONDS
        while True:
            while len(outgoing) < PIPE_BYTES and (question := next(questions, None)) is not None:
                pending.append(LENGTH.pack(len(question)) + question)
                outgoing += pending[-1]
            if not pending:
                return None
            try:
                del outgoing[: process.stdin.write(outgoing) or 0]
            except BrokenPipeError:  # what it answered before it ended is still to be read
                outgoing.clear()
            ready = _wait(process, bool(outgoing), deadline - monotonic())
            if not ready:
                self._end()
                return OutOfTime(f"takes over {WALL_SECONDS:g} s")
            if process.stdout.fileno() in ready:
                data = process.stdout.read(PIPE_BYTES)
                if not data:
                    return self._read_end(process)
                incoming += data
                while pending and len(incoming) >= LENGTH.size:
                    end = LENGTH.size + LENGTH.unpack_from(incoming)[0]
                    if end > MAX_ANSWER_BYTES:
                        self._end()
                        return Unanswered("has too long an answer")
                    if end > len(incoming):
                        break
                    answers.append(incoming[LENGTH.size : end])
                    del incoming[:end]
                    pending.popleft()
                    deadline = monotonic() + WALL_SECONDS

    def _read_end(self, process: subprocess.Popen[bytes]) -> Unanswered:
        """Why a process has closed its output."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(WALL_SECONDS)
        self._end()
        if process.returncode == -signal.SIGPROF:
            return OutOfTime(f"takes over {self._cpu_seconds:g} s")
        if process.returncode == OUT_OF_MEMORY:
            return Unanswered("takes too much memory")
        return Unanswered("ends its process")

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, started if there is none."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        process = self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", os.path.abspath(__file__)),
                *(self._module, str(self._cpu_seconds), str(self._memory_bytes)),
                *filter(None, sys.path),  # it imports what this process would
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for its owner
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

    def _end(self) -> None:
        if self._process is not None:
            self._process = None
            self._kill()

    def _leave_to_parent(self) -> None:
        self._lock = threading.Lock()
        if (process := self._process) is not None:
            self._process = None
            self._kill.detach()
            process.returncode = 0  # the parent waits for it
            _close_pipes(process)  # the parent's end is to be the end of its input


_instances: weakref.WeakSet[LimitedProcess] = weakref.WeakSet()


def _after_fork() -> None:
    for instance in list(_instances):
        instance._leave_to_parent()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def _wait(process: subprocess.Popen[bytes], writes: bool, seconds: float) -> set[int]:
    """Waits until the process has written something, or if the owner ``writes``, can be written to;
    returns the descriptors that are ready, none if that takes too long."""
    assert process.stdin and process.stdout
    poll = select.poll()  # which knows no limit for the number of a descriptor
    poll.register(process.stdout, select.POLLIN)
    if writes:
        poll.register(process.stdin, select.POLLOUT)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, 1000 * seconds))}


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    _close_pipes(process)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin and process.stdout
    process.stdin.close()
    process.stdout.close()


def serve(module: str, cpu_seconds: float, memory_bytes: int) -> None:
    """Answers each question on standard input, until it ends."""
    import resource
    from runpy import run_path

    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    try:
        answer = run_path(module)["answer"]
    except Exception as error:
        stdout.write(f"{type(error).__name__}: {error}".encode())
        return
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for limit, size in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        with suppress(OSError, ValueError):  # not on every system
            resource.setrlimit(limit, (size, size))

    def loop() -> None:
        stdout.write(b"\n")
        stdout.flush()
        while len(head := stdin.read(LENGTH.size)) == LENGTH.size:
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # at the end, SIGPROF ends it
            try:
                data = answer(stdin.read(*LENGTH.unpack(head)))
                stdout.write(LENGTH.pack(len(data)) + data)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            stdout.flush()  # an answer is known before the next question can end the process

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()


if __name__ == "__main__":
    _, module, cpu_seconds, memory_bytes, *sys.path = sys.argv
    serve(module, float(cpu_seconds), int(memory_bytes))
