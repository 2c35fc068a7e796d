"""Which requests are under way, in a file beside the output: some input may end the process.

What a request cannot do by Python's means it may do to native code: crash it, or make it take so
much memory that the operating system kills the process. Nothing can be caught then, but what the
process has written to a file stays.
"""

import os
import re
import stat
from pathlib import Path

# A line for each request: the digest of its line in the input, the number of deaths, and whether it
# is under way ("+") or not ("."). The first line has the id of the process that writes, and the
# number of records at its start.
HEADER = re.compile(rb"[0-9]{15} [0-9]{20}\n")
ENTRY = re.compile(rb"([0-9a-f]{32}) ([0-9]) ([+.])\n")
SIZE = 37  # bytes of each line, so that one can be written over
FREE = b" " * (SIZE - 1) + b"\n"
MAX_BYTES = 16 << 20


class Journal:
    """A job's notes of what is under way, and how often the process has died with what.

    A death counts against every request that was under way, so those have to be run again in ever
    smaller groups. A job that is killed from outside, with whoever watches over it
    (``note_death``), knows nothing of the reason. Then a death counts if the job had written no
    record since its start, or if one request alone was under way: a job that is only interrupted
    gets on.

    Args:
        path: the file; that of an earlier run is read.
        num_records: how many the output has.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: the file is no journal.
    """

    def __init__(self, path: Path, num_records: int) -> None:
        self.path = path
        self._file = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            text = _read(self._file, path)
            under_way = [digest for digest, _, state in ENTRY.findall(text) if state == b"+"]
            has_records = text[16:SIZE] != _header(0, num_records)[16:]
            counts = len(under_way) == 1 or not has_records
            self._num_deaths = _count_deaths(text, counts)
            self._header = _header(os.getpid(), num_records)
            _rewrite(self._file, self._header, self._num_deaths)
        except BaseException:
            os.close(self._file)
            raise
        self._places = {digest: i for i, digest in enumerate(self._num_deaths, start=1)}
        self._num_lines = 1 + len(self._places)
        self._free: list[int] = []
        self._is_open = True

    def num_deaths(self, digest: str) -> int:
        """How many times the process has died with a request under way."""
        return self._num_deaths.get(digest, 0)

    def forget(self, digest: str) -> None:
        """Takes away the deaths of a request, which has its record now. Raises OSError."""
        if self._num_deaths.pop(digest, 0):
            self.end(self._places.pop(digest))

    def begin(self, digest: str) -> int:
        """Notes that a request is under way; returns its place, for ``end``. Raises OSError."""
        place = self._free.pop() if self._free else self._num_lines
        self._num_lines = max(self._num_lines, place + 1)
        self._write(place, _entry(digest, self.num_deaths(digest), "+"))
        return place

    def end(self, place: int) -> None:
        """Notes that it no longer is; does nothing after ``close``. Raises OSError."""
        if self._is_open:
            self._write(place, FREE)
            self._free.append(place)

    def close(self, is_done: bool) -> None:
        """Ends the notes, and removes them where nobody will need them.

        Args:
            is_done: whether every request has its record.
        """
        self._is_open = False
        try:
            if is_done or not self._num_deaths:
                self.path.unlink(missing_ok=True)
            else:
                _rewrite(self._file, self._header, self._num_deaths)
        finally:
            os.close(self._file)

    def _write(self, place: int, entry: bytes) -> None:
        try:
            os.pwrite(self._file, entry, place * SIZE)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def note_death(path: Path, pid: int | None = None) -> int:
    """Counts a death of a process against the requests that were under way, all of which may be
    the reason.

    Args:
        path: of the journal.
        pid: the process, whose journal it has to be; None where it can be no other's.

    Returns:
        how many requests were under way.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: the file is no journal.
    """
    if not path.exists():
        return 0
    file = _open(path, os.O_RDWR)
    try:
        text = _read(file, path)
        if not text or (pid is not None and int(text[:15]) != pid):
            return 0
        _rewrite(file, text[:SIZE], _count_deaths(text, True))
        return sum(state == b"+" for _, _, state in ENTRY.findall(text))
    finally:
        os.close(file)


def _open(path: Path, flags: int) -> int:
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError(f"{path} is no regular file")
    return file


def _read(file: int, path: Path) -> bytes:
    text = os.pread(file, MAX_BYTES, 0)
    if not text.strip(b"\0"):  # which a machine that lost its power may leave
        return b""
    if not HEADER.match(text):
        raise ValueError(
            f"{path}, where the job has its notes, is something else: move it, or name another "
            f"output file"
        )
    return text


def _count_deaths(text: bytes, counts: bool) -> dict[str, int]:
    """The number of deaths of each request that has any; ``counts``: with those under way."""
    num_deaths: dict[str, int] = {}
    for digest, num, state in ENTRY.findall(text):
        num_after = min(9, int(num) + (counts and state == b"+"))
        if num_after:
            name = digest.decode()
            num_deaths[name] = max(num_deaths.get(name, 0), num_after)
    return num_deaths


def _header(pid: int, num_records: int) -> bytes:
    return b"%015d %020d\n" % (pid, num_records)


def _entry(digest: str, num_deaths: int, state: str) -> bytes:
    return f"{digest} {num_deaths} {state}\n".encode()


def _rewrite(file: int, header: bytes, num_deaths: dict[str, int]) -> None:
    """Writes the file anew; its lines are never more than before."""
    entries = b"".join(_entry(digest, num, ".") for digest, num in num_deaths.items())
    num_before = os.fstat(file).st_size // SIZE - 1
    rest = FREE * max(0, num_before - len(num_deaths))
    os.pwrite(file, header + entries + rest, 0)  # in one go
    os.ftruncate(file, SIZE + len(entries))
