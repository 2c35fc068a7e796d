"""From a checkpoint to a ModelRunner that can step: device, ranks, weights, warm-up, the KV cache's
size, CUDA graphs."""

import traceback
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from time import perf_counter

import torch

from nanovllm.checkpoints.checkpoint import Checkpoint, open_checkpoint
from nanovllm.checkpoints.weights import load_model
from nanovllm.config import Config
from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.engine.completion import Completion
from nanovllm.engine.cuda_graphs import StepGraphs, decode_sizes, graph_bytes, prefill_sizes
from nanovllm.engine.device import select_device, select_dtype
from nanovllm.engine.kv_cache import (
    CPU_CACHE_BYTES,
    block_bytes,
    num_blocks_on_cpu,
    num_blocks_on_gpu,
)
from nanovllm.engine.model_inputs import GraphSize
from nanovllm.engine.model_runner import ModelRunner, on_device
from nanovllm.engine.sampling_state import SamplingState
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.workers import Worker, Workers
from nanovllm.kernels.attention.backend import select_attention_backend
from nanovllm.kernels.attention.block_tables import BlockTables
from nanovllm.kernels.comm.all_reduce import make_one_shots
from nanovllm.kernels.gemm.cublas import small_cublas_workspace
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.sampler import Sampler
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.compile_ahead import compiling_only
from nanovllm.utils.distributed import make_tp_group, use_tp_group
from nanovllm.utils.math import cdiv, heads_per_rank
from nanovllm.utils.triton_compat import HAS_TRITON

# The CUDA context and libraries take up to this much that PyTorch does not count (H200, CUDA 13).
CONTEXT_BYTES = 600 << 20


def start_ranks(config: Config, checkpoint: Checkpoint, max_model_len: int) -> ModelRunner:
    """Rank 0's runner, with workers behind it if there are several ranks.

    Raises:
        WorkerError: a worker could not start. None is left then.
    """
    if config.tensor_parallel_size == 1:
        return start_runner(config, checkpoint, max_model_len)
    select_device(config.device, 0, config.tensor_parallel_size)  # before any process starts
    workers = Workers(config.tensor_parallel_size, run_worker, config, max_model_len)
    try:
        return start_runner(config, checkpoint, max_model_len, workers)
    except BaseException:
        workers.close()
        raise


def run_worker(worker: Worker, config: Config, max_model_len: int) -> None:
    """What a worker process does."""
    torch.set_num_threads(worker.num_threads)
    checkpoint = open_checkpoint(config.model)
    start_runner(config, checkpoint, max_model_len, worker=worker).loop()


def start_runner(
    config: Config,
    checkpoint: Checkpoint,
    max_model_len: int,
    workers: Workers | None = None,
    worker: Worker | None = None,
) -> ModelRunner:
    """One rank's runner: rank 0's with ``workers`` if there are any, or a ``worker``'s.

    Raises:
        ValueError: the device or the attention backend is not there, or the KV cache does not fit.
        WorkerError: another rank has failed.
        Exception: any other, of loading and capturing. Of all of them, the memory that start-up had
            taken is free again, whoever keeps the exception.
    """
    rank = worker.rank if worker else 0
    device = select_device(config.device, rank, config.tensor_parallel_size)
    runner = ModelRunner(config, checkpoint.config, max_model_len, device, workers, worker)
    try:
        _start(runner, checkpoint, Timer(runner))
    except BaseException as error:
        try:
            if workers is not None:
                workers.fail(error)
        finally:
            if worker is None:  # a worker's process ends
                _abandon(runner, error)
        raise
    return runner


