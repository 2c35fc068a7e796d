"""Computes how many sequences a GPU runs at a time, and how many KV blocks fit into memory."""

import torch

from nanovllm.config import DEFAULT_NUM_SEQS, MAX_INT32, Config
from nanovllm.engine.kv_layout import allocate_kv_cache, most_blocks, token_bytes
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.utils.memory import allocated_bytes, available_bytes
from nanovllm.utils.timer import Timer

CPU_CACHE_BYTES = 4 << 30
MAX_DEFAULT_NUM_SEQS = 2048
MAX_LOGITS_FRACTION = 1 / 32  # of the memory that is left, for fp32 logits of the largest decode
# CUDA graphs keep the logits of the largest decode, also while the engine is asleep.
MAX_LOGITS_ASLEEP = 640 << 20  # bytes
# Upper bound on the memory of the CUDA context and libraries, which PyTorch's statistics leave out
# (H200, CUDA 13).
CONTEXT_BYTES = 600 << 20


def max_num_blocks(runner: ModelRunner) -> int:
    """Returns an upper bound on what ``measure_kv_cache`` returns if the user sets no number."""
    num_bytes = CPU_CACHE_BYTES
    if runner.device.type == "cuda":
        total_bytes = torch.cuda.mem_get_info(runner.device)[1]
        num_bytes = int(total_bytes * runner.config.gpu_memory_utilization)
    return max(1, num_bytes // block_bytes(runner))


def choose_num_seqs(runner: ModelRunner, weight_bytes: int) -> int:
    """Returns the maximum number of sequences in a step on a GPU, if the user sets no number:
    between 512 and 2,048, but at most max_num_batched_tokens.

    Above 512, it is limited by the KV cache, whose size is estimated: each sequence takes at least
    one block in each group of layers, and the scheduler keeps one more free for it. It is also
    limited by the memory of the logits, more so with ``enable_sleep_mode``.
    """
    config, model = runner.config, runner.model_config
    total_bytes = torch.cuda.mem_get_info(runner.device)[1]
    left = int(total_bytes * config.gpu_memory_utilization) - weight_bytes - CONTEXT_BYTES
    num_blocks = config.num_kvcache_blocks
    if num_blocks == -1:
        num_blocks = left // block_bytes(runner)
    most_in_cache = num_blocks // (2 * len(runner.windows))
    num_logits = model.vocab_size // runner.tp.size  # of a sequence, on this rank
    most = min(
        MAX_DEFAULT_NUM_SEQS, most_in_cache, int(left * MAX_LOGITS_FRACTION) // (4 * num_logits)
    )
    if config.enable_sleep_mode:
        itemsize = 4 if config.batch_invariant else runner.dtype.itemsize
        most = min(most, MAX_LOGITS_ASLEEP // (itemsize * num_logits))
    return min(max(DEFAULT_NUM_SEQS, most), config.max_num_batched_tokens)


def block_bytes(runner: ModelRunner) -> int:
    """Returns the bytes of one block on one rank: keys and values of one group of layers."""
    num_layers = max(map(len, runner.kv_groups))
    return num_layers * runner.config.block_size * token_bytes(runner)


def measure_kv_cache(runner: ModelRunner, bytes_before: int, timed: Timer) -> int:
    """Returns the number of KV blocks to allocate. On a GPU, runs the largest steps to measure the
    memory that they need.

    Args:
        bytes_before: GPU memory that tensors took before this runner was started.
    """
    config, device = runner.config, runner.device
    if device.type == "cpu":
        return num_blocks_on_cpu(
            config, block_bytes(runner), most_blocks(runner, runner.max_model_len)
        )
    from nanovllm.engine.cuda_graphs import measure_graphs
    from nanovllm.engine.warmup import warmup_model

    allocate_kv_cache(runner, 1)
    torch.cuda.reset_peak_memory_stats(device)
    warmup_model(runner)
    peak = torch.cuda.max_memory_allocated(device)
    timed("warm-up")
    if config.num_kvcache_blocks != -1:
        return config.num_kvcache_blocks
    graph_bytes = measure_graphs(runner)
    timed("memory of CUDA graphs")
    held = torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return num_blocks_on_gpu(
        config,
        block_bytes(runner),
        runner.max_model_len,
        most_blocks(runner, runner.max_model_len),
        total_bytes=total,
        free_bytes=free,
        own_bytes=allocated_bytes(device) - bytes_before + CONTEXT_BYTES,
        activation_bytes=peak - held,
        graph_bytes=graph_bytes,
    )


def num_blocks_on_cpu(config: Config, bytes_per_block: int, blocks_per_seq: int) -> int:
    """Returns the number of blocks that ``max_num_seqs`` sequences can fill, limited to 4 GiB and
    half of the available memory. The system allocates pages only when they are first written."""
    wanted = config.max_step_seqs * blocks_per_seq
    return min(wanted, max(1, min(CPU_CACHE_BYTES, available_bytes() // 2) // bytes_per_block))


def num_blocks_on_gpu(
    config: Config,
    bytes_per_block: int,
    max_model_len: int,
    blocks_per_seq: int,
    *,
    total_bytes: int,
    free_bytes: int,
    own_bytes: int,
    activation_bytes: int,
    graph_bytes: int,
) -> int:
    """Returns how many blocks fit within ``gpu_memory_utilization`` of the GPU's memory.

    The budget covers only this engine's memory. Memory of other processes does not reduce the
    budget, but limits the free memory. If the user has not set ``max_model_len``, one block is
    enough: start-up lowers ``max_model_len`` to what fits.

    Args:
        blocks_per_seq: the most blocks that a sequence of ``max_model_len`` tokens holds.
        total_bytes: the GPU's memory.
        free_bytes: the GPU's free memory after the warm-up, with the warm-up's buffers released.
        own_bytes: memory that this engine holds after the warm-up, mainly weights.
        activation_bytes: peak memory during the warm-up, in addition to ``own_bytes``.
        graph_bytes: an upper bound on the memory of CUDA graphs.

    Raises:
        ValueError: not even one sequence fits, or one block. The message has the figures.
    """
    utilization = config.gpu_memory_utilization
    budget = int(total_bytes * utilization)
    left = min(budget - own_bytes, free_bytes) - activation_bytes - graph_bytes
    num_blocks = left // bytes_per_block

    def gib(num_bytes: int) -> str:
        return f"{num_bytes / 2**30:.2f} GiB"

    free = gib(max(0, left))
    if config.max_model_len is None:
        least, advice = 1, "Lower"
        needs = f"one block of the KV cache takes {gib(bytes_per_block)}, but {free} are left: "
    else:
        least, advice = blocks_per_seq, "Lower max_model_len or"
        needs = (
            f"the KV cache of one sequence of max_model_len={max_model_len} takes "
            f"{gib(least * bytes_per_block)}, but {free} are left: "
        )
    if num_blocks < least:
        raise ValueError(
            f"{needs}the budget is "
            f"{gib(total_bytes)} x {utilization} = {gib(budget)} ({gib(free_bytes)} free), weights "
            f"and context take {gib(own_bytes)}, activations {gib(activation_bytes)}, CUDA graphs "
            f"{gib(graph_bytes)}. {advice} max_num_batched_tokens, or raise gpu_memory_utilization"
        )
    return min(num_blocks, MAX_INT32 // config.block_size)
