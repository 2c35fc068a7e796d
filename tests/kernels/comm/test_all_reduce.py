"""The one-shot all-reduce as one rank sees it, its peers' mail laid out beforehand, and on two
GPUs."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nanovllm.kernels.comm import all_reduce as module
from nanovllm.kernels.comm.all_reduce import Mail, all_reduce, all_reduce_norm
from nanovllm.kernels.fp8 import GROUP, empty_rows
from nanovllm.kernels.rms_norm import fp8_rms_norm_triton, rms_norm_triton
from nanovllm.utils.cuda_ipc import DriverError
from nanovllm.utils.distributed import (
    RankOrderTPGroup,
    RankPart,
    TPGroup,
    make_tp_group,
    open_store,
)

NUM_ROWS = 40


class Post:
    """What all ranks have of an all-reduce: the inboxes of each, and the mail of one."""

    def __init__(self, rank, size, width, dtype, device) -> None:
        counts = torch.zeros(NUM_ROWS, module.SPLIT, dtype=torch.int32, device=device)
        abort = torch.zeros(1, dtype=torch.int32)
        abort = abort.pin_memory() if device == "cuda" else abort
        self.all_inboxes = [
            module.empty_inboxes(size, NUM_ROWS, width, dtype, torch.device(device))
            for _ in range(size)
        ]
        self.empty = self.all_inboxes[0].clone()
        addresses = [inboxes.data_ptr() for inboxes in self.all_inboxes]
        addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.mail = Mail(rank, size, NUM_ROWS, width, addresses, counts, abort)

    def inbox(self, owner: int, sender: int, call: int) -> torch.Tensor:
        return self.all_inboxes[owner][call % 2, sender].view(-1)

    def send(self, parts: torch.Tensor, call: int) -> None:
        """Lays out the mail of all other ranks."""
        rank = self.mail.rank
        for sender, part in enumerate(parts):
            if sender != rank:
                self.inbox(rank, sender, call)[: part.numel()] = part.flatten()

    def assert_sent(self, part: torch.Tensor, call: int) -> None:
        """Its own tensor is in the other ranks' inboxes, which then empty them, and its own inboxes
        are empty."""
        rank, size, *_ = self.mail
        for owner in range(size):
            if owner != rank:
                inbox = self.inbox(owner, rank, call)
                assert torch.equal(inbox[: part.numel()], part.flatten())
                inbox.copy_(self.empty.flatten()[: len(inbox)])
        for inboxes in self.all_inboxes:
            assert torch.equal(as_bits(inboxes), as_bits(self.empty))


def as_bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def summed(parts: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts.dtype)


@pytest.mark.parametrize("width", [64, 576, 2560])
@pytest.mark.parametrize("rank, size", [(0, 2), (1, 2), (2, 4)])
def test_sums_what_the_peers_have_sent_and_sends_its_own(
    width, rank, size, dtype, device, monkeypatch
):
    """In both inboxes, with few and many rows in turn, and with fewer programs than rows."""
    monkeypatch.setattr(module, "max_programs", lambda device, num_warps: 7)
    post = Post(rank, size, width, dtype, device)
    post.mail.counts.fill_(2**31 - 3)  # overflows
    for call, num_rows in enumerate((1, 3, NUM_ROWS, 2, NUM_ROWS), 1):
        post.mail.counts[:] = post.mail.counts[0, 0].item()
        parts = torch.randn(size, num_rows, width, device=device).to(dtype)
        post.send(parts, call)
        out = all_reduce(parts[rank], post.mail)
        assert torch.equal(out, summed(parts))
        post.assert_sent(parts[rank], call)
        num_changed = (post.mail.counts != post.mail.counts[-1, -1]).sum()
        assert num_changed == (num_rows * module.SPLIT if num_rows < NUM_ROWS else 0)


def test_numbers_of_all_kinds_are_exchanged(dtype, device):
    """-0, which means that nothing has come yet, is sent as +0. The sum is the same."""
    post = Post(1, 2, 64, dtype, device)
    numbers = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf, torch.nan, 1, -1, 6e-8])
    numbers = numbers.to(dtype).to(device)
    parts = torch.stack((numbers.repeat(8), numbers.repeat_interleave(8)))[:, None]
    sent = parts + 0  # -0 + 0 is +0
    post.send(sent, 0)
    out = all_reduce(parts[1], post.mail)
    expected = summed(parts)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(out), torch.signbit(expected))
    left = post.inbox(0, 1, 0)[:64].clone()
    assert not (as_bits(left) == as_bits(torch.tensor(-0.0, dtype=dtype, device=device))).any()
    torch.testing.assert_close(left, parts[1, 0], rtol=0, atol=0, equal_nan=True)


def test_a_tensor_of_another_shape(device):
    """Its elements fill the rows, the last one in part."""
    post = Post(0, 2, 64, torch.float32, device)
    for call in range(3):
        parts = torch.randn(2, 100, 1, device=device)
        post.send(parts, call)
        assert torch.equal(all_reduce(parts[0], post.mail), summed(parts))
        post.assert_sent(parts[0], call)


def test_a_tensor_larger_than_the_inboxes(dtype, device):
    post = Post(0, 2, 64, dtype, device)
    parts = torch.randn(2, NUM_ROWS + 5, 64, device=device).to(dtype)
    post.send(parts[:, :NUM_ROWS], 0)
    post.send(parts[:, NUM_ROWS:], 1)
    assert torch.equal(all_reduce(parts[0], post.mail), summed(parts))


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("width", [128, 640])
def test_the_norm_after_the_sum_has_the_same_bits(width, group, dtype, device):
    """Up to a width of 4,096, where both kernels have as many warps."""
    post = Post(1, 2, width, dtype, device)
    weight = torch.rand(width, device=device).to(dtype)
    for num_rows in (3, NUM_ROWS, 1):
        parts = torch.randn(2, num_rows, width, device=device).to(dtype)
        residual = torch.randn(num_rows, width, device=device).to(dtype)
        args = weight, 1e-6, residual
        sum_ = summed(parts)
        post.mail.counts.zero_()
        post.send(parts, 0)
        out = torch.empty_like(residual)
        total = all_reduce_norm(parts[1], post.mail, *args, out)
        post.assert_sent(parts[1], 0)
        expected, expected_total = rms_norm_triton(sum_, *args)
        assert torch.equal(out, expected) and torch.equal(total, expected_total)
        post.send(parts, 1)
        rows = empty_rows(residual, width, group)
        all_reduce_norm(parts[1], post.mail, *args, *rows, group)
        post.assert_sent(parts[1], 1)
        quantised, _ = fp8_rms_norm_triton(sum_, *args, group)
        assert torch.equal(rows.codes.view(torch.uint8), quantised.codes.view(torch.uint8))
        assert torch.equal(rows.scales, quantised.scales)


def test_the_largest_of_int64_at_each_place(device):
    """Guards packed scores, of which fp32 would lose the token."""
    post = Post(1, 2, 64, torch.int64, device)
    for call in range(3):
        parts = torch.randint(-(2**62), 2**62, (2, 100), device=device)
        parts[1, :50] = parts[0, :50] + 1
        post.send(parts, call)
        assert torch.equal(all_reduce(parts[1], post.mail), torch.maximum(*parts))
        post.assert_sent(parts[1], call)


def test_an_abort_ends_the_wait_for_a_silent_peer(device):
    post = Post(0, 2, 64, torch.float32, device)
    post.mail.abort.fill_(1)
    all_reduce(torch.ones(1, 64, device=device), post.mail)
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    "width, num_warps, resident",
    [(512, 1, 16), (1024, 2, 16), (4096, 8, 4), (8192, 16, 2), (16384, 16, 2)],
)
def test_no_more_programs_wait_than_run_at_once(width, num_warps, resident, monkeypatch):
    """A large tensor took 1,024 programs. Those of one GPU that wait could keep others from
    starting, for which the programs that run on another one wait."""
    launches = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launches.append((*grid, kwargs["num_warps"]))

    monkeypatch.setattr(module, "_all_reduce_kernel", Kernel())
    num_rows = module.num_rows_of(width, 2, torch.bfloat16)
    mail = Mail(0, 2, num_rows, width, *3 * [torch.zeros(1)])
    for rows in (1, 100, num_rows):
        all_reduce(torch.zeros(rows, width), mail)
    limit = resident * 132
    assert launches == [
        (4, module.num_warps_of(width // 4)),  # for a row that is divided
        *((min(rows, limit), num_warps) for rows in (100, num_rows)),
    ]
    assert module.max_norm_rows(mail, torch.device("cpu")) == min(num_rows, limit)


def make_one_shot(size: int, num_rows: int, width: int) -> module.OneShotAllReduce:
    """One of fp32, without peers."""
    one_shot = object.__new__(module.OneShotAllReduce)
    one_shot.dtype = torch.float32
    one_shot.mail = Mail(0, size, num_rows, width, *3 * [torch.zeros(1)])
    return one_shot


def test_which_tensors_are_reduced_in_one_shot():
    two, four = make_one_shot(2, 8, 64), make_one_shot(4, 8, 64)
    for x, by_two, by_four, before_norm in (
        (torch.zeros(1, 64), True, True, False),
        (torch.zeros(2, 64), True, True, True),
        (torch.zeros(8, 64), True, True, True),
        (torch.zeros(9, 64), True, False, False),
        (torch.zeros(4, 128), True, True, False),
        (torch.zeros(64), True, True, False),
        (torch.zeros(2, 64, dtype=torch.float16), False, False, False),
        (torch.zeros(64, 4).t(), False, False, False),
    ):
        assert (two.supports(x), four.supports(x)) == (by_two, by_four)
        assert two.supports_norm(x) == four.supports_norm(x) == before_norm


def test_which_sums_are_left_to_the_norm(monkeypatch):
    """Not with batch invariance, where all rows have the same norm's kernel."""
    one_shot, x = make_one_shot(2, 8, 64), torch.zeros(2, 64)
    monkeypatch.setattr(module.OneShotAllReduce, "__call__", lambda self, x: x + 1)
    for group_class, is_left in ((TPGroup, True), (RankOrderTPGroup, False)):
        group = group_class(size=2, one_shots=(one_shot,))
        found = group.all_reduce_before_norm(x)
        if is_left:
            assert found == RankPart(x, one_shot)
        else:
            assert torch.equal(found, x + 1)
        assert torch.equal(group.all_reduce_before_norm(x[:1]), x[:1] + 1)


