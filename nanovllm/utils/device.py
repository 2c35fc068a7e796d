"""Chooses the device and the dtype of a rank, and makes the device current."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def on_device(method: Method) -> Method:
    """During a call, makes the GPU of the method's object PyTorch's current device, because another
    engine may have set another, and disables autocast, which a training loop may have enabled. In a
    forked child process, the call raises ValueError. The object is a LeftToParent with the
    attribute ``device``."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_not_forked()
        if torch.is_autocast_enabled(self.device.type):
            with torch.autocast(self.device.type, enabled=False):
                return call(self, *args, **kwargs)
        if self.device.type == "cpu":
            return method(self, *args, **kwargs)
        with torch.cuda.device(self.device):
            return method(self, *args, **kwargs)

    return cast(Method, call)


def select_device(name: str, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """The device of a rank: "cuda:2" is rank 0's, and the other ranks take the GPUs after it.
    Without an index, a single rank takes PyTorch's current GPU, and several start with GPU 0.

    Raises:
        ValueError: there is no such GPU, or there are fewer GPUs than ranks.
    """
    available = torch.cuda.is_available()
    if name.startswith("cuda") and not available:
        raise ValueError(f"device={name!r}, but PyTorch finds no CUDA GPU: use device='cpu'")
    if not available or name == "cpu":
        return torch.device("cpu")
    num_gpus, (_, _, index) = torch.cuda.device_count(), name.partition(":")
    first = int(index) if index else torch.cuda.current_device() if num_ranks == 1 else 0
    if index and first >= num_gpus:
        raise ValueError(f"device={name!r}, but PyTorch finds only {num_gpus} GPUs")
    if first + num_ranks > num_gpus:
        raise ValueError(
            f"tensor_parallel_size={num_ranks}, but PyTorch finds {num_gpus - first} GPUs"
            f"{f' from {name} on' if first else ''}: lower it, or use device='cpu'"
        )
    return torch.device("cuda", first + rank)


def select_dtype(name: str, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """Returns the dtype of weights and activations.

    "auto" is fp32 on a CPU and the checkpoint's dtype on a GPU. If that is bf16 and the GPU does
    not support it, "auto" is fp16."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if checkpoint is torch.bfloat16 and not has_bf16 else checkpoint
