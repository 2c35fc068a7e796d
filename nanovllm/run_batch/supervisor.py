"""Runs a job in a child process, and starts another child if it dies with requests in flight.

The supervisor process imports only the standard library, so it stays small. It forks before
anything starts a thread or initialises a GPU.
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

from nanovllm.run_batch.journal import note_death
from nanovllm.run_batch.stop import STOP_SIGNALS, SignalHandler

INTERNAL_ERROR, INTERRUPTED = 70, 75
RESUME_HINT = "run the same command again to resume"
DEFAULT_GRACE = 30.0
MAX_DEATHS = 100  # of child processes
MAX_GRACE_SECONDS = 1e7  # longest time that the timer accepts
MARGIN_SECONDS = 5.0  # time after the grace period to write finished records and exit
PR_SET_PDEATHSIG = 1  # for prctl(2)


def journal_path(output_path: Path) -> Path:
    """Returns the path of the journal of the job with this output file."""
    return output_path.with_name(f"{output_path.name}.journal")


def open_standard_files() -> None:
    """Connects standard streams that are closed to /dev/null. Otherwise the next file to be opened
    would get the descriptor of a standard stream."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def print_message(message: str) -> None:
    """Prints a message to stderr. Ignores errors, such as a full disk or a closed pipe."""
    with suppress(OSError, ValueError):
        print(f"run_batch: {message}", file=sys.stderr, flush=True)


def end_with(status: int, message: str) -> int:
    """Prints a message and returns the exit status."""
    print_message(message)
    return status


def supervise(job: Callable[[], int], argv: Sequence[str]) -> int:
    """Runs a job in a child process, and again if the child dies with requests in flight.

    This function forks, and returns in both processes.

    Args:
        job: runs the job and returns its exit status.
        argv: the job's command line. Only the output file and the grace period are read here.

    Returns:
        The job's exit status.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-o", "--output-file", type=Path, default=Path(os.devnull))
    parser.add_argument("--grace", type=float, default=DEFAULT_GRACE)
    try:
        args, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return job()  # the job's own parser reports the error
    with _Supervisor(args.grace) as supervisor:
        for _ in range(MAX_DEATHS):
            status = supervisor.run()
            if status is None:
                break
            if supervisor.reported_status is not None:
                return supervisor.reported_status
            name = f"exit status {status}"
            if status < 0:
                name = signal.strsignal(-status) or f"signal {-status}"
            if supervisor.is_stopping or -status in STOP_SIGNALS:
                return end_with(INTERRUPTED, f"interrupted ({name}); {RESUME_HINT}")
            death = f"the process died ({name})"
            try:
                num_requests = note_death(journal_path(args.output_file), supervisor.pid)
            except (OSError, ValueError) as error:
                print_message(f"error: {error}")
                num_requests = 0
            if not num_requests:
                message = f"{death} with no known request in flight; {RESUME_HINT}"
                return end_with(INTERNAL_ERROR, message)
            if supervisor.is_stopping:
                return INTERRUPTED
            print_message(f"{death} with {num_requests} requests in flight: restarting")
        else:
            return end_with(INTERNAL_ERROR, f"the process died {MAX_DEATHS} times; {RESUME_HINT}")
    try:
        status = job()
    except SystemExit as end:  # raised by argparse
        status = end.code if isinstance(end.code, int) else INTERNAL_ERROR
    supervisor.report(status)
    return status


class _Supervisor(SignalHandler):
    """Runs child processes, and forwards signals to them within its ``with`` block.

    SIGTERM and SIGINT are forwarded. If the child is still alive ``grace`` plus MARGIN_SECONDS
    after the first such signal, it is killed. SIGTSTP (Ctrl-Z) stops both processes. The child is
    killed when this process ends.

    Args:
        grace: seconds in which running requests may finish.

    Attributes:
        is_stopping: whether SIGTERM or SIGINT has arrived.
        pid: the process id of the latest child.
        reported_status: the exit status that the child reported; None if it died without a
            report.
    """

    numbers = (*STOP_SIGNALS, signal.SIGALRM, signal.SIGTSTP)

    def __init__(self, grace: float) -> None:
        self.is_stopping = False
        self.pid = 0
        self.reported_status: int | None = None
        self._seconds = min(max(0.0, grace), MAX_GRACE_SECONDS) + MARGIN_SECONDS
        self._is_alive = False

    def __exit__(self, *exc_info: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        super().__exit__()

    def run(self) -> int | None:
        """Forks a child process.

        Returns:
            In the child, None at once; the original signal handlers are restored. In this process,
            the child's exit status when it has ended, or minus the signal that killed it.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pipe, self._pipe = os.pipe()
        os.set_blocking(pipe, False)  # a grandchild may keep the other end open
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._before)
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)  # so that Ctrl-C reaches only the parent, which forwards it
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # so that it may write to the terminal
            self.__exit__()
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the job sets its own handler
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
        self.reported_status = data[0] if data else None
        return os.waitstatus_to_exitcode(status)

    def report(self, status: int) -> None:
        """Called in the child: sends the job's exit status to the parent. Without this report, the
        parent could not tell the job's end from an exit that a library caused."""
        os.write(self._pipe, bytes([status]))

    def handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self._send(os.killpg, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send(os.killpg, signal.SIGCONT)  # after fg or bg
            return
        if number == signal.SIGALRM:
            print_message(f"the job did not end within {self._seconds:.0f} s and is killed")
            number = signal.SIGKILL
        elif not self.is_stopping:
            self.is_stopping = True
            signal.setitimer(signal.ITIMER_REAL, self._seconds)
        self._send(os.kill, number)

    def _send(self, send: Callable[[int, int], None], number: int) -> None:
        """Sends a signal to the child (``os.kill``) or to its process group (``os.killpg``)."""
        if self._is_alive:
            with suppress(ProcessLookupError):
                send(self.pid, number)


def _die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends. Does nothing on systems other than
    Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
