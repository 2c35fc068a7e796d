"""GPU memory that can be given back to the driver and taken again at the same addresses.

It uses the virtual memory management of the CUDA driver API, through ctypes. CUDA graphs that refer
to the addresses stay valid.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import nn

from nanovllm.utils.forks import LeftToParent
from nanovllm.utils.math import cdiv

CHUNK_BYTES = 256 << 20  # size of one cuMemCreate allocation and of one pinned copy; a power of two
ALIGNMENT = 512  # of tensors, as PyTorch's allocator aligns them
PINNED, DEVICE, READ_WRITE = 1, 1, 3  # values of the driver's enumerations

Address = ctypes.c_uint64  # CUdeviceptr
Handle = ctypes.c_uint64  # CUmemGenericAllocationHandle


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Driver:
    """The functions of the CUDA driver that arenas call. The device's context must be current.

    All of them raise RuntimeError with the name of the driver's error.

    Args:
        library: the driver's library.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def granularity(self, device: int) -> int:
        """Returns the number of bytes of which sizes and addresses must be multiples."""
        result = ctypes.c_size_t()
        properties = ctypes.byref(_properties(device))
        recommended = ctypes.c_int(1)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(result), properties, recommended)
        return result.value

    def reserve(self, num_bytes: int) -> int:
        """Reserves a range of addresses, without memory. Returns the first address."""
        address, size, zero = Address(), ctypes.c_size_t(num_bytes), ctypes.c_size_t(0)
        arguments = size, zero, Address(0), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), *arguments)
        return address.value

    def free(self, address: int, num_bytes: int) -> None:
        """Frees a reserved range, which must not have memory."""
        self._call("cuMemAddressFree", Address(address), ctypes.c_size_t(num_bytes))

    def map(self, address: int, num_bytes: int, device: int) -> None:
        """Creates memory at a range of addresses, which kernels of the device may read and write.
        If this raises, nothing has changed."""
        handle, size = Handle(), ctypes.c_size_t(num_bytes)
        properties, flags = ctypes.byref(_properties(device)), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), size, properties, flags)
        try:
            offset = ctypes.c_size_t(0)
            self._call("cuMemMap", Address(address), size, offset, handle, flags)
        finally:  # the mapping keeps the memory
            self._call("cuMemRelease", handle)
        access = Access(Location(DEVICE, device), READ_WRITE)
        try:
            arguments = size, ctypes.byref(access), ctypes.c_size_t(1)
            self._call("cuMemSetAccess", Address(address), *arguments)
        except RuntimeError:
            self.unmap(address, num_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        """Frees the memory at a range of addresses, which must be the range of one ``map``."""
        self._call("cuMemUnmap", Address(address), ctypes.c_size_t(num_bytes))

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(error), ctypes.byref(text))
            code = (text.value or b"unknown error").decode()
            hint = ": the GPU is out of memory" if code == "CUDA_ERROR_OUT_OF_MEMORY" else ""
            raise RuntimeError(f"{name} failed with {code} ({error}){hint}")


def _properties(device: int) -> Properties:
    return Properties(type=PINNED, location=Location(DEVICE, device))


@cache
def load_driver() -> Driver:
    return Driver(ctypes.CDLL("libcuda.so.1"))


_arenas: "WeakSet[Arena]" = WeakSet()


