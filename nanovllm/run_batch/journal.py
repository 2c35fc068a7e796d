"""Keeps a file with the requests in flight, to find the request that made the process die.

A request may crash native code, or use so much memory that the operating system kills the process.
Python cannot catch either, but the file remains for the next process to read.
"""

import os
import re
import stat
from pathlib import Path

# The first line has the id of the process that writes the file, and the number of records in the
# output file when the process started. Each other line is a slot. It is blank or has a request: the
# digest of its input line, its number of deaths, and whether it is in flight ("+") or not (".").
HEADER = re.compile(rb"[0-9]{15} [0-9]{20}\n")
ENTRY = re.compile(rb"([0-9a-f]{32}) ([0-9]) ([+.])\n")
LINE_BYTES = 37  # every line has the same length, so that it can be overwritten in place
MAX_BYTES = 16 << 20


class Journal:
    """Tracks which requests are in flight, and how often the process died with each in flight.

    A death counts against every request in flight, because any of them may be the cause. To find
    the cause, the job runs these requests again in ever smaller groups.

    The supervisor counts deaths with ``note_death``. If the supervisor was killed together with the
    process, nobody knows whether a request caused the death or somebody ended the job. The next run
    counts such a death only if the process had written no record. A request that always causes it
    is found nonetheless: while runs write records, the job makes progress, and in the end they die
    before their first record.

    Args:
        path: the journal file. The file of an earlier run is read and continued.
        num_records: the number of records in the output file.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: the file is not a journal.
    """

    def __init__(self, path: Path, num_records: int) -> None:
        self.path = path
        self._file, text = _open(path, os.O_CREAT)
        self._header = _header(os.getpid(), num_records)
        has_new_records = text[16:LINE_BYTES] != self._header[16:]
        self._num_deaths = _count_deaths(text, adds_death=not has_new_records)
        _rewrite(self._file, self._header, self._num_deaths)
        self._slots = {digest: i for i, digest in enumerate(self._num_deaths, start=1)}
        self._free: list[int] = []

    def num_deaths(self, digest: str) -> int:
        """Returns how many times the process died with a request in flight."""
        return self._num_deaths.get(digest, 0)

    def begin(self, digest: str) -> None:
        """Marks a request as in flight. Raises OSError if the file cannot be written."""
        if digest not in self._slots:
            self._slots[digest] = self._free.pop() if self._free else len(self._slots) + 1
        self._write(digest, "+")

    def end(self, digest: str) -> None:
        """Marks a request as no longer in flight. Raises OSError if the file cannot be written."""
        if digest in self._slots:  # two lines with the same digest have one slot
            self._write(digest, ".")
            if not self.num_deaths(digest):
                self._free.append(self._slots.pop(digest))

    def forget(self, digest: str) -> None:
        """Sets the number of deaths of a finished request to 0. Raises OSError if the file cannot
        be written."""
        if self._num_deaths.pop(digest, 0):
            self.end(digest)

    def close(self, is_done: bool) -> None:
        """Closes the journal. Removes the file if no later run needs it.

        Args:
            is_done: whether every request has its record.
        """
        try:
            if is_done or not self._num_deaths:
                self.path.unlink(missing_ok=True)
            else:
                _rewrite(self._file, self._header, self._num_deaths)
        finally:
            os.close(self._file)

    def _write(self, digest: str, state: str) -> None:
        entry = _entry(digest, self.num_deaths(digest), state)
        try:
            os.pwrite(self._file, entry, self._slots[digest] * LINE_BYTES)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def note_death(path: Path, pid: int) -> int:
    """Counts the death of a process against every request that was in flight.

    Args:
        path: the journal file.
        pid: the process that died. The journal of another process is left unchanged.

    Returns:
        The number of requests that were in flight.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: the file is not a journal.
    """
    if not path.exists():
        return 0
    file, text = _open(path)
    try:
        if not text or int(text[:15]) != pid:
            return 0
        _rewrite(file, text[:LINE_BYTES], _count_deaths(text, True))
        return _num_in_flight(text)
    finally:
        os.close(file)


def _open(path: Path, flags: int = 0) -> tuple[int, bytes]:
    """Opens a journal. Returns its file descriptor and its text, which is empty if it is new."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError(f"{path} is not a regular file")
        text = os.pread(file, MAX_BYTES, 0)
        if not text.strip(b"\0"):  # a power failure may leave a file of zeros
            return file, b""
        if not HEADER.match(text):
            raise ValueError(
                f"{path} is not a job's journal, but has the name of this job's journal: move it, "
                f"or name another output file"
            )
        return file, text
    except BaseException:
        os.close(file)
        raise


def _num_in_flight(text: bytes) -> int:
    return text.count(b"+\n")


def _count_deaths(text: bytes, adds_death: bool) -> dict[str, int]:
    """Returns the number of deaths of each request that has any. With ``adds_death``, each request
    in flight has one more."""
    num_deaths = {}
    for digest, num, state in ENTRY.findall(text):
        if num_after := min(9, int(num) + (adds_death and state == b"+")):
            num_deaths[digest.decode()] = num_after
    return num_deaths


def _header(pid: int, num_records: int) -> bytes:
    return b"%015d %020d\n" % (pid, num_records)


def _entry(digest: str, num_deaths: int, state: str) -> bytes:
    return f"{digest} {num_deaths} {state}\n".encode()


def _rewrite(file: int, header: bytes, num_deaths: dict[str, int]) -> None:
    """Replaces the entries with the given numbers of deaths, with no request in flight."""
    text = header + b"".join(_entry(digest, num, ".") for digest, num in num_deaths.items())
    # One write replaces all lines, so that no old entry remains if the process dies here.
    os.pwrite(file, text.ljust(os.fstat(file).st_size), 0)
