"""One job: an input file, its output file, and what is left to do between them."""

import logging
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic

from tqdm import tqdm

from nanovllm.run_batch.journal import Journal
from nanovllm.run_batch.lines import read_lines
from nanovllm.run_batch.records import DUPLICATE, Record, RequestError, error_record, key_of
from nanovllm.run_batch.request import BatchRequest, check_template, parse_line
from nanovllm.run_batch.supervisor import journal_path
from nanovllm.run_batch.writer import Writer

logger = logging.getLogger("nanovllm.run_batch")

LOG_SECONDS = 60.0


class Job:
    """The records that an input file still needs, and where they go.

    Args:
        input_path: requests, one a line.
        output_path: records; those of earlier runs stay, and are not made again.
        trusts_templates: whether requests may bring chat templates.

    Attributes:
        num_lines: lines of the input that are not blank: as many as there will be records.
        num_skipped: how many of them had their record at the start.
        writer: of the output file.
        journal: what is under way; None if every line has its record.

    Raises:
        OSError: a file cannot be opened.
        ValueError: a file is no regular file, both are one, another job is writing the output, or
            that has a record of another request with the custom_id of one here.
    """

    def __init__(
        self, input_path: Path, output_path: Path, *, trusts_templates: bool = False
    ) -> None:
        if not stat.S_ISREG(input_path.stat().st_mode):
            raise ValueError(f"{input_path} is no regular file")
        if output_path.exists() and os.path.samefile(input_path, output_path):
            raise ValueError("the output file is the input file: name another")
        self.input_path = input_path
        self.trusts_templates = trusts_templates
        self.writer = Writer(output_path)
        try:
            has_records = bool(self.writer.done or self.writer.done_lines)
            lines = self._lines() if has_records else read_lines(input_path)
            self.num_lines = self.num_skipped = 0
            for line in lines:
                self.num_lines += 1
                self.num_skipped += line is None
            self._num_before = self.writer.num_records
            self._num_failed_before = self.writer.num_failed
            path = journal_path(output_path)
            if path.exists() and os.path.samefile(input_path, path):
                raise ValueError(f"the job's notes would be in the input file, {path}: rename that")
            self.journal = None if self.is_done else Journal(path, self.writer.num_records)
        except BaseException:
            self.writer.close()
            raise

    @property
    def is_done(self) -> bool:
        """Whether every line has its record."""
        return self.num_skipped + self.writer.num_records - self._num_before >= self.num_lines

    def requests(self) -> Iterator[BatchRequest | Record]:
        """The requests on lines that have no record yet; records of those that are no requests."""
        return (self._check(found) for found in self._lines() if found is not None)

    def _check(self, found: BatchRequest | Record) -> BatchRequest | Record:
        """The same, or the record of a request that this job does not serve."""
        if isinstance(found, BatchRequest) and not self.trusts_templates:
            try:
                check_template(found)
            except RequestError as error:
                return error_record(found, found.custom_id, error)
        return found

    def _lines(self) -> Iterator[BatchRequest | Record | None]:
        """The same, and None for each line that has its record. Raises ValueError where that is of
        another request with the same custom_id."""
        seen: set[str] = set()
        done, done_lines = self.writer.done, self.writer.done_lines
        for line in read_lines(self.input_path):
            if done_lines.get(line.number) == line.digest:
                yield None
                continue
            found = parse_line(line)
            custom_id = found["custom_id"] if isinstance(found, dict) else found.custom_id
            key = None if custom_id is None else key_of(custom_id)
            if key in seen:
                error = RequestError(
                    f"an earlier line has the custom_id {custom_id!r:.80} already", code=DUPLICATE
                )
                yield error_record(line, custom_id, error)
                continue
            if key is not None:
                seen.add(key)
            if key not in done:
                yield found
            elif done[key] == line.digest:
                yield None
            else:
                raise ValueError(
                    f"{self.writer.path} has a record of another request with the custom_id "
                    f"{custom_id!r:.80}, that of line {line.number}: name another output file, or "
                    f"remove the records of requests that have changed"
                )

    def write(self, records: Iterable[Record], show_progress: bool = True) -> None:
        """Writes records as they come. Raises OSError."""
        with _Progress(self.num_lines, self.num_skipped, show_progress) as progress:
            for record in records:
                self.writer.write(record)
                progress.update()

    def summary(self) -> str:
        """What became of the lines so far."""
        num_failed = self.writer.num_failed - self._num_failed_before
        num_done = self.writer.num_records - self._num_before - num_failed
        text = f"{num_done} done, {num_failed} failed, {self.num_skipped} skipped"
        if self._num_failed_before:
            text += f" ({self._num_failed_before} of them had failed)"
        return f"{text}, of {self.num_lines} lines; see {self.writer.path}"

    def close(self) -> None:
        """Raises OSError if the records may not be on the disk."""
        try:
            if self.journal is not None:
                self.journal.close(self.is_done)
        finally:
            self.writer.close()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Progress:
    """A bar of lines on a terminal; elsewhere a line in the log now and then."""

    def __init__(self, total: int, done: int, is_shown: bool) -> None:
        is_bar = is_shown and sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=done, unit=" lines", disable=not is_bar)
        self.logs = is_shown and not is_bar
        self.total, self.done, self.done_at_start = total, done, done
        self.start = self.logged = monotonic()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.bar.close()

    def update(self) -> None:
        """One more line has its record."""
        self.done += 1
        self.bar.update()
        now = monotonic()
        if self.logs and now - self.logged >= LOG_SECONDS:
            self.logged = now
            rate = (self.done - self.done_at_start) / (now - self.start)
            left = tqdm.format_interval((self.total - self.done) / rate)
            logger.info("%d of %d lines, %.1f/s, %s left", self.done, self.total, rate, left)