class Arena(LeftToParent):
    """Tensors at fixed GPU addresses, whose memory can be released and restored.

    The tensors keep the arena alive. Its memory is freed with the last of them.

    Args:
        num_bytes: an upper bound on the tensors' sizes, each rounded up to ALIGNMENT.
        device: a GPU with an index.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__()
        self.device, self._driver = device, load_driver()
        with _context(device):
            granularity = self._driver.granularity(device.index)
            self._num_bytes = cdiv(num_bytes, granularity) * granularity
            self._address = self._driver.reserve(self._num_bytes)
        step = cdiv(CHUNK_BYTES, granularity) * granularity
        # (address, bytes) of the chunks without and with memory, ascending.
        self._unmapped = [
            (self._address + start, min(step, self._num_bytes - start))
            for start in range(0, self._num_bytes, step)
        ]
        self._mapped: list[tuple[int, int]] = []
        self._used_bytes = 0
        self._saved: list[torch.Tensor] = []  # the values of the mapped chunks, while released
        _arenas.add(self)
        finalize(
            self,
            _free,
            self._driver,
            device,
            self._address,
            self._num_bytes,
            self._mapped,
            os.getpid(),
        )

    @property
    def mapped_bytes(self) -> int:
        """How much memory the arena holds."""
        return sum(size for _, size in self._mapped)

    def owns(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._address < self._num_bytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor without values in this arena, which must not be released."""
        start = self._used_bytes
        num_bytes = prod(shape) * dtype.itemsize
        self._used_bytes += cdiv(num_bytes, ALIGNMENT) * ALIGNMENT
        with self._in_context():
            self._map_used()
        return self._tensor(self._address + start, num_bytes).view(dtype).view(tuple(shape))

    def release(self, keeps_values: bool) -> None:
        """Gives the memory back to the driver, after the GPU has finished all work. Does nothing if
        it is released already.

        Args:
            keeps_values: copy the values to host memory, from where ``restore`` copies them back.
                Otherwise they are lost.
        """
        if not self._mapped:
            return
        with self._in_context():
            saved = []
            for address, size in self._mapped if keeps_values else ():
                is_pinned = self.device.type == "cuda"
                host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
                saved.append(host.copy_(self._tensor(address, size), non_blocking=True))
            torch.cuda.synchronize(self.device)
            self._saved = saved
            self._unmap_all()

    def restore(self) -> None:
        """Takes memory for all tensors again, and copies back the values that were kept.

        Raises:
            RuntimeError: the GPU has too little free memory. The arena is still released.
        """
        torch.cuda.empty_cache()
        with self._in_context():
            try:
                self._map_used()
            except RuntimeError:
                self._unmap_all()
                raise
            for (address, size), host in zip(self._mapped, self._saved, strict=False):
                self._tensor(address, size).copy_(host, non_blocking=True)
            torch.cuda.synchronize(self.device)
        self._saved = []

    def _map_used(self) -> None:
        end = self._address + self._used_bytes
        while self._unmapped and self._unmapped[0][0] < end:
            self._driver.map(*self._unmapped[0], self.device.index)
            self._mapped.append(self._unmapped.pop(0))

    def _unmap_all(self) -> None:
        while self._mapped:
            self._driver.unmap(*self._mapped[-1])
            self._unmapped.insert(0, self._mapped.pop())

    def _tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.as_tensor(_Bytes(self, address, num_bytes), device=self.device)

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        self.check_not_forked()
        with _context(self.device):
            yield


class _Bytes:
    """Bytes of an arena, in the form from which PyTorch makes a tensor. The tensor keeps this
    object, which keeps the arena."""

    def __init__(self, arena: Arena, address: int, num_bytes: int) -> None:
        self.arena = arena
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Makes the context of a device current."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # the first call of the CUDA runtime in a thread does it
        yield


def _free(
    driver: Driver,
    device: torch.device,
    address: int,
    num_bytes: int,
    mapped: list[tuple[int, int]],
    pid: int,
) -> None:
    if os.getpid() != pid:  # in a forked child
        return
    with suppress(RuntimeError), _context(device):  # a GPU that has failed fails again
        for chunk in mapped:
            driver.unmap(*chunk)
        driver.free(address, num_bytes)


def arena_of(tensor: torch.Tensor) -> Arena | None:
    """Returns the arena that a plain tensor is in; None if it is in none."""
    return next((arena for arena in _arenas if arena.owns(tensor)), None)


def arena_bytes(device: torch.device) -> int:
    """Returns how much memory of a GPU the arenas of this process hold."""
    return sum(arena.mapped_bytes for arena in _arenas if arena.device == device)


def empty_in_arena(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor without values, in an arena of its own.

    Raises:
        RuntimeError: the GPU has too little free memory.
    """
    torch.cuda.empty_cache()  # the driver cannot use what PyTorch's allocator holds
    return Arena(prod(shape) * dtype.itemsize, device).empty(shape, dtype)


def move_parameters(model: nn.Module, device: torch.device) -> None:
    """Moves the parameters of a model on a GPU into an arena. They stay the same objects."""
    params = [*model.parameters()]
    sizes = [cdiv(param.nbytes, ALIGNMENT) * ALIGNMENT for param in params]
    arena = Arena(sum(sizes), device)
    for param, size, end in zip(params, sizes, accumulate(sizes), strict=True):
        param.data = arena.empty(param.shape, param.dtype).copy_(param.data)
        if end // CHUNK_BYTES > (end - size) // CHUNK_BYTES:
            torch.cuda.empty_cache()  # frees the old tensors, which PyTorch's allocator still holds
