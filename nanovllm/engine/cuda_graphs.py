"""Steps captured as CUDA graphs: one launch goes from the last tokens to the next."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.model_inputs import ModelInputs, PackedInputs

MAX_DECODE_SEQS = 512
MAX_PREFILL_SEQS = 64
PREFILL_TOKENS = [16, 32, 64, 128, 192, 256, 384, 512]
PREFILL_TOKENS += [768, 1024, 1280, 1536, 2048, 2560, 3072, 4096]
# Tokens times parameters of a prefill that keeps a device busy for about as long as the host needs
# to launch its kernels, 20 ms. A larger one is only delayed by padding.
MAX_PREFILL_WORK = 6e12


class GraphSize(NamedTuple):
    """What a captured step holds: as many new tokens, of as many sequences, or fewer."""

    is_prefill: bool
    num_tokens: int
    num_seqs: int


def decode_sizes(max_num_seqs: int) -> list[GraphSize]:
    """Decodes to capture, ascending: dense where padding costs most; the last is the largest
    batch, up to 512."""
    largest = min(max_num_seqs, MAX_DECODE_SEQS)
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, MAX_DECODE_SEQS, 32)]
    sizes = [size for size in sizes if size < largest] + [largest]
    return [GraphSize(False, size, size) for size in sizes]


def prefill_sizes(max_num_tokens: int, max_num_seqs: int, num_params: int) -> list[GraphSize]:
    """Prefills to capture, ascending: those of few tokens, up to 64 sequences. ``num_params`` are
    those of this rank's layers."""
    most_tokens = min(max_num_tokens, MAX_PREFILL_WORK // num_params)
    most_seqs = min(max_num_seqs, MAX_PREFILL_SEQS)
    sizes = [size for size in PREFILL_TOKENS if size <= most_tokens]
    return [GraphSize(True, size, min(size, most_seqs)) for size in sizes]


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step: what shapes its inputs have, the device buffer that it reads them from, and
    its logits."""

    graph: torch.cuda.CUDAGraph
    shapes: dict[str, tuple[int, ...]]
    buffer: torch.Tensor
    logits: torch.Tensor


class StepGraphs:
    """Graphs of ``forward`` for steps of fixed sizes, in one memory pool.

    Args:
        forward: ModelInputs -> logits, of this rank; must not read back from the device.
        prepare: inputs of a batch, padded to a size.
    """

    def __init__(
        self,
        forward: Callable[[ModelInputs], torch.Tensor],
        prepare: Callable[[Batch, GraphSize], PackedInputs],
        device: torch.device,
    ) -> None:
        self.forward = forward
        self.prepare = prepare
        self.device = device
        self.pool: Any = None
        self.graphs: dict[GraphSize, StepGraph] = {}

    def capture(self, sizes: list[GraphSize]) -> None:
        """From the largest size down, so that the smaller ones reuse its activations' memory;
        each keeps logits of its own."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        for size in sorted(sizes, reverse=True):
            blank = self.prepare(Batch((), is_prefill=size.is_prefill), size)
            buffer = blank.buffer.to(self.device)
            inputs = blank.unpack(buffer)
            self.forward(inputs)  # compiles kernels and picks algorithms, outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                logits = self.forward(inputs)
            self.graphs[size] = StepGraph(graph, blank.shapes, buffer, logits)

    def size_for(self, batch: Batch) -> GraphSize | None:
        """The smallest captured size that holds the batch; None if it has to run eagerly."""
        num_seqs = len(batch)
        num_tokens = batch.num_tokens if batch.is_prefill else num_seqs
        if batch.is_prefill and any(item.seq.wants_prompt_logprobs for item in batch.items):
            return None  # needs what the model gives for every token
        fitting = (
            size
            for size in self.graphs
            if size.is_prefill == batch.is_prefill
            and size.num_tokens >= num_tokens
            and size.num_seqs >= num_seqs
        )
        return min(fitting, default=None)

    def replay(self, inputs: PackedInputs) -> torch.Tensor | None:
        """Logits of a step padded to a captured size; None for any other."""
        for step in self.graphs.values():
            if step.shapes == inputs.shapes:
                inputs.copy_to(step.buffer)
                step.graph.replay()
                return step.logits
        return None
