"""Several int32 tensors in one buffer, for one copy to a device and one message to a process."""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from nanovllm.utils.math import cdiv

ALIGNMENT = 4  # in int32: kernels are compiled for pointers at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """Tensors that lie end to end in a buffer on the host.

    Attributes:
        shapes: the shape of each tensor, in the buffer's order.
        buffer: int32.
    """

    shapes: dict[str, tuple[int, ...]]
    buffer: torch.Tensor

    @classmethod
    def pack(cls, tensors: dict[str, torch.Tensor], pin_memory: bool) -> "PackedTensors":
        """Copies tensors on the host to a new buffer. ``pin_memory`` pins the buffer, which makes
        copies to a GPU asynchronous."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        sizes = [*map(_padded_size, shapes.values())]
        buffer = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=pin_memory)
        words, start = buffer.numpy(), 0
        for tensor, size in zip(tensors.values(), sizes, strict=True):
            words[start : start + tensor.numel()] = tensor.numpy().reshape(-1)
            start += size
        return cls(shapes, buffer)

    def views(self, buffer: Any) -> dict[str, Any]:
        """Returns each tensor as a view of ``buffer``, which may be a tensor or an array."""
        views, start = {}, 0
        for name, shape in self.shapes.items():
            views[name] = buffer[start : start + prod(shape)].reshape(shape)
            start += _padded_size(shape)
        return views

    def start_of_last(self) -> int:
        """Returns the offset of the last tensor in the buffer."""
        return sum(map(_padded_size, list(self.shapes.values())[:-1]))

    def copy_to(self, buffer: torch.Tensor) -> torch.Tensor:
        """Starts a copy to the beginning of a device buffer. Returns that buffer."""
        pinned = self.buffer
        if buffer.is_cuda and not pinned.is_pinned():  # received from another process
            pinned = pinned.pin_memory()
        buffer[: len(pinned)].copy_(pinned, non_blocking=True)
        return buffer

    def __reduce__(self) -> tuple[Any, ...]:
        # A numpy array is pickled in a tenth of a tensor's time.
        return _from_array, (self.shapes, self.buffer.numpy())


def _padded_size(shape: tuple[int, ...]) -> int:
    return cdiv(prod(shape), ALIGNMENT) * ALIGNMENT


def _from_array(shapes: dict[str, tuple[int, ...]], buffer: np.ndarray) -> PackedTensors:
    return PackedTensors(shapes, torch.from_numpy(buffer))
