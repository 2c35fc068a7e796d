"""Writes the output file: locks it, reads the records of earlier runs, and appends records."""

import fcntl
import json
import os
import re
import stat
from collections import Counter
from contextlib import suppress
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
        done: the records that the file had at the start, as a dict from ``key_for(custom_id)`` to
            the digest of the input line.
        failed: the keys in ``done`` whose record is an error.
        done_lines: the error records of lines whose custom_id is missing or repeats that of an
            earlier line: the number of records by the digest of their line.
        num_records: the number of records that the file had at the start.
        models: the models that these records name.

    Raises:
        OSError: the file cannot be opened.
        ValueError: another job is writing the file, or it contains something other than records.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[bytes, str] = {}
        self.failed: set[bytes] = set()
        self.done_lines: Counter[str] = Counter()
        self.num_records = 0
        self.models: set[str] = set()
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

    def _check_path(self) -> None:
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._file)):
                return
        raise OSError(
            f"{self.path} has been removed or replaced since this job opened it, so the records "
            f"written to it are lost"
        )

    def close(self) -> None:
        """Flushes the records to the disk and unlocks the file."""
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)

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
            try:
                if line.endswith(b"\n"):
                    self._add_existing(_parse_record(line))
                    end += len(line)
                else:
                    _check_truncated(line, is_first=i == 1)
            except (ValueError, RecursionError):
                raise ValueError(
                    f"line {i} of {self.path} is not a batch job's record, or a duplicate: name "
                    f"another output file, or remove the line"
                ) from None
        return end

    def _add_existing(self, record: Record) -> None:
        """Counts a record of an earlier run. Raises ValueError if it is the second record of a
        request."""
        self.num_records += 1
        response, error, custom_id = record["response"], record["error"], record["custom_id"]
        if error is None and isinstance(model := (response.get("body") or {}).get("model"), str):
            self.models.add(model)
        if custom_id is None or (error or {}).get("code") == DUPLICATE:
            self.done_lines[response["request_id"]] += 1
            return
        key = key_for(custom_id)
        if key in self.done:
            raise ValueError("a second record")
        self.done[key] = response["request_id"]
        if error is not None:
            self.failed.add(key)


def _parse_record(text: bytes) -> Record:
    """Parses a line of the file. Raises ValueError if it is not a record, and JSONDecodeError or
    RecursionError if it is not JSON."""
    match record := json.loads(text):
        case {
            "id": str(name),
            "custom_id": str() | None,
            "response": {"request_id": str()},
            "error": dict() | None,
        } if re.fullmatch(rf"{ID_PREFIX}[0-9]+", name):
            return record
    raise ValueError("not a record")


def _check_truncated(line: bytes, is_first: bool) -> None:
    """Checks the last line if it has no line break: raises ValueError unless it is a truncated
    record."""
    text = line.rstrip(b"\0")  # a power failure may leave zeros at the end
    if text.startswith(START_OF_RECORD):
        with suppress(json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            _parse_record(text)
    elif not START_OF_RECORD.startswith(text) or (is_first and not text):
        raise ValueError("not the start of a record")
