"""Runs Gluon kernels on the CPU, for their indices, masks and barriers.

Triton has no interpreter for Gluon. Here stand-ins for its modules let a kernel run as plain
Python. Tensors are PyTorch's, and layouts mean nothing. Each partition of ``warp_specialize`` is a
thread, and programs run one after another. Some loads by TMA arrive late, and asynchronous matmuls
and stores read shared memory only when they are waited for, so data that is overwritten too early
is noticed. A barrier that nobody completes is an error.
"""

import importlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

TIMEOUT = 20.0  # seconds at a barrier
WRAP = 1 << 63  # where addresses of 2-byte elements wrap around

_random = random.Random(0)
_thread = threading.local()  # program, number of threads, and matmuls and stores in flight


class Program:
    """What the partitions of a program share.

    Attributes:
        index, count: which program it is, and how many there are, along each axis of the grid.
        changed: guards all barriers, and is notified when one completes.
        named: of each named barrier the threads and the waits of its phase, and past phases.
        failed: whether a partition failed.
    """

    def __init__(self, index: tuple[int, ...], count: tuple[int, ...]) -> None:
        self.index, self.count = index, count
        self.changed = threading.Condition()
        self.named: dict[int, list[int]] = {}
        self.failed = False

    def wait(self, done: Callable[[], bool], barrier: str) -> None:
        end = time.monotonic() + TIMEOUT
        while not done():
            assert not self.failed, "another partition failed"
            assert time.monotonic() < end, f"deadlock at {barrier}"
            self.changed.wait(0.1)


