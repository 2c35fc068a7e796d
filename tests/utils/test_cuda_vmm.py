"""Arenas, on a driver in Python that has the rules of CUDA's and memory of the host."""

import ctypes
import gc
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from nanovllm.utils import cuda_vmm
from nanovllm.utils.cuda_vmm import Access, Arena, Driver, Properties, arena_bytes, arena_of

GRANULARITY = 2048
DEVICE = torch.device("cpu", 0)
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


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
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


def test_memory_is_mapped_in_chunks_as_tensors_need_it(library: FakeLibrary):
    arena = Arena(5 * GRANULARITY - 7, DEVICE)
    assert library.calls == [("reserve", 5 * GRANULARITY)]
    steps = ["create", "map", "release", "access"]
    first = arena.empty((3, 5), torch.bfloat16)
    assert library.calls[1:] == [(step, 2 * GRANULARITY) for step in steps]
    assert (first.shape, first.dtype, first.data_ptr() % 512) == ((3, 5), torch.bfloat16, 0)
    second = arena.empty((GRANULARITY,), torch.float32)
    assert second.data_ptr() == first.data_ptr() + 512
    assert library.calls[5:] == [
        *((step, 2 * GRANULARITY) for step in steps),
        *((step, GRANULARITY) for step in steps),
    ]
    assert arena.mapped_bytes == arena_bytes(DEVICE) == 5 * GRANULARITY
    assert not library.handles  # the mappings keep the memory
    assert arena_of(first) is arena_of(second) is arena


@pytest.mark.parametrize("keeps_values", [True, False])
def test_released_memory_comes_back_at_the_same_addresses(library: FakeLibrary, keeps_values: bool):
    arena = Arena(6 * GRANULARITY, DEVICE)
    tensors = [arena.empty((700,), torch.float32).fill_(i) for i in range(3)]
    addresses, mapped = [tensor.data_ptr() for tensor in tensors], dict(library.mapped)
    for _ in range(3):
        arena.release(keeps_values)
        arena.release(False)  # does nothing
        assert arena.mapped_bytes == arena_bytes(DEVICE) == 0 and not library.mapped
        arena.restore()
        assert library.mapped == mapped
        assert addresses == [tensor.data_ptr() for tensor in tensors]
        if keeps_values:
            assert all(bool((tensor == i).all()) for i, tensor in enumerate(tensors))
        assert not arena._saved
    assert library.left == (1 << 30) - 6 * GRANULARITY


def test_too_little_memory_leaves_the_arena_released(library: FakeLibrary):
    arena = Arena(6 * GRANULARITY, DEVICE)
    tensor = arena.empty((6 * GRANULARITY,), torch.uint8).fill_(7)
    arena.release(keeps_values=True)
    left, library.left = library.left, 3 * GRANULARITY  # enough for one chunk of three
    message = r"cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY \(2\): the GPU is out of memory"
    with pytest.raises(RuntimeError, match=message):
        arena.restore()
    assert not library.mapped and library.left == 3 * GRANULARITY
    library.left = left
    arena.restore()
    assert bool((tensor == 7).all())


@pytest.mark.parametrize("function", ["map", "access"])
def test_a_call_that_fails_leaves_nothing_behind(library: FakeLibrary, function: str):
    arena = Arena(2 * GRANULARITY, DEVICE)
    library.fails = function
    with pytest.raises(RuntimeError, match=r"failed with CUDA_ERROR_BAD \(1\)$"):
        arena.empty((1,), torch.uint8)
    assert not library.handles and not library.readable and not library.mapped
    assert arena.mapped_bytes == 0


def test_an_arena_is_freed_with_its_last_tensor(library: FakeLibrary):
    tensor = cuda_vmm.empty_in_arena((2, 3), torch.int64, DEVICE)
    part = tensor[1]
    del tensor
    gc.collect()
    assert library.reserved
    del part
    gc.collect()
    assert [name for name, _ in library.calls[-2:]] == ["unmap", "free"]
    assert not library.reserved and not library.mapped


def test_a_forked_child_calls_no_driver(library: FakeLibrary):
    tensor = cuda_vmm.empty_in_arena((8,), torch.uint8, DEVICE)
    arena, calls = arena_of(tensor), len(library.calls)
    if (pid := os.fork()) == 0:
        status = 1
        try:
            arena.release(keeps_values=False)
        except ValueError:
            cuda_vmm._free(arena._driver, DEVICE, 0, 0, [(0, 0)], os.getppid())
            status = int(len(library.calls) != calls)
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_parameters_move_and_stay_the_same_objects(library: FakeLibrary):
    """With their values, which norms have from the start. A shared one moves once."""
    model = nn.Sequential(nn.Linear(9, 40), nn.LayerNorm(40), nn.Linear(40, 9))
    model[2].weight = nn.Parameter(model[2].weight.to(torch.bfloat16))
    model.append(nn.Linear(9, 40))
    model[3].weight = model[0].weight
    for param in model.parameters():
        param.requires_grad_(False)
    params = [*model.parameters()]
    before = [param.clone() for param in params]
    cuda_vmm.move_parameters(model, DEVICE)
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    (arena,) = {arena_of(param) for param in params}
    arena.release(keeps_values=True)
    arena.restore()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


def test_structures_have_the_layout_of_cuda_h():
    assert [getattr(Properties, name).offset for name, _ in Properties._fields_] == [
        0,
        4,
        8,
        16,
        24,
    ]
    assert Access.flags.offset == 8


@pytest.mark.gpu
def test_a_gpu_gets_its_memory_back():
    device = torch.device("cuda", torch.cuda.current_device())
    tensor = cuda_vmm.empty_in_arena((300 << 20,), torch.uint8, device).fill_(7)
    assert tensor.device == device
    graph, total = torch.cuda.CUDAGraph(), torch.zeros((), dtype=torch.int64, device=device)
    tensor[::4096].sum()  # compiles and warms up
    with torch.cuda.graph(graph):
        total.copy_(tensor[::4096].sum())
    arena, free = arena_of(tensor), torch.cuda.mem_get_info(device)[0]
    arena.release(keeps_values=True)
    assert torch.cuda.mem_get_info(device)[0] - free >= 300 << 20
    arena.restore()
    graph.replay()
    assert int(total) == 7 * len(tensor[::4096])
    arena.release(keeps_values=False)
    arena.restore()
    tensor.fill_(3)
    graph.replay()
    assert int(total) == 3 * len(tensor[::4096])
    del tensor, arena
    gc.collect()
    assert torch.cuda.mem_get_info(device)[0] - free >= 300 << 20
