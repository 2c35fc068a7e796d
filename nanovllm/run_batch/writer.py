"""The output file: whose it is, what it holds already, and records at its end."""

import fcntl
import json
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from nanovllm.run_batch.records import DUPLICATE, ID_PREFIX, Record, encode_record

START_OF_RECORD = f'{{"id": "{ID_PREFIX}'.encode()


class Writer:
    """Adds records to an output file, which it has locked, and knows those of earlier runs.

    A record that the end of an earlier run has cut off is removed.

    Args:
        path: the file; made if there is none.

    Attributes:
        done: the digest of the line of each record that it had at the start, by custom_id.
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
        """Adds a record, whole, or raises OSError."""
        data = memoryview(encode_record(record))
        size = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            os.ftruncate(self._file, size)
            raise
        self._count(record)

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
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another job is writing {self.path}") from None

    def _read(self, file: BinaryIO) -> int:
        """Notes the records in the file; returns where the last whole one ends."""
        end = 0
        for i, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                cut = line.rstrip(b"\0")  # which a machine that lost its power may leave
                if not (cut.startswith(START_OF_RECORD) or START_OF_RECORD.startswith(cut)):
                    raise ValueError(self._foreign(i))
                break
            try:
                self._note(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ValueError(self._foreign(i)) from None
            end += len(line)
        return end

    def _note(self, record: Record) -> None:
        """Raises ValueError, TypeError or KeyError for what is no record, or a second one."""
        number = re.fullmatch(rf"{ID_PREFIX}([0-9]+)", record["id"])
        digest, custom_id = record["response"]["request_id"], record["custom_id"]
        if number is None or not isinstance(digest, str):
            raise ValueError("no record")
        self._count(record)
        if custom_id is None or (record["error"] or {}).get("code") == DUPLICATE:
            self.done_lines[int(number[1])] = digest
        elif custom_id not in self.done:
            self.done[str(custom_id)] = digest
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
