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
from mmap import mmap
from pathlib import Path

from nanovllm.run_batch.journal import note_death
from nanovllm.run_batch.stop import STOP_SIGNALS

INTERNAL_ERROR, INTERRUPTED = 70, 75
RESUME_HINT = "run the same command again to resume"
DEFAULT_GRACE = 30.0
MAX_DEATHS = 100  # of child processes
MAX_GRACE_SECONDS = 1e7  # longest time that the timer accepts
MARGIN_SECONDS = 5.0  # time after the grace period to write finished records and exit
NO_REPORT = 255
PR_SET_PDEATHSIG = 1  # for prctl(2)


def journal_path(output_path: Path) -> Path:
    """Returns the path of the journal of the job with this output file."""
    return output_path.with_name(f"{output_path.name}.journal")


def open_standard_files() -> None:
    """Opens /dev/null for each standard stream that is closed. Otherwise the next file to be opened
    would get the descriptor of that stream."""
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

    This function forks, and returns in both processes. The parent forwards SIGTERM and SIGINT to
    the child, unless it ignores them. If the child is still alive MARGIN_SECONDS after its grace
    period, it is killed. SIGTSTP (Ctrl-Z) suspends both processes. The child is killed when the
    parent ends.

    Args:
        job: runs the job and returns its exit status.
        argv: the job's command line. Only the output file and the grace period are read here.

    Returns:
        The job's exit status. In the parent, the signals above stay blocked.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-o", "--output-file", type=Path, default=Path(os.devnull))
    parser.add_argument("--grace", type=float, default=DEFAULT_GRACE)
    try:
        args, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return job()  # the job's own parser reports the error
    # Some systems drop a SIGCHLD that has no handler, even while it is blocked.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signals = {n for n in (*STOP_SIGNALS, signal.SIGTSTP) if signal.getsignal(n) != signal.SIG_IGN}
    signals |= {signal.SIGCHLD, signal.SIGALRM}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # The child reports the job's exit status in shared memory. Without the report, the parent could
    # not tell the job's end from an exit that a library caused.
    report = mmap(-1, 1)
    report[0] = NO_REPORT
    for _ in range(MAX_DEATHS):
        try:
            pid = _fork(mask)
        except OSError as error:
            message = f"error: cannot start a process: {error}; when that is fixed, {RESUME_HINT}"
            return end_with(INTERRUPTED, message)
        if pid == 0:
            break
        status, was_interrupted = _wait(pid, signals, args.grace)
        if report[0] != NO_REPORT:
            return report[0]
        name = f"exit status {status}"
        if status < 0:
            name = signal.strsignal(-status) or f"signal {-status}"
        if was_interrupted or -status in STOP_SIGNALS:
            return end_with(INTERRUPTED, f"interrupted ({name}); {RESUME_HINT}")
        death = f"the process died ({name})"
        try:
            num_requests = note_death(journal_path(args.output_file), pid)
        except (OSError, ValueError) as error:
            print_message(f"error: {error}")
            num_requests = 0
        if not num_requests:
            message = f"{death} with no known request in flight; {RESUME_HINT}"
            return end_with(INTERNAL_ERROR, message)
        print_message(f"{death} with {num_requests} requests in flight: restarting")
    else:
        return end_with(INTERNAL_ERROR, f"the process died {MAX_DEATHS} times; {RESUME_HINT}")
    try:
        status = job()
    except SystemExit as end:  # raised by argparse
        status = end.code if isinstance(end.code, int) else INTERNAL_ERROR
    report[0] = status
    return status


def _fork(mask: set[int | signal.Signals]) -> int:
    """Forks a child process with a signal mask. Returns the child's process id; 0 in the child."""
    parent = os.getpid()
    pid = os.fork()
    os.setpgid(pid, pid)  # so that Ctrl-C reaches only the parent, which forwards it
    if pid == 0:
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # so that it may write to the terminal
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the job sets its own handler
        _die_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _wait(pid: int, signals: set[signal.Signals], grace: float) -> tuple[int, bool]:
    """Waits for a child process, and acts on signals, which must be blocked.

    Returns:
        The child's exit status, or minus the signal that killed it; and whether it was sent SIGTERM
        or SIGINT.
    """
    seconds = min(max(0.0, grace), MAX_GRACE_SECONDS) + MARGIN_SECONDS
    was_interrupted = False
    while True:
        number = signal.sigwait(signals)
        if number == signal.SIGCHLD:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), was_interrupted
        elif number == signal.SIGTSTP:
            os.killpg(pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.killpg(pid, signal.SIGCONT)  # after fg or bg
        elif number == signal.SIGALRM:
            os.kill(pid, signal.SIGKILL)  # before the message, which a full pipe may block
            print_message(f"the job did not end within {seconds:.0f} s and is killed")
        else:
            if not was_interrupted:
                signal.setitimer(signal.ITIMER_REAL, seconds)
            was_interrupted = True
            os.kill(pid, number)


def _die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends. Does nothing on systems other than
    Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
