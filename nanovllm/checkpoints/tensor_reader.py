"""Reads tensors from safetensors files to a GPU, in several threads."""

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

NUM_THREADS = 8  # a single thread copies a few GB/s from the page cache, or waits for the disk
CHUNK_BYTES = 8 << 20
AHEAD_BYTES = 512 << 20  # limit for tensors that are read ahead


def read_tensors(
    paths: list[Path], device: torch.device, num_threads: int = NUM_THREADS
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and tensors of safetensors files, file by file, in the order of their data.

    Copies to a GPU run on the stream that is current when the iteration begins, so work that is
    launched on that stream afterwards sees complete tensors. Up to AHEAD_BYTES of tensors are read
    ahead, in the device's memory.

    Args:
        paths: the files.
        device: the tensors' device.
        num_threads: threads that read, each with its own pinned memory.

    Raises:
        ValueError: a file is damaged, or has an unsupported dtype.
    """
    chunks = _ChunkReader(device)
    pending: deque[tuple[str, torch.Tensor, list[Future[None]]]] = deque()
    num_bytes = 0
    with ExitStack() as files, ThreadPoolExecutor(num_threads) as executor:
        for path in paths:
            with as_value_error(f"{path} cannot be read:"):
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


def _read_layout(path: Path) -> list[tuple[str, torch.dtype, torch.Size, int]]:
    """Returns the name, dtype, shape and start (in bytes) of each tensor, in the file's order."""
    layout = []
    # safe_open checks sizes, bounds and gaps in the header, but does not tell where tensors start.
    with safe_open(path, framework="pt") as tensors, path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
        for name in tensors.keys():  # noqa: SIM118 (not a dict)
            view = tensors.get_tensor(name)  # maps the file into memory without reading it
            start = 8 + size + header[name]["data_offsets"][0]
            layout.append((name, view.dtype, view.shape, start))
    return sorted(layout, key=lambda entry: entry[-1])


class _ChunkReader:
    """Reads parts of files to a device. Any number of threads may use it.

    The copies run on the stream that is current when this object is created, in order with the
    other work on that stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self._on_gpu else None
        self._local = threading.local()

    @torch.inference_mode()
    def read(self, path: Path, file: int, start: int, target: torch.Tensor) -> None:
        """Fills ``target`` (uint8 [at most CHUNK_BYTES]) with a file's bytes from ``start`` on,
        asynchronously on the stream."""
        with torch.cuda.stream(self._stream):  # no effect for None
            buffer, copied = self._next_buffer()
            if copied is not None:
                copied.synchronize()
            array: Any = buffer.numpy()
            view, done = memoryview(array)[: len(target)], 0
            while done < len(view):
                num_read = os.preadv(file, [view[done:]], start + done)
                if num_read == 0:
                    raise ValueError(f"{path} cannot be read: it was truncated meanwhile")
                done += num_read
            target.copy_(buffer[: len(target)], non_blocking=True)
            if copied is not None:
                copied.record()

    def _next_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Returns one of this thread's two buffers, in turn: one is filled while the other is
        copied. The event is recorded after its copy; None on a CPU."""
        local = self._local
        if not hasattr(local, "buffers"):
            local.buffers = deque(
                (
                    torch.empty(
                        CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._on_gpu
                    ),
                    torch.cuda.Event() if self._on_gpu else None,
                )
                for _ in range(2)
            )
        local.buffers.rotate()
        return local.buffers[0]
