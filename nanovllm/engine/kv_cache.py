"""Sizes the paged KV cache."""

import os

from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.math import cdiv

CPU_CACHE_BYTES = 4 << 30


def block_bytes(config: ModelConfig, block_size: int, tp_size: int, itemsize: int) -> int:
    """Memory of one block on one rank: keys and values of ``block_size`` tokens, all layers."""
    kv_heads = config.num_key_value_heads // tp_size
    return 2 * config.num_hidden_layers * block_size * kv_heads * config.head_dim * itemsize


def num_blocks_on_cpu(
    bytes_per_block: int, block_size: int, max_num_seqs: int, max_model_len: int
) -> int:
    """As many blocks as every resident sequence could fill, within 4 GiB and half of the free
    memory. Pages are only taken from the system when they are first written."""
    wanted = max_num_seqs * cdiv(max_model_len, block_size)
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(wanted, max(1, min(CPU_CACHE_BYTES, free_bytes // 2) // bytes_per_block))