class Timer:
    """Records in ``startup_seconds`` how long each part of start-up took."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._last = perf_counter()

    def __call__(self, part: str) -> None:
        """The part since the last one has ended, once the GPU has finished it."""
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
        now = perf_counter()
        self._runner.startup_seconds[part] = round(now - self._last, 3)
        self._last = now


@on_device
def _start(runner: ModelRunner, checkpoint: Checkpoint, timed: Timer) -> None:
    config, model_config, device = runner.config, runner.model_config, runner.device
    runner.dtype = select_dtype(config.dtype, device, model_config.dtype)
    bytes_before = _allocated_bytes(device)
    timed("device")
    size = config.tensor_parallel_size
    runner.backend = select_attention_backend(
        config.attention_backend,
        num_heads=model_config.num_attention_heads // size,
        num_kv_heads=heads_per_rank(model_config.num_key_value_heads, size),
        head_dim=model_config.head_dim,
        block_size=config.kvcache_block_size,
        dtype=runner.dtype,
        device=device,
    )
    timed("attention backend")
    barrier(runner)  # workers import, and try out their backends, while rank 0 does
    join_tp_group(runner)
    timed("ranks")
    limit_model_len(runner, _most_blocks(runner))  # before the rotary embedding's cache is as long
    runner.model = build_model(runner)
    for layer in _attention_layers(runner):
        layer.backend = runner.backend
    runner.sampler = Sampler(runner.model.lm_head)
    runner.sampled_tokens = torch.zeros(max_num_seqs(config), dtype=torch.int64, device=device)
    runner.graphs = make_graphs(runner)
    timed("model without weights")
    load_weights(runner, checkpoint)
    barrier(runner)
    timed("weights")
    compile_kernels(runner)  # for packed weights: not while they are loaded
    timed("kernels")
    num_blocks = runner.tp.min(measure_kv_cache(runner, bytes_before, timed), device)
    limit_model_len(runner, num_blocks)
    allocate_kv_cache(runner, num_blocks)
    timed("KV cache")
    if uses_graphs(runner):
        capture_cudagraph(runner, graph_sizes(runner))
    barrier(runner)
    timed("CUDA graphs")


def barrier(runner: ModelRunner) -> None:
    """Rank 0 goes on once all workers have come as far, and hears at once of one that has failed;
    collectives, which would wait for it, start only then."""
    if runner.workers is not None:
        runner.workers.wait_ready()
    if runner.worker is not None:
        runner.worker.report_ready()


def join_tp_group(runner: ModelRunner) -> None:
    """Connects the ranks, if there are several."""
    link = runner.workers or runner.worker
    if link is None:
        return
    if runner.workers is not None:

        def abort() -> None:
            runner.tp.abort()  # the group of the day

        runner.workers.on_failure(abort)
    config, device, rank = runner.config, runner.device, runner.worker.rank if runner.worker else 0
    size = config.tensor_parallel_size
    with link.open_store() as store:
        runner.tp = make_tp_group(rank, size, store, device)
        runner.tp.min(0, device)  # the first collective, in which NCCL uses the store
        if device.type == "cuda":
            devices = [select_device(config.device, rank, size) for rank in range(size)]
            one_shots = make_one_shots(runner.tp, store, runner.dtype, devices)
            runner.tp = replace(runner.tp, one_shots=one_shots)


def build_model(runner: ModelRunner) -> DecoderForCausalLM:
    """The model on this rank's device in its dtype, without weights."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(runner.dtype)
    try:
        with torch.device(runner.device), use_tp_group(runner.tp):
            return DecoderForCausalLM(runner.model_config, runner.max_model_len).eval()
    finally:
        torch.set_default_dtype(default_dtype)


@torch.inference_mode()
def load_weights(runner: ModelRunner, checkpoint: Checkpoint) -> None:
    if runner.config.load_format == "dummy":
        fill_with_dummy_weights(runner.model, runner.config.seed)
    else:
        load_model(runner.model, checkpoint.tensors(runner.device), runner.worker is None)
    for module in runner.model.modules():
        if isinstance(module, (LinearBase, ParallelLMHead)):
            module.pack()


def fill_with_dummy_weights(model: torch.nn.Module, seed: int) -> None:
    """Norm weights stay 1, biases become 0, matrices are sampled from N(0, 0.02)."""
    params = dict(model.named_parameters())
    generator = torch.Generator(next(iter(params.values())).device).manual_seed(seed)
    for name, param in params.items():
        if param.dim() > 1:
            param.normal_(0, 0.02, generator=generator)
        elif name.endswith("bias"):
            param.zero_()


