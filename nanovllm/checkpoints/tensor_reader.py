"""Tensors of safetensors files, read by several threads straight to a GPU."""

import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from nanovllm.utils.panics import as_value_error

NUM_THREADS = 8  # one copies from the page cache at a few GB/s, and waits for a disk
CHUNK_BYTES = 8 << 20
AHEAD_BYTES = 512 << 20  # of tensors that nobody has taken yet
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_tensors(
    paths: list[Path], device: torch.device, num_threads: int = NUM_THREADS
) -> Iterator[tuple[str, torch.Tensor]]:
    """Streams the tensors of safetensors files, in the order in which they lie there.

    Each is whole for what the current stream does next. Some hundred MB lie on the device ahead of
    the tensor that is given.

    Args:
        paths: the files.
        device: where the tensors are to be.
        num_threads: that read at once, each through pinned memory of its own.

    Raises:
        ValueError: a file that is damaged, or has a dtype that PyTorch has not.
    """
    chunks = _ChunkReader(device)
    pending: deque[tuple[str, torch.Tensor, list[Future[None]]]] = deque()
    num_bytes = 0
    with ExitStack() as files, ThreadPoolExecutor(num_threads) as executor:
        for path in paths:
            with as_value_error(f"{path} cannot be read"):
                file = files.enter_context(path.open("rb", buffering=0)).fileno()
                layout = _read_layout(path)
            for name, dtype, shape, start in layout:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                parts = tensor.view(-1).view(torch.uint8).split(CHUNK_BYTES)
                starts = range(start, start + tensor.nbytes, CHUNK_BYTES)
                copies = [
                    executor.submit(chunks.read, path, file, at, part)
                    for at, part in zip(starts, parts, strict=False)
                ]
                pending.append((name, tensor, copies))
                num_bytes += tensor.nbytes
                while num_bytes > AHEAD_BYTES and len(pending) > 1:
                    num_bytes -= pending[0][1].nbytes
                    yield _take(pending)
        while pending:
            yield _take(pending)


def _take(
    pending: deque[tuple[str, torch.Tensor, list[Future[None]]]],
) -> tuple[str, torch.Tensor]:
    name, tensor, copies = pending.popleft()
    for copy in copies:
        copy.result()
    return name, tensor


def _read_layout(path: Path) -> list[tuple[str, torch.dtype, list[int], int]]:
    """Name, dtype, shape and place of each tensor in a file, as they lie there."""
    with safe_open(path, framework="pt"):  # checks the header: sizes, bounds, gaps
        pass
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    layout = []
    for name, info in header.items():
        if (dtype := DTYPES.get(info["dtype"])) is None:
            raise ValueError(f"tensor {name!r:.80}: dtype {info['dtype']!s:.80} is not served")
        layout.append((name, dtype, info["shape"], 8 + size + info["data_offsets"][0]))
    return sorted(layout, key=lambda entry: entry[-1])


class _ChunkReader:
    """Reads parts of files to a device, in any number of threads.

    The copies are in the stream that is current where this is made, and so in order with what the
    maker's thread does there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self._on_gpu else None
        self._own = threading.local()

    @torch.inference_mode()
    def read(self, path: Path, file: int, start: int, target: torch.Tensor) -> None:
        """Fills ``target`` (uint8 [at most CHUNK_BYTES]) from byte ``start`` on. It is full once
        the stream has come to it."""
        with torch.cuda.stream(self._stream):  # does nothing for None
            buffer, copied = self._next_buffer()
            if copied is not None:
                copied.synchronize()
            array: Any = buffer.numpy()
            view, done = memoryview(array)[: len(target)], 0
            while done < len(view):
                num_read = os.preadv(file, [view[done:]], start + done)
                if num_read == 0:
                    raise ValueError(f"{path} cannot be read: it has become shorter")
                done += num_read
            target.copy_(buffer[: len(target)], non_blocking=True)
            if copied is not None:
                copied.record()

    def _next_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """This thread's two buffers in turn: one is filled while the other is copied."""
        own = self._own
        if not hasattr(own, "buffers"):
            own.buffers = deque(
                (
                    torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu),
                    torch.cuda.Event() if self._on_gpu else None,
                )
                for _ in range(2)
            )
        own.buffers.rotate()
        return own.buffers[0]
