"""How many KV blocks fit."""

from nanovllm.engine.memory import available_bytes
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.math import cdiv, heads_per_rank

CPU_CACHE_BYTES = 4 << 30


def block_bytes(config: ModelConfig, block_size: int, tp_size: int, itemsize: int) -> int:
    """Memory of one block on one rank: keys and values of ``block_size`` tokens, all layers."""
    kv_heads = heads_per_rank(config.num_key_value_heads, tp_size)
    return 2 * config.num_hidden_layers * block_size * kv_heads * config.head_dim * itemsize


def num_blocks_on_cpu(
    bytes_per_block: int, block_size: int, max_num_seqs: int, max_model_len: int
) -> int:
    """As many blocks as every resident sequence could fill, within 4 GiB and half of the available
    memory. Pages are only taken from the system when they are first written."""
    wanted = max_num_seqs * cdiv(max_model_len, block_size)
    return min(wanted, max(1, min(CPU_CACHE_BYTES, available_bytes() // 2) // bytes_per_block))


def num_blocks_on_gpu(
    *,
    total_bytes: int,
    free_bytes: int,
    own_bytes: int,
    peak_bytes: int,
    graph_bytes: int,
    utilization: float,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    may_shorten: bool,
) -> int:
    """Blocks that fit beside everything else within ``utilization`` of the GPU.

    Other processes are not charged against the budget, but what they hold cannot be had either.

    Args:
        total_bytes, free_bytes: of the GPU; free after the warm-up, its buffers returned.
        own_bytes: what this engine holds then, weights above all.
        peak_bytes: what it held at most in the warm-up; the difference is the activations.
        graph_bytes: what CUDA graphs will take.
        may_shorten: whether sequences may be shorter than ``max_model_len``, down to a block.

    Raises:
        ValueError: not even one sequence fits; the message gives figures.
    """
    activations = peak_bytes - own_bytes
    budget = int(total_bytes * utilization)
    left = min(budget - own_bytes, free_bytes) - activations - graph_bytes
    num_blocks = left // bytes_per_block
    needed = cdiv(max_model_len, block_size)
    if num_blocks < (1 if may_shorten else needed):

        def gib(num_bytes: int) -> str:
            return f"{num_bytes / 2**30:.2f} GiB"

        raise ValueError(
            f"the KV cache of one sequence of max_model_len={max_model_len} takes "
            f"{gib(needed * bytes_per_block)}, but {gib(max(0, left))} are left: of "
            f"{gib(total_bytes)} x {utilization} = {gib(budget)} ({gib(free_bytes)} free), "
            f"weights and context take {gib(own_bytes)}, activations {gib(activations)}, CUDA "
            f"graphs {gib(graph_bytes)}. Lower max_model_len or max_num_batched_tokens, or raise "
            f"gpu_memory_utilization"
        )
    return num_blocks
