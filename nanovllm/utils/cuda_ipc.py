"""Access to GPU memory of other processes on this host, through IPC handles of the CUDA driver.

PyTorch has two alternatives, each with a defect. The rendezvous of its symmetric memory uses a
counter per process, so a process that has had one group cannot join a group of new processes. The
tensors that PyTorch shares between processes leave files under /dev/shm.
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
    """A call of the CUDA driver failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


def export_memory(tensor: torch.Tensor) -> bytes:
    """Returns the offset and IPC handle with which another process can open a tensor's memory."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    address = ctypes.c_uint64(tensor.data_ptr())
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return struct.pack("<q", address.value - base.value) + bytes(handle)


def open_memory(exported: bytes) -> tuple[int, int]:
    """Maps a tensor that another process has exported, for kernels on the current device.

    Returns:
        The base address, for ``close_memory``, and the address of the tensor.
    """
    (offset,) = struct.unpack_from("<q", exported)
    handle, base = _Handle.from_buffer_copy(exported, 8), ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, LAZY_ENABLE_PEER_ACCESS)
    return base.value, base.value + offset


def close_memory(base: int) -> None:
    """Unmaps memory from ``open_memory``."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


def has_native_atomics(device: int, peer: int) -> bool:
    """Returns whether a GPU can do atomic operations on a peer's memory, as NVLink supports but
    PCIe does not. Devices are indices as in PyTorch."""
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
