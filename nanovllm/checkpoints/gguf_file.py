"""Reads GGUF's container format from files that are not trusted.

Every count, length, type and offset is checked against the bytes left in the file before it is used
to allocate memory, loop or make a view. The format is described in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
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

STRING, ARRAY = 8, 9  # types of values
# The other types are numbers, with these format characters of struct and numpy.
NUMBERS = {**dict(enumerate("BbHhIif?")), **dict(enumerate("Qqd", start=10))}
MAX_HEADER_BYTES = 2**26  # several times the size of the largest vocabularies


class GGUFFile:
    """A little-endian GGUF file of version 2 or 3, mapped into memory.

    Attributes:
        fields: the metadata by name. A value is an int, float, bool, str, list of str, or an array
            of numbers.
        tensors: the type and the data of each tensor by name. The data are uint8 [..., bytes per
            row], quantised as the type says, and are views of the file.

    Raises:
        ValueError: it is not such a file, or it is damaged. The message names the file and the
            reason.
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
            raise ValueError(f"{path} is not GGUF, or truncated or damaged: {error}") from error

    def write_fields(self, names: Iterable[str], path: Path, architecture: str) -> None:
        """Writes a GGUF file without tensors, with this architecture and copies of these fields."""
        key, value = b"general.architecture", architecture.encode()
        layout = f"<Q{len(key)}sIQ{len(value)}s"
        raw: list[Any] = [struct.pack(layout, len(key), key, STRING, len(value), value)]
        raw += (self._raw_fields[name] for name in names)
        path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(raw)) + b"".join(raw))

    def _read(self) -> None:
        magic, version = self._number("4s"), self._number("I")
        _check(magic == b"GGUF" and version in (2, 3), f"starts with {magic}, version {version}")
        num_tensors, num_fields = self._count(32), self._count(13)  # minimum bytes of each
        for _ in range(num_fields):
            start, name = self._at, self._string()
            _check(name not in self.fields, f"field {name!r:.80} occurs twice")
            self.fields[name] = self._value(self._number("I"))
            self._raw_fields[name] = self._bytes[start : self._at]
        alignment = self.fields.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        is_power = type(alignment) is int and alignment > 0 and alignment.bit_count() == 1
        _check(is_power, f"alignment {alignment!r:.80} is not a power of two")
        infos, end = [], 0
        for _ in range(num_tensors):
            name, num_dims = self._string(), self._number("I")
            _check(1 <= num_dims <= 4, f"tensor {name!r:.80} has {num_dims} dimensions")
            row, *dims = (self._number("Q") for _ in range(num_dims))  # innermost first
            kind, offset = gguf.GGMLQuantizationType(self._number("I")), self._number("Q")
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            shape = (*reversed(dims), row // block * block_bytes)
            size = math.prod(shape)
            _check(row % block == 0 and size > 0, f"tensor {name!r:.80} has sizes {[row, *dims]}")
            _check(offset == end, f"tensor {name!r:.80} does not follow the one before it")
            infos.append((name, shape, kind, offset))
            end += size + -size % alignment
        start = self._at + -self._at % alignment
        for name, shape, kind, offset in infos:
            data = self._bytes[start + offset :][: math.prod(shape)]
            _check(len(data) == math.prod(shape), f"tensor {name!r:.80} is cut off")
            _check(name not in self.tensors, f"tensor {name!r:.80} occurs twice")
            self.tensors[name] = kind, np.frombuffer(data, np.uint8).reshape(shape)

    def _value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._string()
        item = self._number("I") if kind == ARRAY else -1  # -1 stands for no type
        if item == STRING:
            return [self._string() for _ in range(self._count(8))]
        _check(item in NUMBERS, f"values of type {kind} with items {item} are not supported")
        dtype = np.dtype("<" + NUMBERS[item])
        return np.frombuffer(self._take(self._count(dtype.itemsize) * dtype.itemsize), dtype)

    def _string(self) -> str:
        return str(self._take(self._count(1)), "utf-8")

    def _count(self, size: int) -> int:
        """Reads the number of items that follow. Each item takes at least ``size`` bytes."""
        count, left = self._number("Q"), min(len(self._bytes), MAX_HEADER_BYTES) - self._at
        if count * size > left:
            raise ValueError(f"{count} items of {size} bytes do not fit into {left} bytes")
        return count

    def _number(self, format: str) -> Any:
        """Reads one value in a format of the struct module."""
        return struct.unpack("<" + format, self._take(struct.calcsize("<" + format)))[0]

    def _take(self, size: int) -> memoryview:
        self._at += size
        return self._bytes[self._at - size : self._at]


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