def _run_partitions(functions_and_args: list[Any], num_warps: list[int], registers: Any) -> None:
    errors: list[BaseException] = []
    program = _thread.program

    def run(function: Callable[..., None], args: Any, num_warps: int) -> None:
        _thread.num_threads = 32 * num_warps
        _thread.program, _thread.matmuls, _thread.stores = program, [], []
        try:
            function(*args)
        except BaseException as e:
            errors.append(e)
            program.failed = True

    threads = [
        threading.Thread(target=run, args=(*each, warps))
        for each, warps in zip(functions_and_args, [4, *num_warps], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Barrier:
    """An mbarrier. A phase completes once all arrivals and bytes have come."""

    def __init__(self) -> None:
        self.program = _thread.program

    def init(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def update(self, arrivals: int, num_bytes: int) -> None:
        with self.program.changed:
            self.pending -= arrivals
            self.bytes += num_bytes
            assert self.pending >= 0 and self.bytes >= 0, "too many arrivals or bytes"
            if self.pending == self.bytes == 0:
                self.phase += 1
                self.pending = self.count
                self.program.changed.notify_all()

    def wait(self, phase: Any) -> None:
        with self.program.changed:
            self.program.wait(lambda: self.phase & 1 != int(phase) & 1, f"phase {self.phase}")


class Shared:
    """A view of shared memory."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def index(self, i: Any) -> Any:
        element = self.data[int(i)]
        return element if isinstance(element, Barrier) else Shared(element)

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.data.view(shape))

    def permute(self, order: list[int]) -> "Shared":
        return Shared(self.data.permute(order))

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    if dtype is torch.int64:
        return Shared([Barrier() for _ in range(shape[0])])
    return Shared(torch.full(shape, torch.nan, dtype=dtype))


class Pointer:
    def __init__(self, data: Tensor, offset: Any = 0) -> None:
        self.data, self.offset = data, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.data, self.offset + offset)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.data.dtype)


def _load(pointer: Pointer, mask: Any = True, other: float = 0) -> Tensor:
    offset, mask = torch.broadcast_tensors(
        torch.as_tensor(pointer.offset).long(), torch.as_tensor(mask)
    )
    data = pointer.data  # whose strides may be any
    size = data.untyped_storage().nbytes() // data.itemsize - data.storage_offset()
    memory = data.as_strided((size,), (1,))
    assert ((offset >= 0) & (offset < len(memory)))[mask].all(), "outside of the tensor"
    values = memory[torch.where(mask, offset, 0)]
    return torch.where(mask, values, torch.tensor(other, dtype=memory.dtype))


def _store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    offset, mask = torch.broadcast_tensors(pointer.offset.long(), mask)
    memory = pointer.data.view(-1)
    assert ((offset >= 0) & (offset < len(memory)))[mask].all(), "outside of the tensor"
    memory[offset[mask]] = value[mask]


class TensorDescriptor:
    """Describes a tensor to the TMA, which copies boxes of it."""

    def __init__(self, base: Tensor, shape: Any, strides: Any, block_shape: Any, layout: Any):
        itemsize = base.itemsize
        assert all(n * itemsize % 16 == 0 and n * itemsize < 1 << 40 for n in strides[:-1])
        assert strides[-1] == 1 and base.storage_offset() * itemsize % 16 == 0
        size = base.untyped_storage().nbytes() // itemsize - base.storage_offset()
        self.memory = base.as_strided((size,), (1,))
        self.shape, self.strides = shape, strides
        self.block_shape, self.layout = block_shape, layout

    @classmethod
    def from_tensor(cls, tensor: Tensor, block_shape: Any, layout: Any) -> "TensorDescriptor":
        return cls(tensor, tensor.shape, tensor.stride(), block_shape, layout)

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def rows(self, coordinates: list[Any]) -> Iterator[tuple[int, Tensor]]:
        """Yields the rows of the box that are in bounds, as far as they are: their index and
        elements."""
        *first, column = (int(c) for c in coordinates)
        assert column * self.memory.itemsize % 16 == 0, "an illegal instruction on a GPU"
        size = min(self.block_shape[-1], self.shape[-1] - column)
        for i, steps in enumerate(product(*map(range, self.block_shape[:-1]))):
            at = [*map(sum, zip(first, steps, strict=True)), column]
            if all(0 <= c < n for c, n in zip(at, self.shape, strict=True)):
                address = sum(c * s for c, s in zip(at, self.strides, strict=True))
                row = self.memory[address % WRAP :][:size]
                assert len(row) == size, "outside of the tensor"
                yield i, row


def _tma_load(desc: TensorDescriptor, coordinates: Any, barrier: Barrier, to: Shared) -> None:
    box = torch.zeros(desc.block_shape, dtype=desc.memory.dtype).flatten(0, -2)
    for i, row in desc.rows(coordinates):
        box[i, : len(row)] = row

    def arrive() -> None:
        time.sleep(_random.random() * 0.002)
        to.data.copy_(box.view(to.data.shape))
        barrier.update(0, -box.nbytes)

    if _random.random() < 0.3:
        threading.Thread(target=arrive).start()
    else:
        arrive()


def _tma_store(desc: TensorDescriptor, coordinates: Any, source: Shared) -> None:
    _thread.stores.append((desc, [int(c) for c in coordinates], source))


def _tma_store_wait(pending: int) -> None:
    for desc, coordinates, source in _thread.stores:
        for i, row in desc.rows(coordinates):
            row.copy_(source.data.view(-1, desc.block_shape[-1])[i, : len(row)])
    _thread.stores = []


class Matmul:
    """A matmul in flight, and its result once it is waited for. It may add to the result of another
    one in flight."""

    result: Tensor | None = None

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = True):
        self.args = a, b, acc if use_acc else 0
        _thread.matmuls.append(self)

    def finish(self) -> None:
        a, b, acc = self.args
        acc = acc.result if isinstance(acc, Matmul) else acc
        self.result = acc + (a.data if isinstance(a, Shared) else a).float() @ b.data.float()


def _matmul_wait(pending: int, deps: list[Any]) -> Any:
    if _random.random() < 0.2:
        time.sleep(0.002)  # for others to overwrite what they may not
    while len(_thread.matmuls) > pending:
        _thread.matmuls.pop(0).finish()
    is_done = [isinstance(x, Matmul) and x.result is not None for x in deps]
    results = tuple(x.result if done else x for x, done in zip(deps, is_done, strict=True))
    return results[0] if len(results) == 1 else results


def _named_barrier(index: int, num_threads: int, is_sync: bool) -> None:
    """A barrier completes when as many threads as it says have arrived or wait."""
    program = _thread.program
    with program.changed:
        state = program.named.setdefault(index, [0, 0, 0])
        state[0] += _thread.num_threads
        state[1] += is_sync
        phase = state[2]
        assert state[0] <= num_threads, f"too many threads at named barrier {index}"
        if state[0] == num_threads:
            assert state[1] == 1, f"{state[1]} partitions wait at named barrier {index}"
            state[:] = 0, 0, phase + 1
            program.changed.notify_all()
        elif is_sync:
            program.wait(lambda: state[2] > phase, f"named barrier {index}")


def _assembly(
    text: str, constraints: str, args: list[Any], dtype: torch.dtype, **options: Any
) -> Any:
    if text.startswith("bar."):
        num_threads = int(text.split(";")[0].split(",")[1])
        return _named_barrier(int(args[0]), num_threads, text.startswith("bar.sync"))
    if text.startswith("cvt.rn."):
        return args[0].to(dtype)
    if text.startswith("rcp."):
        return args[0].reciprocal()
    assert "nanosleep" in text, text  # only for the order of instructions
    return args[0]


class Kernel:
    """A kernel, which is launched with a grid."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            *args: Any, num_warps: int, maxnreg: int | None = None, **constants: Any
        ) -> None:
            values = [
                Pointer(a) if isinstance(a, Tensor) else torch.tensor(a) if type(a) is int else a
                for a in args
            ]
            for index in product(*map(range, grid)):
                _thread.program, _thread.matmuls = Program(index, grid), []
                self.function(*values, **constants)

        return launch


def _jit(function: Any = None, **options: Any) -> Any:
    return Kernel if function is None else function


def _binary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


LANGUAGE = {
    "constexpr": lambda x: x,
    "tensor": Tensor,
    "shared_memory_descriptor": Shared,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "NVMMADistributedLayout": lambda version, warps, shape: SimpleNamespace(instr_shape=shape),
    "NVMMASharedLayout": lambda *args: None,
    "DotOperandLayout": lambda *args: None,
    "BlockedLayout": lambda *args: None,
    "SliceLayout": lambda *args: None,
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "allocate_shared_memory": _allocate,
    "warp_specialize": _run_partitions,
    "inline_asm_elementwise": _assembly,
    "program_id": lambda axis: _thread.program.index[axis],
    "num_programs": lambda axis: _thread.program.count[axis],
    "static_range": range,
    "load": _load,
    "store": _store,
    "to_tensor": torch.tensor,
    "arange": lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
    "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    "where": lambda c, a, b: torch.where(
        torch.as_tensor(c), torch.as_tensor(a), torch.as_tensor(b)
    ),
    "minimum": _binary(torch.minimum),
    "maximum": _binary(torch.maximum),
    "max": torch.amax,
    "sum": torch.sum,
    "join": lambda a, b: torch.stack((a, b), -1),
    "split": lambda x: x.unbind(-1),
    "exp": torch.exp,
    "exp2": torch.exp2,
    "rsqrt": torch.rsqrt,
}
HOPPER = {
    "mbarrier": SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=Barrier.init,
        wait=Barrier.wait,
        expect=lambda barrier, num_bytes: barrier.update(1, num_bytes),
        arrive=lambda barrier, pred=True: barrier.update(1, 0) if pred else None,
    ),
    "tma": SimpleNamespace(
        tensor_descriptor=TensorDescriptor,
        async_copy_global_to_shared=_tma_load,
        async_copy_shared_to_global=_tma_store,
        store_wait=_tma_store_wait,
    ),
    "fence_async_shared": lambda: None,
    "warpgroup_mma": Matmul,
    "warpgroup_mma_wait": _matmul_wait,
}


