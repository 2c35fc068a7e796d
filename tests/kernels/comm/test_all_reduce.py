"""The one-shot all-reduce as one rank sees it, its peers' mail laid out beforehand."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nanovllm.kernels.comm import all_reduce as module
from nanovllm.kernels.comm.all_reduce import BLOCK, MAX_NUMEL, NUM_BLOCKS, all_reduce
from nanovllm.utils.cuda_ipc import DriverError


def address(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.tensor(
        [t.data_ptr() for t in tensors], dtype=torch.int64, device=tensors[0].device
    )


@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (1, 4096), (5, 2048)])
@pytest.mark.parametrize("rank, size", [(0, 2), (1, 2), (2, 4)])
def test_sums_what_the_peers_have_left_and_leaves_its_own(shape, rank, size, device):
    dtype = torch.float16
    inboxes = [torch.zeros(2, size, MAX_NUMEL, dtype=dtype, device=device) for _ in range(size)]
    flags = [torch.zeros(size, NUM_BLOCKS, dtype=torch.int32, device=device) for _ in range(size)]
    epochs = torch.zeros(NUM_BLOCKS, dtype=torch.int32, device=device)
    abort = torch.zeros(1, dtype=torch.int32)
    if device == "cuda":
        abort = abort.pin_memory()
    for epoch in (1, 2, 3):
        parts = torch.randn(size, *shape, device=device).to(dtype)
        for peer in range(size):
            if peer != rank:
                inboxes[rank][epoch % 2, peer, : parts[peer].numel()] = parts[peer].flatten()
                flags[rank][peer] = epoch
        out = all_reduce(parts[rank], address(*inboxes), address(*flags), epochs, abort, rank, size)
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        assert torch.equal(out, expected.to(dtype))
        num_blocks = -(-parts[0].numel() // BLOCK)
        for peer in range(size):
            if peer != rank:
                left = inboxes[peer][epoch % 2, rank, : parts[rank].numel()]
                assert torch.equal(left, parts[rank].flatten())
                assert flags[peer][rank].tolist() == [epoch] * num_blocks + [0] * (
                    NUM_BLOCKS - num_blocks
                )


def test_the_largest_of_int64_at_each_place(device):
    """Guards packed scores, of which fp32 would lose the token."""
    inboxes = [torch.zeros(2, 2, BLOCK, dtype=torch.int64, device=device) for _ in range(2)]
    flags = [torch.zeros(2, 1, dtype=torch.int32, device=device) for _ in range(2)]
    epochs = torch.zeros(1, dtype=torch.int32, device=device)
    abort = torch.zeros(1, dtype=torch.int32)
    if device == "cuda":
        abort = abort.pin_memory()
    for epoch in (1, 2, 3):
        mine, theirs = torch.randint(-(2**62), 2**62, (2, 100), device=device)
        mine[:50] = theirs[:50] + 1
        inboxes[1][epoch % 2, 0, :100] = theirs
        flags[1][0] = epoch
        out = all_reduce(mine, address(*inboxes), address(*flags), epochs, abort, 1, 2)
        assert torch.equal(out, torch.maximum(mine, theirs))
        assert torch.equal(inboxes[0][epoch % 2, 1, :100], mine)


def test_an_abort_ends_the_wait_for_a_silent_peer(device):
    inboxes, flags = (
        [torch.zeros(2, 2, MAX_NUMEL, device=device) for _ in range(2)],
        [torch.zeros(2, NUM_BLOCKS, dtype=torch.int32, device=device) for _ in range(2)],
    )
    epochs = torch.zeros(NUM_BLOCKS, dtype=torch.int32, device=device)
    abort = torch.ones(1, dtype=torch.int32)
    if device == "cuda":
        abort = abort.pin_memory()
    x = torch.ones(10, device=device)
    all_reduce(x, address(*inboxes), address(*flags), epochs, abort, 0, 2)
    if device == "cuda":
        torch.cuda.synchronize()


def test_no_more_programs_wait_than_run_at_once(monkeypatch):
    """A large tensor took 1,024 programs. Those of one GPU that wait could keep others from
    starting, for which the programs that run on another one wait."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(module, "_all_reduce_kernel", Kernel())
    monkeypatch.setattr(module, "max_programs", lambda device: 4 * 132)
    epochs, abort = torch.zeros(NUM_BLOCKS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for numel in (1, BLOCK + 1, 100 * BLOCK, MAX_NUMEL):
        all_reduce(torch.zeros(numel), abort, abort, epochs, abort, 0, 2)
    assert grids == [(1,), (2,), (100,), (528,)]


@pytest.mark.parametrize("peer, atomic, expected", [(True, True, True), (True, False, False)])
def test_gpus_without_atomics_between_them_are_not_chosen(peer, atomic, expected, monkeypatch):
    """Where GPUs can read each other's memory over PCIe the kernel was chosen, and hung."""
    asked = set()

    def has_atomics(a: int, b: int) -> bool:
        asked.add((a, b))
        return atomic

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peer)
    monkeypatch.setattr(module, "has_native_atomics", has_atomics)
    devices = [torch.device("cuda", index) for index in (2, 3)]
    assert module.supports_one_shot(devices) == expected
    assert asked == ({(2, 3), (3, 2)} if expected else {(2, 3)})


