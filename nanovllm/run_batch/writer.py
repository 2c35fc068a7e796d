"""The output file: whose it is, what it holds already, and records at its end."""

import fcntl
import json
import os
import re
import stat
from pathlib import Path
from time import monotonic, sleep
from typing import BinaryIO

from nanovllm.run_batch.records import DUPLICATE, ID_PREFIX, Record, encode_record, key_of

LOCK_SECONDS = 5.0  # that the process of a job which was killed may take to end
START_OF_RECORD = f'{{"id": "{ID_PREFIX}'.encode()


class Writer:
    """Adds records to an output file, which it has locked, and knows those of earlier runs.

    A record that the end of an earlier run has cut off is removed.

    Args:
        path: the file; made if there is none.

    Attributes:
        done: the digest of the line of each record that it had at the start, by ``key_of`` the
            custom_id.
        done_lines: the same of lines without a custom_id of their own, by their number.
        num_records: records that it has.
        num_failed: those of them that are errors.

    Raises:
        OSError: the file cannot be opened.
        ValueError: another job is writing it, or it holds anything but records.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, str] = {}
        self.done_lines: dict[int, str] = {}
        self.num_records = self.num_failed = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise ValueError(f"{path} is no regular file")
            self._lock()
            with open(self._file, "rb", closefd=False) as file:
                end = self._read(file)
            os.ftruncate(self._file, end)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, record: Record) -> None:
        """Adds a record, whole. Raises OSError if it cannot, or if the file is no longer the one at
        its path."""
        self._check_path()
        data = memoryview(encode_record(record))
        size = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            os.ftruncate(self._file, size)
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self._count(record)

    def _check_path(self) -> None:
        try:
            is_there = os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise OSError(
                f"{self.path} has been removed or replaced since this job opened it, so its "
                f"records are lost"
            )

    def close(self) -> None:
        """Makes sure that the records are on the disk, and lets others write the file."""
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _lock(self) -> None:
        end = monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if monotonic() > end:
                    raise ValueError(f"another job is writing {self.path}") from None
                sleep(0.1)

    def _read(self, file: BinaryIO) -> int:
        """Notes the records in the file; returns where the last whole one ends."""
        end = 0
        for i, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                if not self._is_torn(line, is_first=i == 1):
                    raise ValueError(self._foreign(i))
                break
            try:
                self._note(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ValueError(self._foreign(i)) from None
            end += len(line)
        return end

    def _is_torn(self, line: bytes, is_first: bool) -> bool:
        """Whether a last line without an end is a record that was cut off."""
        cut = line.rstrip(b"\0")  # which a machine that lost its power may leave
        if not cut:
            return not is_first
        if not cut.startswith(START_OF_RECORD):
            return START_OF_RECORD.startswith(cut)
        try:
            record = json.loads(cut)
        except (ValueError, RecursionError):
            return True
        try:
            return _is_record(record)
        except (TypeError, KeyError):
            return False

    def _note(self, record: Record) -> None:
        """Raises ValueError, TypeError or KeyError for what is no record, or a second one."""
        if not _is_record(record):
            raise ValueError("no record")
        number = int(record["id"].removeprefix(ID_PREFIX))
        digest, custom_id = record["response"]["request_id"], record["custom_id"]
        self._count(record)
        if custom_id is None or (record["error"] or {}).get("code") == DUPLICATE:
            self.done_lines[number] = digest
        elif (key := key_of(custom_id)) not in self.done:
            self.done[key] = digest
        else:
            raise ValueError("a second record")

    def _count(self, record: Record) -> None:
        self.num_failed += record["error"] is not None
        self.num_records += 1

    def _foreign(self, i: int) -> str:
        return (
            f"line {i} of {self.path} is not what a job writes, or there twice: name another "
            f"output file, or remove it"
        )


def _is_record(record: Record) -> bool:
    """Whether a job wrote this. Raises TypeError or KeyError if it has another shape."""
    is_numbered = re.fullmatch(rf"{ID_PREFIX}[0-9]+", record["id"]) is not None
    return is_numbered and isinstance(record["response"]["request_id"], str)