@contextmanager
def emulated_gemm(kernel: str, launcher: ModuleType) -> Iterator[None]:
    """Runs a GEMM for Hopper on the CPU, with few programs, so that each has several tiles.

    Args:
        kernel: the name of its kernel's module, such as "gemm.swiglu_kernel".
        launcher: the module that launches it.
    """
    names = "hopper", "gemm.hopper_loop", kernel
    with (
        patch.object(launcher, "num_multiprocessors", lambda device: 3),
        emulated(*(f"nanovllm.kernels.{name}" for name in names)),
    ):
        yield


@contextmanager
def emulated(*names: str) -> Iterator[list[ModuleType]]:
    """Imports modules such that their Gluon kernels run on the CPU, inside a ``with`` block."""
    gluon = {"jit": _jit, "constexpr_function": lambda f: f}
    stand_ins = {
        "triton": {},
        "triton.language.core": {"_aggregate": lambda cls: cls},
        "triton.experimental": {"gluon": SimpleNamespace(**gluon)},
        "triton.experimental.gluon": gluon | {"language": SimpleNamespace(**LANGUAGE)},
        "triton.experimental.gluon.language": LANGUAGE,
        "triton.experimental.gluon.language.nvidia.hopper": HOPPER,
        "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": TensorDescriptor},
    }
    modules = {}
    for name, contents in stand_ins.items():
        modules[name] = ModuleType(name)
        modules[name].__dict__.update(contents)
    before = {name: sys.modules.get(name) for name in (*modules, *names)}
    sys.modules.update(modules)
    try:
        for name in names:
            sys.modules.pop(name, None)
        yield [importlib.import_module(name) for name in names]
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
