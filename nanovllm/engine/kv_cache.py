"""How many KV blocks fit into memory."""

from nanovllm.engine.memory import available_bytes
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.math import cdiv, heads_per_rank

CPU_CACHE_BYTES = 4 << 30


def block_bytes(config: ModelConfig, block_size: int, tp_size: int, itemsize: int) -> int:
    """Returns the bytes of one block on one rank: keys and values of ``block_size`` tokens in all
    layers."""
    kv_heads = heads_per_rank(config.num_key_value_heads, tp_size)
    return 2 * config.num_hidden_layers * block_size * kv_heads * config.head_dim * itemsize


def num_blocks_on_cpu(
    bytes_per_block: int, block_size: int, max_num_seqs: int, max_model_len: int
) -> int:
    """Returns as many blocks as all resident sequences could fill, within 4 GiB and half of the
    available memory. The system allocates pages only when they are first written."""
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
    """Returns how many blocks fit within ``utilization`` of the GPU's memory.

    Memory of other processes does not count against that budget, but it is not free either.

    Args:
        total_bytes, free_bytes: of the GPU; free after the warm-up, with its buffers released.
        own_bytes: what this engine holds then, mainly weights.
        peak_bytes: the most it held during the warm-up; the difference is the activations.
        graph_bytes: a bound on the memory of CUDA graphs.
        may_shorten: whether ``max_model_len`` may be lowered, down to one block.

    Raises:
        ValueError: not even one sequence fits. The message has the figures.
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
