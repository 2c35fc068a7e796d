"""A batch job: an input file, its output file, and the requests that have no record yet."""

import logging
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from tqdm import tqdm

from nanovllm.run_batch.journal import Journal
from nanovllm.run_batch.lines import read_lines
from nanovllm.run_batch.records import DUPLICATE, Record, RequestError, error_record, key_for
from nanovllm.run_batch.request import BatchRequest, parse_line
from nanovllm.run_batch.supervisor import journal_path
from nanovllm.run_batch.writer import Writer

logger = logging.getLogger("nanovllm.run_batch")

LOG_SECONDS = 60.0


class Skipped(NamedTuple):
    """Stands for a line that already has a record, and says whether that is an error."""

    failed: bool


class Job:
    """Reads the requests of an input file and writes their records to an output file.

    Args:
        input_path: the requests, one per line.
        output_path: the records. Records of earlier runs are kept, and their requests are skipped.
        trusts_templates: whether requests may have their own chat templates.

    Attributes:
        num_lines: the number of input lines that are not blank. Each gets one record.
        num_skipped: the number of these lines that had a record at the start.
        num_skipped_failed: the number of them whose record is an error.
        num_written: the number of records that ``write`` has written.
        num_failed: the number of them that are errors.
        writer: writes the output file.
        journal: keeps track of the requests in flight.

    Raises:
        OSError: a file cannot be opened.
        ValueError: a file is not a regular file, both are the same file, another job is writing
            the output file, or a record in the output file has the custom_id of an input line but
            belongs to a different request.
    """

    def __init__(
        self, input_path: Path, output_path: Path, *, trusts_templates: bool = False
    ) -> None:
        if not stat.S_ISREG(input_path.stat().st_mode):
            raise ValueError(f"{input_path} is not a regular file")
        if output_path.exists() and os.path.samefile(input_path, output_path):
            raise ValueError("the output file is the input file: name another")
        self.input_path = input_path
        self.trusts_templates = trusts_templates
        self.num_lines = self.num_skipped = self.num_skipped_failed = 0
        self.num_written = self.num_failed = 0
        self.first_error = ""
        self.writer = Writer(output_path)
        try:
            has_records = bool(self.writer.done or self.writer.done_lines)
            lines = self._lines() if has_records else read_lines(input_path)
            for line in lines:
                self.num_lines += 1
                if isinstance(line, Skipped):
                    self.num_skipped += 1
                    self.num_skipped_failed += line.failed
            path = journal_path(output_path)
            if path.exists() and os.path.samefile(input_path, path):
                raise ValueError(f"the input file has the name of the job's journal: rename {path}")
            self.journal = Journal(path, self.writer.num_records)
        except BaseException:
            self.writer.close()
            raise

    @property
    def is_done(self) -> bool:
        """Whether every line has its record."""
        return self.num_skipped + self.num_written >= self.num_lines

    def requests(self) -> Iterator[BatchRequest | Record]:
        """Yields the request of each line that has no record yet, or an error record if the line is
        not a valid request."""
        return (item for item in self._lines() if not isinstance(item, Skipped))

    def _lines(self) -> Iterator["BatchRequest | Record | Skipped"]:
        """Yields an item for each line: Skipped if the output file already has a record of the
        line, an error record if the line is not a valid request, otherwise the request.

        Raises:
            ValueError: a record has the custom_id of a line but belongs to a different request.
        """
        seen: set[bytes] = set()
        done, done_lines = self.writer.done, self.writer.done_lines.copy()
        for line in read_lines(self.input_path):
            item = parse_line(line, self.trusts_templates)
            custom_id = item["custom_id"] if isinstance(item, dict) else item.custom_id
            key = None if custom_id is None else key_for(custom_id)
            is_first, recorded = False, None
            if key is not None:
                is_first, recorded = key not in seen, done.get(key)
                seen.add(key)
            if is_first and recorded is None:
                yield item
            elif is_first and recorded == line.digest:
                yield Skipped(failed=key in self.writer.failed)
            elif done_lines[line.digest]:
                done_lines[line.digest] -= 1
                yield Skipped(failed=True)
            elif key is None:
                yield item
            elif not is_first:
                error = RequestError(
                    f"an earlier line already has the custom_id {custom_id!r:.80}", code=DUPLICATE
                )
                yield error_record(line, custom_id, error)
            else:
                raise ValueError(
                    f"{self.writer.path} has a record of a different request with the custom_id "
                    f"of line {line.number}, {custom_id!r:.80}: name another output file, or "
                    f"remove the records of requests that have changed"
                )

    def write(self, records: Iterable[Record], show_progress: bool = True) -> None:
        """Writes each record as soon as it is yielded, and shows progress: a bar on a terminal,
        otherwise a log message every LOG_SECONDS. Raises OSError if a write fails."""
        is_bar = show_progress and sys.stderr.isatty()
        bar = tqdm(
            total=self.num_lines, initial=self.num_skipped, unit=" lines", disable=not is_bar
        )
        start = logged = monotonic()
        with bar:
            for record in records:
                self.writer.write(record)
                self.num_written += 1
                if record["error"] is not None:
                    self.num_failed += 1
                    self.first_error = self.first_error or record["error"]["message"]
                bar.update()
                now = monotonic()
                if show_progress and not is_bar and now - logged >= LOG_SECONDS:
                    logged = now
                    done = self.num_skipped + self.num_written
                    rate = self.num_written / (now - start)
                    left = tqdm.format_interval((self.num_lines - done) / rate)
                    logger.info("%d of %d lines, %.1f/s, %s left", done, self.num_lines, rate, left)

    def summary(self) -> str:
        """Returns a line of text with the numbers of done, failed and skipped lines, and the first
        error of this run."""
        num_done = self.num_written - self.num_failed
        text = f"{num_done} done, {self.num_failed} failed, {self.num_skipped} skipped"
        if self.num_skipped_failed:
            text += f" ({self.num_skipped_failed} of them with an error)"
        text += f", of {self.num_lines} lines; see {self.writer.path}"
        return f"{text}; first error: {self.first_error:.200}" if self.first_error else text

    def close(self) -> None:
        """Closes the files. Raises OSError if the records may not have reached the disk."""
        try:
            self.journal.close(self.is_done)
        finally:
            self.writer.close()