def test_the_largest_size_is_chosen_by_the_number_of_gpus():
    """Each rank sends its tensor to every other one."""
    sizes = [module.max_numel(size, torch.bfloat16) for size in (2, 3, 4, 8)]
    assert sizes == [MAX_NUMEL, 1 << 18, 1 << 18, 1 << 17]
    assert module.max_numel(8, torch.float32) == 1 << 16
    assert all(numel % BLOCK == 0 for numel in sizes)


class Ranks:
    """Two ranks as threads, without a GPU."""

    def __init__(self, monkeypatch) -> None:
        self.store = dist.HashStore()
        self.barrier = threading.Barrier(2, timeout=20)
        self.values = [0, 0]
        self.closed: list[int] = []
        monkeypatch.setattr(module, "MAX_NUMEL", BLOCK)
        monkeypatch.setattr(module, "supports_one_shot", lambda devices: True)
        monkeypatch.setattr(module, "close_memory", self.closed.append)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)

    def min(self, rank: int, value: int) -> int:
        self.values[rank] = value
        self.barrier.wait()
        smallest = min(self.values)
        self.barrier.wait()
        return smallest

    def run(self) -> list[tuple]:
        def make(rank: int) -> tuple:
            group = SimpleNamespace(rank=rank, size=2, min=lambda value, _: self.min(rank, value))
            return module.make_one_shot_all_reduces(
                group, self.store, torch.float32, [torch.device("cpu")] * 2
            )

        with ThreadPoolExecutor(2) as executor:
            return list(executor.map(make, range(2)))


class FailsAt:
    """Does not work at some call of some rank's, as threads count them."""

    def __init__(self, call: int, result) -> None:
        self.calls, self.call, self.result = count(), call, result

    def __call__(self, argument):
        if next(self.calls) == self.call:
            raise DriverError("no such handle")
        return self.result(argument)


def exported(memory: torch.Tensor) -> bytes:
    return memory.data_ptr().to_bytes(8, "little")


def opened(handle: bytes) -> tuple[int, int]:
    return 1, int.from_bytes(handle, "little")


def test_ranks_exchange_their_memory(monkeypatch):
    ranks = Ranks(monkeypatch)
    monkeypatch.setattr(module, "export_memory", exported)
    monkeypatch.setattr(module, "open_memory", opened)
    for one, other in zip(*ranks.run(), strict=True):
        assert one.inboxes.tolist() == other.inboxes.tolist()
        assert one.inboxes.tolist() == [one.memory.data_ptr(), other.memory.data_ptr()]
    assert not ranks.closed


@pytest.mark.parametrize("function", ["export_memory", "open_memory"])
@pytest.mark.parametrize("call", [0, 1, 2, 3])
def test_all_ranks_go_without_where_one_cannot_share_memory(function, call, monkeypatch, caplog):
    """With expandable segments the driver exports no memory, and the start failed. The first two
    calls share the sums' memory, the others that of the maxima."""
    caplog.set_level("INFO", "nanovllm")
    ranks = Ranks(monkeypatch)
    functions = {"export_memory": exported, "open_memory": opened}
    for name, result in functions.items():
        monkeypatch.setattr(module, name, FailsAt(call if name == function else -1, result))
    assert ranks.run() == [(), ()]
    assert "all-reduce uses NCCL only" in caplog.text
    num_opened = next(module.open_memory.calls) - (function == "open_memory")
    assert len(ranks.closed) == num_opened, "what was opened is closed again"