@torch.inference_mode()
def compile_kernels(runner: ModelRunner) -> None:
    """Compiles the kernels that steps launch, several at once, instead of each at its first launch.
    They differ among small batches, and little among large decodes."""
    if runner.device.type == "cpu" or not HAS_TRITON:
        return
    allocate_kv_cache(runner, 1)
    sizes = graph_sizes(runner) if runner.backend.capturable else []
    decodes = [size for size in sizes if not size.is_prefill and size.num_tokens % 64 == 0]
    few = [size for size in sizes if size.num_tokens <= 64]
    with compiling_only(), runner.model.model.few_layers():
        warmup_model(runner)
        for _, step in make_graphs(runner).make_steps([*{*few, *decodes, *sizes[-1:]}]):
            step()


@torch.inference_mode()
def warmup_model(runner: ModelRunner) -> None:
    """Runs prefills of as many tokens as a step takes, of the most sequences and of the fewest, for
    which a backend may have another kernel. All sequences sample, and share one block."""
    num_tokens, most = runner.config.max_num_batched_tokens, max_num_seqs(runner.config)
    completion = Completion(SamplingState(SamplingParams(), 0, [], runner.model_config.vocab_size))
    for num_seqs in {most, min(most, cdiv(num_tokens, runner.max_model_len))}:
        items = []
        for i in range(num_seqs):
            length = num_tokens // num_seqs + (i < num_tokens % num_seqs)
            seq = Sequence([0] * min(length, runner.max_model_len))
            seq.completion = completion
            seq.block_table = [0] * cdiv(len(seq), runner.config.kvcache_block_size)
            seq.table_row = i
            items.append(ScheduledSequence(seq, 0, len(seq), samples=True))
        runner.run_step(None, runner.prepare(Batch(tuple(items), is_prefill=True), None))


def measure_kv_cache(runner: ModelRunner, bytes_before: int, timed: Timer) -> int:
    """Returns how many KV blocks to have.

    Args:
        bytes_before: what PyTorch held of the GPU before this runner.
    """
    config, device, num_bytes = runner.config, runner.device, _block_bytes(runner)
    block_size = config.kvcache_block_size
    if device.type == "cpu":
        if config.num_kvcache_blocks != -1:
            return config.num_kvcache_blocks
        return num_blocks_on_cpu(num_bytes, block_size, config.max_num_seqs, runner.max_model_len)
    allocate_kv_cache(runner, 1)
    torch.cuda.reset_peak_memory_stats(device)
    warmup_model(runner)
    peak = torch.cuda.max_memory_allocated(device) - bytes_before
    timed("warm-up")
    bytes_of_graphs = measure_graphs(runner) if uses_graphs(runner) else 0
    timed("memory of CUDA graphs")
    if config.num_kvcache_blocks != -1:
        return config.num_kvcache_blocks
    own = _allocated_bytes(device) - bytes_before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return num_blocks_on_gpu(
        total_bytes=total,
        free_bytes=free,
        own_bytes=own + CONTEXT_BYTES,
        peak_bytes=peak + CONTEXT_BYTES,
        graph_bytes=bytes_of_graphs,
        utilization=config.gpu_memory_utilization,
        bytes_per_block=num_bytes,
        block_size=block_size,
        max_model_len=runner.max_model_len,
        may_shorten=config.max_model_len is None,
    )


def limit_model_len(runner: ModelRunner, num_blocks: int) -> None:
    """Limits sequences to what so many blocks hold, unless the limit is the user's."""
    if runner.config.max_model_len is None:
        num_tokens = num_blocks * runner.config.kvcache_block_size
        runner.max_model_len = min(runner.max_model_len, num_tokens)


def allocate_kv_cache(runner: ModelRunner, num_blocks: int) -> None:
    """Allocates ``kv_cache``, and gives each attention layer its view of it."""
    layers = _attention_layers(runner)
    blocks = (len(layers), num_blocks, runner.config.kvcache_block_size)
    shape = (2, *blocks, layers[0].num_kv_heads, layers[0].head_dim)
    # Not zeroed: no slot is read before it is written, and a CPU's pages stay unused till then.
    try:
        runner.kv_cache = torch.empty(shape, dtype=runner.dtype, device=runner.device)
    except RuntimeError as error:
        raise ValueError(
            f"a KV cache of {num_blocks} blocks does not fit into memory ({error}): lower "
            f"num_kvcache_blocks"
        ) from error
    runner.num_kvcache_blocks = num_blocks
    width = cdiv(runner.max_model_len, runner.config.kvcache_block_size)
    runner.block_tables = BlockTables(1, max_num_seqs(runner.config), width, runner.device)
    for layer, k_cache, v_cache in zip(layers, *runner.kv_cache, strict=True):
        layer.k_cache, layer.v_cache = k_cache, v_cache


