"""CUDA graphs of whole steps, from the input tokens to the sampled tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.model_inputs import GraphSize, PackedInputs
from nanovllm.engine.model_runner import CapturedSteps, ModelRunner
from nanovllm.kernels.attention.prefix_schedule import MIN_SEQS, NO_PREFIXES
from nanovllm.kernels.gemm.cublas import small_cublas_workspace
from nanovllm.models.decoder import DecoderModel

MAX_DECODE_SEQS = 2048
# Up to 64 tokens a prefill takes as long as reading the weights. Most prefills of a long job have
# almost max_num_batched_tokens, by default 16,384. Each size makes a start longer by 20 ms or more.
PREFILL_TOKENS = [64, 128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096]
PREFILL_TOKENS += [6144, 8192, 10240, 12288, 14336, 15872, 16384]
# In tokens x parameters. A prefill of this size runs for 25 to 30 ms, about as long as the host
# needs to launch its kernels. For a larger prefill a graph saves no time, and padding costs some.
MAX_PREFILL_WORK = 8e12
# Lower bound on the memory of a graph. A measurement may show less, because the driver allocates
# memory for several graphs at once.
GRAPH_BYTES = 8 << 20


def decode_sizes(max_num_seqs: int) -> list[GraphSize]:
    """Returns the sizes of the decodes to capture, ascending. The last one is the largest batch, up
    to 2,048 sequences.

    Neighbours are at most 16 apart up to 64, 32 up to 256, and a quarter of the size beyond.
    Padding costs less there: a padded row reads no keys and values, and a tile of a GEMM has 64
    rows or more.
    """
    largest = min(max_num_seqs, MAX_DECODE_SEQS)
    sizes = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(320, 513, 64)]
    sizes += [*range(640, 1025, 128), *range(1280, MAX_DECODE_SEQS, 256)]
    sizes = [size for size in sizes if size < largest] + [largest]
    return [GraphSize(False, size, size) for size in sizes]


def prefill_sizes(max_num_tokens: int, max_num_seqs: int, num_params: int) -> list[GraphSize]:
    """Returns the sizes of the prefills to capture, ascending: up to ``max_num_tokens``, fewer with
    a model of over 0.5 billion parameters. ``num_params`` counts the parameters of this rank's
    layers that compute a token.
    """
    limit = MAX_PREFILL_WORK // num_params
    sizes = {size for size in PREFILL_TOKENS if size <= min(max_num_tokens, limit)}
    if sizes and max_num_tokens <= limit:
        sizes.add(max_num_tokens)
    return [GraphSize(True, size, min(size, max_num_seqs)) for size in sorted(sizes)]


def graph_bytes(added: list[int], num_graphs: int) -> int:
    """Returns an upper bound on the memory of graphs in one pool, in bytes.

    Args:
        added: bytes that capturing the largest graph took, then the second largest.
        num_graphs: number of graphs to capture.
    """
    return sum(added[:1]) + max([GRAPH_BYTES, *added[1:]]) * max(num_graphs - 1, 0)


def uses_graphs(runner: ModelRunner) -> bool:
    return runner.backend.capturable and not runner.config.enforce_eager


def graph_sizes(runner: ModelRunner) -> list[GraphSize]:
    """Returns the sizes of the steps to capture: prefills, then decodes, each ascending.

    Decodes are also captured with shared prefixes. They need a graph of their own, because the
    kernel for prefixes would take time in other steps too. To start sooner, only the powers of two
    and the largest size are captured. Fewer than half of the rows are then padding.
    """
    max_seqs, config = runner.max_num_seqs, runner.config
    most_tokens, most_seqs = runner.backend.max_captured_prefill(config.quantizes_kv)
    most_tokens = min(most_tokens, config.max_num_batched_tokens, max_seqs * runner.max_model_len)
    # In a mixture of experts a token is computed with a share of the parameters.
    params = runner.model.model.layers.parameters()
    num_params = sum(int(p.numel() * getattr(p, "active_share", 1)) for p in params)
    decodes = decode_sizes(max_seqs)
    if runner.prefix_finder is not None:
        sizes = [size for size in decodes[:-1] if size.num_seqs.bit_count() == 1] + decodes[-1:]
        shared = [size._replace(shares_prefixes=True) for size in sizes]
        decodes = sorted(decodes + [size for size in shared if size.num_seqs >= MIN_SEQS])
    return prefill_sizes(most_tokens, min(max_seqs, most_seqs), num_params) + decodes


@torch.inference_mode()
def capture_cudagraph(runner: ModelRunner) -> None:
    """Captures the graphs of the runner's steps, if it uses CUDA graphs."""
    if uses_graphs(runner):
        with small_cublas_workspace():
            runner.graphs = graphs = StepGraphs(runner)
            graphs.capture(graph_sizes(runner))


