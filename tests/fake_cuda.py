"""A CUDA driver in Python, which has the rules of the real one and memory of the host."""

import ctypes
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from nanovllm.utils import cuda_vmm
from nanovllm.utils.cuda_vmm import Access, Arena, Driver, Properties

GRANULARITY = 2048
DEVICE = torch.device("cpu", 0)  # whose memory the arenas are in
OUT_OF_MEMORY, INVALID_VALUE = 2, 1


class FakeLibrary:
    """libcuda's functions. Breaking a rule is an AssertionError.

    Attributes:
        calls: names and sizes of the calls, in their order.
        reserved: by its first address, the size of a reserved range.
        mapped: by its first address, the size of a mapped range.
        readable: the mapped ranges to which access was given.
        left: how many bytes of memory can still be created.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.readable: set[int] = set()
        self.handles: dict[int, int] = {}
        self.left = 1 << 30
        self.fails = ""
        self._buffers: dict[int, Any] = {}

    def _note(self, name: str, size: int) -> int:
        self.calls.append((name, size))
        return INVALID_VALUE if name == self.fails else 0

    def cuGetErrorName(self, error: Any, text: Any) -> int:
        names = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", INVALID_VALUE: b"CUDA_ERROR_BAD"}
        text._obj.value = names[error.value]
        return 0

    def _check_properties(self, properties: Any) -> None:
        assert isinstance(properties._obj, Properties) and ctypes.sizeof(properties._obj) == 32
        found = properties._obj
        assert (found.type, found.location.type, found.location.id) == (1, 1, 0)

    def cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: Any) -> int:
        self._check_properties(properties)
        size._obj.value = GRANULARITY
        return 0

    def cuMemAddressReserve(
        self, address: Any, size: Any, alignment: Any, fixed: Any, flags: Any
    ) -> int:
        assert size.value > 0 and size.value % GRANULARITY == 0
        assert alignment.value == fixed.value == flags.value == 0
        buffer = ctypes.create_string_buffer(size.value + GRANULARITY)
        start = -(-ctypes.addressof(buffer) // GRANULARITY) * GRANULARITY
        self._buffers[start], self.reserved[start] = buffer, size.value
        address._obj.value = start
        return self._note("reserve", size.value)

    def cuMemAddressFree(self, address: Any, size: Any) -> int:
        assert self.reserved.pop(address.value) == size.value
        end = address.value + size.value
        assert not any(address.value <= start < end for start in self.mapped)
        del self._buffers[address.value]
        return self._note("free", size.value)

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:
        self._check_properties(properties)
        assert size.value % GRANULARITY == 0
        if size.value > self.left:
            return OUT_OF_MEMORY
        self.left -= size.value
        handle._obj.value = 1 + len(self.calls)
        self.handles[handle._obj.value] = size.value
        return self._note("create", size.value)

    def cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert self.handles[handle.value] == size.value and offset.value == 0
        start, end = address.value, address.value + size.value
        assert any(a <= start and end <= a + n for a, n in self.reserved.items())
        assert not any(a < end and start < a + n for a, n in self.mapped.items())
        if error := self._note("map", size.value):
            return error
        self.mapped[start] = size.value
        return 0

    def cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> int:
        assert self.mapped[address.value] == size.value and count.value == 1
        assert isinstance(access._obj, Access) and ctypes.sizeof(access._obj) == 12
        assert access._obj.flags == 3
        if error := self._note("access", size.value):
            return error
        self.readable.add(address.value)
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        return self._note("release", self.handles.pop(handle.value))

    def cuMemUnmap(self, address: Any, size: Any) -> int:
        assert self.mapped.pop(address.value) == size.value
        self.readable.discard(address.value)
        ctypes.memset(address.value, 0xFF, size.value)
        self.left += size.value
        return self._note("unmap", size.value)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """Makes arenas use a FakeLibrary, which it returns."""
    library = FakeLibrary()
    driver = Driver(library)

    def tensor(arena: Arena, address: int, num_bytes: int) -> torch.Tensor:
        assert any(a <= address < a + library.mapped[a] for a in library.readable)
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        memory.arena = arena  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    monkeypatch.setattr(cuda_vmm, "load_driver", lambda: driver)
    monkeypatch.setattr(cuda_vmm, "CHUNK_BYTES", 2 * GRANULARITY)
    monkeypatch.setattr(cuda_vmm, "_context", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(Arena, "_tensor", tensor)
    return library