@pytest.mark.parametrize("arguments", ["2 64 float16", "3 100 float32", "4 66 float16"])
def test_ranks_that_wait_for_each_other(arguments):
    subprocess.run(
        [sys.executable, "-m", "tests.kernels.comm.ranks", *arguments.split()],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        timeout=200,
        check=True,
    )


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


def test_the_size_of_inboxes_is_chosen_by_the_number_of_gpus():
    """Each rank sends its tensor to every other one."""
    rows = [module.num_rows_of(4096, size, torch.bfloat16) for size in (2, 3, 4, 8)]
    assert rows == [2048, 64, 64, 32]
    assert module.num_rows_of(4096, 8, torch.float32) == 16


class Ranks:
    """Two ranks as threads, without a GPU."""

    def __init__(self, monkeypatch) -> None:
        self.store = dist.HashStore()
        self.barrier = threading.Barrier(2, timeout=20)
        self.values = [0, 0]
        self.closed: list[int] = []
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
                group, self.store, torch.float32, 64, [torch.device("cpu")] * 2
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
        assert one.mail.inboxes.tolist() == other.mail.inboxes.tolist()
        assert one.mail.inboxes.tolist() == [one.memory.data_ptr(), other.memory.data_ptr()]
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


def run_rank(rank: int, folder: str) -> None:
    """Many all-reduces in turn, launched one by one and by a CUDA graph."""
    devices = [torch.device("cuda", index) for index in range(2)]
    torch.cuda.set_device(rank)
    store = open_store(folder)
    group = make_tp_group(rank, 2, store, devices[rank])
    width, dtype = 4096, torch.bfloat16
    one_shots = module.make_one_shot_all_reduces(group, store, dtype, width, devices)
    most = module.max_norm_rows(one_shots[0].mail, devices[rank])
    group = replace(group, one_shots=one_shots)
    sizes = [1, 2, 32, 33, 256, 512, 7, 1, 1, 3000, 64] * 5
    torch.manual_seed(0)  # the same parts on both ranks
    weight = torch.rand(width, device=devices[rank]).to(dtype)
    parts = torch.randn(2, sum(sizes), width, device=devices[rank]).to(dtype)
    residual = torch.randn(sum(sizes), width, device=devices[rank]).to(dtype)
    mine = parts[rank].clone()
    found: list[list[torch.Tensor]] = []

    def run() -> None:
        found.clear()
        for part, rest in zip(mine.split(sizes), residual.split(sizes), strict=True):
            x = group.all_reduce_before_norm(part)
            assert isinstance(x, RankPart) == (1 < len(part) <= most)
            found.append([*rms_norm_triton(x, weight, 1e-6, rest), group.all_reduce(part)])

    def check() -> None:
        torch.cuda.synchronize()
        expected = summed(parts).split(sizes)
        for x, rest, (normed, total, sum_) in zip(
            expected, residual.split(sizes), found, strict=True
        ):
            assert torch.equal(sum_, x) and torch.equal(total, x + rest)
            torch.testing.assert_close(normed, rms_norm_triton(x, weight, 1e-6, rest)[0])

    run()
    check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        parts.copy_(parts.roll(1, 1))
        mine.copy_(parts[rank])
        graph.replay()
        check()
    group.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path):
    if not module.supports_one_shot([torch.device("cuda", index) for index in range(2)]):
        pytest.skip("needs NVLink")
    torch.multiprocessing.spawn(run_rank, (str(tmp_path),), 2)