def uses_graphs(runner: ModelRunner) -> bool:
    on_gpu = runner.device.type == "cuda"
    return on_gpu and runner.backend.capturable and not runner.config.enforce_eager


def graph_sizes(runner: ModelRunner) -> list[GraphSize]:
    """Steps to capture, ascending within prefills, then within decodes."""
    max_seqs = max_num_seqs(runner.config)
    max_tokens = min(runner.config.max_num_batched_tokens, max_seqs * runner.max_model_len)
    num_params = sum(p.numel() for p in runner.model.model.layers.parameters())
    return prefill_sizes(max_tokens, max_seqs, num_params) + decode_sizes(max_seqs)


def make_graphs(runner: ModelRunner) -> StepGraphs:
    """No graph yet, but what captures them."""
    return StepGraphs(
        lambda inputs: runner.run_model(inputs)[1],
        runner.prepare,
        runner.device,
        cdiv(runner.max_model_len, runner.config.kvcache_block_size),
        runner.model.model.few_layers,
    )


@torch.inference_mode()
def capture_cudagraph(runner: ModelRunner, sizes: list[GraphSize]) -> None:
    with small_cublas_workspace():
        runner.graphs = make_graphs(runner)
        runner.graphs.capture(sizes)


def measure_graphs(runner: ModelRunner) -> int:
    """Returns a bound on the memory of all graphs, of prefills and of decodes: captures the two
    largest of each on a cache of one block."""
    num_bytes = 0
    with small_cublas_workspace():  # for all of it: the other one's memory would count as well
        for is_prefill in (True, False):
            sizes = [size for size in graph_sizes(runner) if size.is_prefill == is_prefill]
            free = [_free_bytes(runner.device)]
            for size in sizes[-2:][::-1]:
                with torch.inference_mode():
                    runner.graphs.capture([size])
                free.append(_free_bytes(runner.device))
            added = [before - after for before, after in pairwise(free)]
            num_bytes += graph_bytes(added, len(sizes))
    runner.graphs = make_graphs(runner)
    return num_bytes


def max_num_seqs(config: Config) -> int:
    """Most sequences that the scheduler puts into one step."""
    return min(config.max_num_seqs, config.max_num_batched_tokens)


def _attention_layers(runner: ModelRunner) -> list[Attention]:
    return [module for module in runner.model.modules() if isinstance(module, Attention)]


def _most_blocks(runner: ModelRunner) -> int:
    """No KV cache that is measured has more blocks than these."""
    config, num_bytes = runner.config, CPU_CACHE_BYTES
    if config.num_kvcache_blocks != -1:
        return config.num_kvcache_blocks
    if runner.device.type == "cuda":
        total_bytes = torch.cuda.mem_get_info(runner.device)[1]
        num_bytes = int(total_bytes * config.gpu_memory_utilization)
    return max(1, num_bytes // _block_bytes(runner))


def _block_bytes(runner: ModelRunner) -> int:
    block_size, itemsize = runner.config.kvcache_block_size, runner.dtype.itemsize
    return block_bytes(runner.model_config, block_size, runner.tp.size, itemsize)


def _allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _abandon(runner: ModelRunner, error: BaseException) -> None:
    """Frees what a start that failed has made. The frames in its traceback would keep that for as
    long as somebody keeps the exception, as notebooks do."""
    runner.tp.abort()  # no kernel waits for a peer any longer
    chain = [error]
    for cause in chain:
        traceback.clear_frames(cause.__traceback__)
        causes = (cause.__cause__, cause.__context__)
        chain += [other for other in causes if other is not None and other not in chain]
    with suppress(RuntimeError):  # a GPU that has failed fails again
        runner.exit()