@torch.inference_mode()
def measure_graphs(runner: ModelRunner) -> int:
    """Returns an upper bound on the memory of all graphs, in bytes. To measure it, captures the two
    largest prefills and the two largest decodes. The KV cache needs only one block for that."""
    if not uses_graphs(runner):
        return 0
    graphs, num_bytes = StepGraphs(runner), 0
    with small_cublas_workspace():  # else the default workspace would be measured too
        for is_prefill in (True, False):
            sizes = [size for size in graph_sizes(runner) if size.is_prefill == is_prefill]
            free = [_free_bytes(runner.device)]
            for size in sizes[-2:][::-1]:
                graphs.capture([size])
                free.append(_free_bytes(runner.device))
            added = [before - after for before, after in pairwise(free)]
            num_bytes += graph_bytes(added, len(sizes))
    return num_bytes


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step.

    Attributes:
        graph: its kernels.
        buffer: the device buffer that it reads its inputs from.
        logits: its result, until the next replay of any graph.
    """

    graph: torch.cuda.CUDAGraph
    buffer: torch.Tensor
    logits: torch.Tensor


@contextmanager
def skip_middle_layers(model: DecoderModel) -> Iterator[None]:
    """Makes steps in this context run only the first two layers, and the last one with each window
    and class of MLP. These launch all kernels that the model uses."""
    layers: list[Any] = [*model.layers]
    last = {(layer.self_attn.attn.params.window, type(layer.mlp)): layer for layer in layers}
    model.layers_run = [x for x in layers if x in layers[:2] or x in last.values()]
    try:
        yield
    finally:
        model.layers_run = layers


class StepGraphs(CapturedSteps):
    """Graphs of a runner's steps of fixed sizes, in one memory pool.

    Only one step runs at a time, so all graphs share one input buffer and the memory of activations
    and logits.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.buffer = torch.empty(0, dtype=torch.int32, device=runner.device)
        self.pool: Any = None
        self.graphs: dict[GraphSize, StepGraph] = {}

    def capture(self, sizes: list[GraphSize]) -> None:
        """Captures steps from the largest to the smallest, so that smaller steps reuse the memory
        of larger ones."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # once: torch.cuda.graph would do it for each capture
        for size, step in self.make_steps(sizes):
            with skip_middle_layers(self.runner.model.model):
                step()  # compiles kernels and chooses algorithms, which a capture cannot
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(capture_stream(self.runner.device)):
                graph.capture_begin(self.pool, capture_error_mode="thread_local")
                try:
                    logits = step()
                finally:
                    graph.capture_end()
            self.graphs[size] = StepGraph(graph, self.buffer, borrowed(logits))
            del logits

    def make_steps(
        self, sizes: list[GraphSize]
    ) -> Iterator[tuple[GraphSize, Callable[[], torch.Tensor]]]:
        """Yields each size, the largest first, with a step that reads its inputs from the buffer.
        When a step is yielded, the buffer holds its inputs, which are all padding."""
        num_groups, _, width = self.runner.block_tables.resident.shape
        packed_inputs = {
            size: self.runner.prepare(
                Batch.of(
                    (),
                    size.is_prefill,
                    num_groups=num_groups,
                    prefixes=NO_PREFIXES if size.shares_prefixes else None,
                ),
                size,
            )
            for size in sorted(sizes, reverse=True)
        }
        ends = [  # if all blocks of all sequences are new
            packed.tensors.start_of_last() + num_groups * size.num_seqs * width
            for size, packed in packed_inputs.items()
        ]
        num_words = max(ends, default=0)
        if num_words > len(self.buffer):
            self.buffer = torch.empty(num_words, dtype=torch.int32, device=self.runner.device)
        for size, packed in packed_inputs.items():
            packed.tensors.copy_to(self.buffer)
            yield size, self._make_step(packed)

    def _make_step(self, packed: PackedInputs) -> Callable[[], torch.Tensor]:
        inputs = packed.unpack(self.buffer)
        new_blocks = self.buffer[packed.tensors.start_of_last() :]  # their number varies
        inputs = replace(inputs, tables=inputs.tables._replace(new_blocks=new_blocks))
        return lambda: self.runner.run_model(inputs)[1]

    def size_for(self, batch: Batch) -> GraphSize | None:
        num_seqs = len(batch)
        num_tokens = batch.num_tokens if batch.is_prefill else num_seqs
        if batch.is_prefill and any(seq.wants_prompt_logprobs for seq in batch.seqs):
            return None  # needs the hidden states of every token
        fitting = (
            size
            for size in self.graphs
            if size.is_prefill == batch.is_prefill
            and size.shares_prefixes == (batch.prefixes is not None)
            and size.num_tokens >= num_tokens
            and size.num_seqs >= num_seqs
        )
        return min(fitting, default=None)

    def replay(self, inputs: PackedInputs) -> torch.Tensor:
        assert inputs.graph_size is not None
        step = self.graphs[inputs.graph_size]
        inputs.tensors.copy_to(step.buffer)
        step.graph.replay()
        return step.logits


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all captures on a GPU. The default stream of ``torch.cuda.graph`` would
    belong to the GPU of the process's first capture. With one stream per StepGraphs, every kernel
    would start 0.3 to 0.7 us later (H200, CUDA 13)."""
    return torch.cuda.Stream(device)


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that shares a contiguous CUDA tensor's memory without owning it. When the
    original is freed, other captures in its pool may reuse the memory."""
    assert tensor.is_contiguous()
    # As in PyTorch's CUDA graph trees. A tensor made through __cuda_array_interface__ would call
    # Python when it is freed, which crashes after the interpreter's end.
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, tensor.nbytes
    )
    same = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return same.set_(storage, 0, tensor.shape, tensor.stride())
