"""Reads the input file line by line, in bounded memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import xxhash

from nanovllm.run_batch.records import LineInfo

MAX_LINE_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Line(LineInfo):
    """A line of the input file that is not blank.

    Attributes:
        text: the line without surrounding white space; None if it has MAX_LINE_BYTES or more.
    """

    text: bytes | None


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the lines of a file that are not blank."""
    with path.open("rb") as file:
        for number in count(1):
            raw = file.readline(MAX_LINE_BYTES)
            if not raw:
                return
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                hasher = xxhash.xxh128(raw)
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(CHUNK_BYTES)
                    hasher.update(raw)
                yield Line(number, hasher.hexdigest(), None)
            elif text := raw.strip():
                yield Line(number, xxhash.xxh128_hexdigest(text), text)
