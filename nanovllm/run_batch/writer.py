"""Writes the output file: locks it, reads the records of earlier runs, and appends records."""

import fcntl
import json
import os
import re
import stat
from pathlib import Path
from time import monotonic, sleep
from typing import BinaryIO

from nanovllm.run_batch.records import DUPLICATE, ID_PREFIX, Record, encode_record, key_for

LOCK_SECONDS = 5.0  # time for a killed job's process to end and release its lock
START_OF_RECORD = f'{{"id": "{ID_PREFIX}'.encode()


class Writer:
    """Locks an output file, reads the records of earlier runs, and appends records.

    If an earlier run ended in the middle of a record, that record is removed.

    Args:
        path: the output file, which is created if it does not exist.

    Attributes:
        done: for each record that the file had at the start, the digest of its input line, by
            ``key_for`` of the custom_id.
        done_lines: the same for records without a custom_id, or with that of an earlier line, by
            line number.
        num_records: the number of records in the file.
        num_failed: the number of them that are errors.

    Raises:
        OSError: the file cannot be opened.
        ValueError: another job is writing the file, or it holds anything but records.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, str] = {}
        self.done_lines: dict[int, str] = {}
        self.num_records = self.num_failed = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise ValueError(f"{path} is not a regular file")
            self._lock()
            with open(self._file, "rb", closefd=False) as file:
                end = self._read(file)
            os.ftruncate(self._file, end)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, record: Record) -> None:
        """Appends a record. Raises OSError, and leaves the file unchanged, if the write fails or if
        another file has taken its path."""
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
        """Flushes the records to the disk and unlocks the file."""
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
        """Reads the records in the file. Returns the position where the last complete one ends."""
        end = 0
        for i, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                if not self._is_truncated(line, is_first=i == 1):
                    raise ValueError(self._not_a_record(i))
                break
            try:
                self._add_existing(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ValueError(self._not_a_record(i)) from None
            end += len(line)
        return end

    def _is_truncated(self, line: bytes, is_first: bool) -> bool:
        """Returns whether a last line without a line break is a truncated record."""
        text = line.rstrip(b"\0")  # a power failure may leave zeros at the end
        if not text:
            return not is_first
        if not text.startswith(START_OF_RECORD):
            return START_OF_RECORD.startswith(text)
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return True
        try:
            return _is_record(record)
        except (TypeError, KeyError):
            return False

    def _add_existing(self, record: Record) -> None:
        """Counts a record of an earlier run. Raises ValueError, TypeError or KeyError if it is not
        a record, or the second one of a request."""
        if not _is_record(record):
            raise ValueError("not a record")
        number = int(record["id"].removeprefix(ID_PREFIX))
        digest, custom_id = record["response"]["request_id"], record["custom_id"]
        self._count(record)
        if custom_id is None or (record["error"] or {}).get("code") == DUPLICATE:
            self.done_lines[number] = digest
        elif (key := key_for(custom_id)) not in self.done:
            self.done[key] = digest
        else:
            raise ValueError("a second record")

    def _count(self, record: Record) -> None:
        self.num_failed += record["error"] is not None
        self.num_records += 1

    def _not_a_record(self, i: int) -> str:
        return (
            f"line {i} of {self.path} is not a batch job's record, or a duplicate: name another "
            f"output file, or remove the line"
        )


def _is_record(record: Record) -> bool:
    """Returns whether a JSON value has the form of a record. May also raise TypeError or KeyError
    if it has not."""
    is_numbered = re.fullmatch(rf"{ID_PREFIX}[0-9]+", record["id"]) is not None
    return is_numbered and isinstance(record["response"]["request_id"], str)
