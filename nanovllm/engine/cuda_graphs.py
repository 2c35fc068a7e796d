"""Decode steps captured as CUDA graphs: one launch goes from the last tokens to the next."""

from collections.abc import Callable
from typing import Any

import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.model_inputs import ModelInputs, PackedInputs

MAX_CAPTURED = 512


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending: dense where padding costs most; the last is the
    largest batch, up to 512."""
    largest = min(max_num_seqs, MAX_CAPTURED)
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, MAX_CAPTURED, 32)]
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """Graphs of ``forward`` for decode batches of fixed sizes, in one memory pool.

    Args:
        forward: ModelInputs -> logits, of this rank; must not read back from the device.
        prepare: inputs of a batch, padded to a size.
    """

    def __init__(
        self,
        forward: Callable[[ModelInputs], torch.Tensor],
        prepare: Callable[[Batch, int], PackedInputs],
        device: torch.device,
    ) -> None:
        self.forward = forward
        self.prepare = prepare
        self.device = device
        self.pool: Any = None
        # Size -> its graph, the device buffer that it reads its inputs from, its logits.
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}

    def capture(self, sizes: list[int]) -> None:
        """From the largest size down, so that the smaller ones reuse its activations' memory;
        each keeps logits of its own."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        for size in sorted(sizes, reverse=True):
            blank = self.prepare(Batch((), is_prefill=False), size)
            buffer = blank.buffer.to(self.device)
            inputs = blank.unpack(buffer)
            self.forward(inputs)  # compiles kernels and picks algorithms, outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                logits = self.forward(inputs)
            self.graphs[size] = graph, buffer, logits

    def padded_size(self, num_seqs: int) -> int | None:
        """The smallest captured size that holds the batch; None if it has to run eagerly."""
        return min((size for size in self.graphs if size >= num_seqs), default=None)

    def replay(self, inputs: PackedInputs) -> torch.Tensor:
        """Logits of a decode padded to a captured size."""
        graph, buffer, logits = self.graphs[inputs.batch_size]
        inputs.copy_to(buffer)
        graph.replay()
        return logits
