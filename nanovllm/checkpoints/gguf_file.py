"""GGUF's container format, read as what it is: bytes that somebody else wrote.

Every count, length, type and offset is checked against the bytes that are left before anything is
allocated, looped over or viewed. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md has the
format.
"""

import math
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from nanovllm.checkpoints.files import check_regular

STRING, ARRAY = 8, 9  # types of values; the others are numbers, in struct's and numpy's letters:
NUMBERS = {**dict(enumerate("BbHhIif?")), **dict(enumerate("Qqd", start=10))}
MAX_HEADER_BYTES = 2**26  # several times what the largest vocabularies take


class GGUFFile:
    """A little-endian GGUF file of version 2 or 3, mapped into memory.

    Attributes:
        fields: the metadata: int, float, bool, str, list of str, or an array of numbers.
        tensors: (type, codes) by name; codes are uint8 [..., bytes of a row].
            Both kinds of arrays are views of the file.

    Raises:
        ValueError: it is none, or anything in it is out of order; names the file and the fault.
    """

    def __init__(self, path: Path) -> None:
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, tuple[gguf.GGMLQuantizationType, np.ndarray]] = {}
        self._raw_fields: dict[str, memoryview] = {}
        self._at = 0
        check_regular(path)
        try:
            with path.open("rb") as file:
                self._bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            self._read()
        except (OSError, ValueError, struct.error) as error:
            raise ValueError(f"{path} is no GGUF, or truncated or damaged: {error}") from error

    def write_fields(self, names: Iterable[str], path: Path, architecture: str) -> None:
        """Writes a GGUF file of this architecture, of these fields as they lie in this file, and of
        no tensors."""
        key, value = b"general.architecture", architecture.encode()
        layout = f"<Q{len(key)}sIQ{len(value)}s"
        raw: list[Any] = [struct.pack(layout, len(key), key, STRING, len(value), value)]
        raw += (self._raw_fields[name] for name in names)
        path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(raw)) + b"".join(raw))

    def _read(self) -> None:
        magic, version = self._number("4s"), self._number("I")
        _check(magic == b"GGUF" and version in (2, 3), f"starts with {magic}, version {version}")
        num_tensors, num_fields = self._count(32), self._count(13)  # each takes as much or more
        for _ in range(num_fields):
            start, name = self._at, self._string()
            _check(name not in self.fields, f"field {name!r:.80} comes twice")
            self.fields[name] = self._value(self._number("I"))
            self._raw_fields[name] = self._bytes[start : self._at]
        alignment = self.fields.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        is_power = type(alignment) is int and alignment > 0 and alignment.bit_count() == 1
        _check(is_power, f"alignment {alignment!r:.80} is no power of two")
        infos, end = [], 0
        for _ in range(num_tensors):
            name, num_dims = self._string(), self._number("I")
            _check(1 <= num_dims <= 4, f"tensor {name!r:.80} has {num_dims} dimensions")
            row, *dims = (self._number("Q") for _ in range(num_dims))  # innermost first
            kind, offset = gguf.GGMLQuantizationType(self._number("I")), self._number("Q")
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            shape = (*reversed(dims), row // block * block_bytes)
            size = math.prod(shape)
            _check(row % block == 0 and size > 0, f"tensor {name!r:.80} has {dims} rows of {row}")
            _check(offset == end, f"tensor {name!r:.80} does not follow the one before it")
            infos.append((name, shape, kind, offset))
            end += size + -size % alignment
        start = self._at + -self._at % alignment
        for name, shape, kind, offset in infos:
            codes = self._bytes[start + offset :][: math.prod(shape)]
            _check(len(codes) == math.prod(shape), f"tensor {name!r:.80} is cut off")
            _check(name not in self.tensors, f"tensor {name!r:.80} comes twice")
            self.tensors[name] = kind, np.frombuffer(codes, np.uint8).reshape(shape)

    def _value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._string()
        item = self._number("I") if kind == ARRAY else -1
        if item == STRING:
            return [self._string() for _ in range(self._count(8))]
        _check(item in NUMBERS, f"a value has type {kind}, its items {item}")  # no nested arrays
        dtype = np.dtype("<" + NUMBERS[item])
        return np.frombuffer(self._take(self._count(dtype.itemsize) * dtype.itemsize), dtype)

    def _string(self) -> str:
        return str(self._take(self._count(1)), "utf-8")

    def _count(self, size: int) -> int:
        """The number that comes next: how many things follow, of ``size`` bytes or more each."""
        count, left = self._number("Q"), min(len(self._bytes), MAX_HEADER_BYTES) - self._at
        if count * size > left:
            raise ValueError(f"{count} items of {size} bytes where {left} bytes are left")
        return count

    def _number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self._take(struct.calcsize("<" + letter)))[0]

    def _take(self, size: int) -> memoryview:
        self._at += size
        return self._bytes[self._at - size : self._at]


def _check(holds: bool, fault: str) -> None:
    if not holds:
        raise ValueError(fault)
