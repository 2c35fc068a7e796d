"""The layout of the KV cache, and its allocation: which layers share block tables, how many blocks
a sequence holds, and how long it can be."""

from bisect import bisect_right
from functools import partial
from itertools import repeat
from math import prod

import torch

from nanovllm.config import MAX_INT32
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.kernels.attention.block_tables import BlockTables
from nanovllm.kernels.attention.kv_cache import SCALE_BYTES, KVCache, vector_bytes
from nanovllm.kernels.fp8 import FP8
from nanovllm.layers.attention import Attention
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.utils.cuda_vmm import ALIGNMENT, empty_in_arena
from nanovllm.utils.math import cdiv, heads_per_rank


def token_bytes(runner: ModelRunner) -> int:
    """Returns the bytes of a token's keys and values in one layer on one rank."""
    config, model = runner.config, runner.model_config
    kv_heads = heads_per_rank(model.num_key_value_heads, config.tensor_parallel_size)
    return 2 * kv_heads * vector_bytes(model.head_dim, runner.dtype.itemsize, config.quantizes_kv)


def attention_layers(model: DecoderForCausalLM) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def uses_arenas(runner: ModelRunner) -> bool:
    """Whether weights and KV cache can be given back to the driver and get the same addresses
    again. On a CPU this needs no arenas."""
    return runner.config.enable_sleep_mode and runner.device.type == "cuda"


def group_layers(windows: list[int | None]) -> dict[tuple[int, ...], int | None]:
    """Divides layers into groups that share block tables. All layers of a group have the same
    window.

    Args:
        windows: the window of each layer; None for a layer that attends to all tokens.

    Returns:
        The window of each group, by the indices of its layers. A block has space for the layers of
        the largest group, so a smaller group wastes memory. Many small groups waste less, but the
        block tables of each group cost time on the host. The cost that is minimised is the wasted
        fraction of the memory of layers with the same window, plus 2% for each group.
    """
    by_window: dict[int | None, list[int]] = {window: [] for window in windows}
    for layer, window in enumerate(windows):
        by_window[window].append(layer)
    counts = [len(layers) for layers in by_window.values()]

    def cost(size: int) -> float:
        return sum(-count % size / count + 0.02 * cdiv(count, size) for count in counts)

    size = min(range(1, max(counts) + 1), key=cost)
    return {
        tuple(layers[start : start + size]): window
        for window, layers in by_window.items()
        for start in range(0, len(layers), size)
    }


def most_blocks(runner: ModelRunner, num_tokens: int) -> int:
    """Returns the most blocks that a sequence with up to ``num_tokens`` tokens holds at a time."""
    config = runner.config
    block_size, max_chunk = config.block_size, config.max_num_batched_tokens
    manager = BlockManager(0, block_size, False, runner.windows, max_chunk)
    num_blocks, chunk = cdiv(num_tokens, block_size), manager.num_chunk_blocks
    return sum(min(num_blocks, window + chunk) for window in manager.window_blocks)


def longest_sequence(runner: ModelRunner, num_blocks: int) -> int:
    """Returns the length of the longest sequence that ``num_blocks`` blocks hold.

    Raises:
        ValueError: they hold no token, because there are fewer blocks than groups of layers.
    """
    block_size = runner.config.block_size
    lengths = range(block_size, MAX_INT32 + 1, block_size)
    num_fitting = bisect_right(lengths, num_blocks, key=partial(most_blocks, runner))
    if not num_fitting:
        raise ValueError(
            f"{num_blocks} KV blocks hold no token, because each of the model's "
            f"{len(runner.windows)} groups of layers needs one: raise num_kvcache_blocks or "
            f"gpu_memory_utilization"
        )
    return num_fitting * block_size


def limit_model_len(runner: ModelRunner, num_blocks: int) -> None:
    """Lowers ``max_model_len`` to what ``num_blocks`` hold, unless the user has set it."""
    num_tokens = longest_sequence(runner, num_blocks)
    if runner.config.max_model_len is None:
        runner.max_model_len = min(runner.max_model_len, num_tokens)


def allocate_kv_cache(runner: ModelRunner, num_blocks: int) -> None:
    """Allocates the KV cache, and gives each attention layer its view of it."""
    layers, groups = attention_layers(runner.model), runner.kv_groups
    num_layers, block_size = max(map(len, groups)), runner.config.block_size
    kv_heads, is_quantized = layers[0].num_kv_heads, runner.config.quantizes_kv
    shape = (2, num_layers, num_blocks, block_size, kv_heads, layers[0].head_dim)
    scales_shape = (num_layers, num_blocks, 2, kv_heads, block_size)
    empty = empty_in_arena if uses_arenas(runner) else torch.empty
    # Not zeroed, because no slot is read before it is written. On a CPU, the operating system thus
    # allocates pages only when they are first used.
    try:
        if is_quantized:  # in one piece of memory, so that LLM.sleep frees both
            num_scales = prod(scales_shape)
            # Aligned, because Triton compiles another kernel for each alignment.
            first = cdiv(SCALE_BYTES * num_scales, ALIGNMENT) * ALIGNMENT
            memory = empty((first + prod(shape),), dtype=torch.uint8, device=runner.device)
            runner.kv_scales = memory[:first].view(torch.float32)[:num_scales].view(scales_shape)
            runner.kv_cache = memory[first:].view(FP8).view(shape)
        else:
            runner.kv_cache = empty(shape, dtype=runner.dtype, device=runner.device)
            runner.kv_scales = None
    except RuntimeError as error:
        is_set = runner.config.num_kvcache_blocks != -1
        advice = "num_kvcache_blocks" if is_set else "gpu_memory_utilization, or end other programs"
        raise ValueError(
            f"a KV cache of {num_blocks} blocks does not fit into memory ({error}): lower {advice}"
        ) from error
    runner.num_kvcache_blocks = num_blocks
    num_rows = runner.max_num_seqs
    width = cdiv(runner.max_model_len, block_size)
    runner.block_tables = BlockTables(len(groups), num_rows, width, runner.device)
    for group, indices in enumerate(groups):
        # A group may have fewer layers than the KV cache has space for.
        scales = repeat(None) if runner.kv_scales is None else runner.kv_scales
        for index, k, v, scale in zip(indices, *runner.kv_cache, scales, strict=False):
            layers[index].kv_cache, layers[index].kv_group = KVCache(k, v, scale), group
