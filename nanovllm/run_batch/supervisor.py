"""The process above a job's: it sees how that ends, and starts it again where a request ended it.

It imports nothing but the standard library, so that it is small, and forks before anything has
started a thread or touched a GPU.
"""

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from nanovllm.run_batch.journal import note_death

FAULT, INTERRUPTED = 70, 75
GO_ON = "the same command goes on from here"
DEFAULT_GRACE = 30.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
MAX_DEATHS = 100  # of processes, each of which takes a start of the engine
MAX_SECONDS = 1e7  # of a grace, for the timer
MARGIN_SECONDS = 5.0  # after the grace, to write what has finished and end
PR_SET_PDEATHSIG = 1  # of prctl(2)


def journal_path(output_path: Path) -> Path:
    """Where the job with this output has its journal."""
    return output_path.with_name(f"{output_path.name}.journal")


def open_standard_files() -> None:
    """Opens stdin, stdout and stderr where they are closed: another file would take their place."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def say(message: str) -> None:
    """On stderr, if that can be written: a full disk or a closed pipe there harms no job."""
    with suppress(OSError, ValueError):
        print(f"run_batch: {message}", file=sys.stderr, flush=True)


def supervise(job: Callable[[], int], argv: Sequence[str]) -> int:
    """Does a job in a child process, and again when that dies with requests under way.

    Args:
        job: what to do; returns the exit status.
        argv: its command line, of which the output file and the grace matter here.

    Returns:
        The exit status, in this process as in the child.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-o", "--output-file", type=Path, default=Path(os.devnull))
    parser.add_argument("--grace", type=float, default=DEFAULT_GRACE)
    try:
        args, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return job()  # which says what is wrong with it
    with _Supervisor(args.grace) as supervisor:
        for _ in range(MAX_DEATHS):
            status = supervisor.run()
            if status is None:
                break
            if supervisor.reported is not None:
                return supervisor.reported
            name = f"exit status {status}"
            if status < 0:
                name = signal.strsignal(-status) or f"signal {-status}"
            if supervisor.is_told or -status in STOP_SIGNALS:
                say(f"interrupted ({name}); {GO_ON}")
                return INTERRUPTED
            try:
                num_requests = note_death(journal_path(args.output_file), supervisor.pid)
            except (OSError, ValueError) as error:
                say(f"error: {error}")
                num_requests = 0
            if not num_requests:
                say(f"the process died ({name}), not by any request that is known; {GO_ON}")
                return FAULT
            if supervisor.is_told:
                return INTERRUPTED
            say(f"the process died ({name}) with {num_requests} requests under way: starting again")
        else:
            say(f"the process died {MAX_DEATHS} times; {GO_ON}")
            return FAULT
    try:
        status = job()
    except SystemExit as end:  # argparse's
        status = end.code if isinstance(end.code, int) else FAULT
    supervisor.report(status)
    return status


class _Supervisor:
    """Within its ``with`` block, passes signals on to a child process, if there is one.

    SIGTERM and SIGINT go on to it. If it has not ended by ``grace`` and MARGIN_SECONDS after the
    first of them, whatever it is doing, it is killed. SIGTSTP (Ctrl-Z) stops both. The child dies
    with this process.

    Args:
        grace: seconds.

    Attributes:
        is_told: whether the child was told to end.
        pid: the latest child's process id.
        reported: the exit status that it has reported; None if it ended before it could.
    """

    def __init__(self, grace: float) -> None:
        self.is_told = False
        self.pid = 0
        self.reported: int | None = None
        self._seconds = min(max(0.0, grace), MAX_SECONDS) + MARGIN_SECONDS
        self._is_alive = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Supervisor":
        for number in (*STOP_SIGNALS, signal.SIGALRM, signal.SIGTSTP):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # as for a job in a shell's background
                self._before[number] = before
                signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in self._before.items():
            signal.signal(number, before)

    def run(self) -> int | None:
        """Forks a child. In this process, returns its exit status, or minus the signal that ended
        it; in the child, which has the handlers of before, None."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pipe, self._pipe = os.pipe()
        os.set_blocking(pipe, False)  # a child of the child may have the other end
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._before)
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)  # a terminal's Ctrl-C goes to the parent, which passes it on
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # or a terminal may stop its messages
            self.__exit__()
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the job has its own
            _die_with(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(pipe)
            return None
        self._is_alive = True
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(self._pipe)
        _, status = os.waitpid(self.pid, 0)
        self._is_alive = False
        with open(pipe, "rb", buffering=0) as file:
            data = file.read(1)
        self.reported = data[0] if data else None
        return os.waitstatus_to_exitcode(status)

    def report(self, status: int) -> None:
        """Tells the parent, in the child, how the job has ended; others may end a process too."""
        os.write(self._pipe, bytes([status]))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self._send_all(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send_all(signal.SIGCONT)  # after fg or bg
            return
        if number == signal.SIGALRM:
            say(f"it did not end within {self._seconds:.0f} s, and is killed")
            number = signal.SIGKILL
        elif not self.is_told:
            self.is_told = True
            signal.setitimer(signal.ITIMER_REAL, self._seconds)
        if self._is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _send_all(self, number: int) -> None:
        """To the child and its own children."""
        if self._is_alive:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)


def _die_with(parent: int) -> None:
    """Ends this process when its parent has ended. (Elsewhere than on Linux it goes on.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
