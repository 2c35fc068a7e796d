"""GPU memory of another process on this host, through the CUDA driver's IPC handles, and what GPUs
can do with each other's.

PyTorch's symmetric memory meets under a number that it counts per process, so a process cannot
meet a second group of fresh ones; and its shared tensors leave files under /dev/shm. The handles
themselves have neither fault.
"""

import ctypes
import struct
from functools import cache
from typing import Any

import torch

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1
NATIVE_ATOMIC_SUPPORTED = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class DriverError(RuntimeError):
    """The CUDA driver refuses."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


def export_memory(tensor: torch.Tensor) -> bytes:
    """What another process needs to open a CUDA tensor's memory."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    address = ctypes.c_uint64(tensor.data_ptr())
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return struct.pack("<q", address.value - base.value) + bytes(handle)


def open_memory(exported: bytes) -> tuple[int, int]:
    """What to close again, and the address of the tensor's memory, for kernels on the current
    device; ``exported`` is another process's."""
    (offset,) = struct.unpack_from("<q", exported)
    handle, base = _Handle.from_buffer_copy(exported, 8), ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, LAZY_ENABLE_PEER_ACCESS)
    return base.value, base.value + offset


def close_memory(base: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


def has_native_atomics(device: int, peer: int) -> bool:
    """Whether a GPU can do atomic operations on another one's memory, as over NVLink but not over
    PCIe. Devices are PyTorch's indices."""
    value, handles = ctypes.c_int(), []
    _call("cuInit", 0)
    for index in (device, peer):
        handles.append(ctypes.c_int())
        _call("cuDeviceGet", ctypes.byref(handles[-1]), index)
    _call("cuDeviceGetP2PAttribute", ctypes.byref(value), NATIVE_ATOMIC_SUPPORTED, *handles)
    return bool(value.value)


def _call(name: str, *args: Any) -> None:
    if error := getattr(_driver(), name)(*args):
        raise DriverError(f"{name} failed with CUDA error {error}")


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(str(error)) from error
