"""Arenas, on a driver in Python that has the rules of CUDA's and memory of the host."""

import gc
import os

import pytest
import torch
from torch import nn

from nanovllm.utils import cuda_vmm
from nanovllm.utils.cuda_vmm import Access, Arena, Properties, arena_bytes, arena_of
from tests import fake_cuda
from tests.fake_cuda import DEVICE, GRANULARITY, FakeLibrary


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    return fake_cuda.install(monkeypatch)


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
    device, size = torch.device("cuda", torch.cuda.current_device()), 300 << 20
    tensor = cuda_vmm.empty_in_arena((size,), torch.uint8, device).fill_(7)
    assert tensor.device == device
    graph, total = torch.cuda.CUDAGraph(), torch.zeros((), dtype=torch.int64, device=device)
    tensor[::4096].sum()  # compiles and warms up
    with torch.cuda.graph(graph):
        total.copy_(tensor[::4096].sum())
    arena = arena_of(tensor)
    arena.release(keeps_values=True)
    arena.restore()
    graph.replay()
    assert int(total) == 7 * len(tensor[::4096])
    released, deleted = [], []
    for _ in range(5):  # other processes may take memory in between
        free = torch.cuda.mem_get_info(device)[0]
        arena.release(keeps_values=False)
        released.append(torch.cuda.mem_get_info(device)[0] - free)
        arena.restore()
    tensor.fill_(3)
    graph.replay()
    assert int(total) == 3 * len(tensor[::4096])
    del tensor, arena
    for _ in range(5):
        tensor = cuda_vmm.empty_in_arena((size,), torch.uint8, device)
        free = torch.cuda.mem_get_info(device)[0]
        del tensor
        gc.collect()
        deleted.append(torch.cuda.mem_get_info(device)[0] - free)
    assert max(released) >= size and max(deleted) >= size
