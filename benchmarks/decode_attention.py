"""Decode attention alone, on a GPU: ``python -m benchmarks.decode_attention``.

Prints, for several models and batches of contexts, the microseconds of a layer, and the keys and
values read per second. ``benchmarks/attention_tiles.py`` compares tiles.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.fp8_linear import microseconds
from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.triton_backend import TritonAttention
from nanovllm.kernels.fp8 import FP8
from nanovllm.kernels.rope import NewKV, RopeInputs
from nanovllm.utils.context import Context
from nanovllm.utils.math import cdiv

PAGE_SIZE = 128
CACHE_BYTES = 150 << 20  # of all layers at least, several times the L2 cache
BF16 = torch.bfloat16


class Heads(NamedTuple):
    q_heads: int
    kv_heads: int
    head_dim: int
    is_quantized: bool = False


MODELS = {
    "Qwen3-0.6B": Heads(16, 8, 128),
    "Qwen3-8B": Heads(32, 8, 128),
    "Qwen3-8B, FP8": Heads(32, 8, 128, True),
    "Qwen3-14B": Heads(40, 8, 128),
    "Qwen3-30B-A3B": Heads(32, 4, 128),
    "Qwen3-30B-A3B, FP8": Heads(32, 4, 128, True),
    "gpt-oss-20b": Heads(64, 8, 64),
    "Llama 3.2 1B": Heads(32, 8, 64),
    "Gemma 3 4B": Heads(8, 4, 256),
}
# Number of contexts, and their shortest and longest length.
BATCHES = [(1, 640, 640), (1, 4000, 4000), (1, 30_000, 30_000), (4, 30_000, 30_000)]
BATCHES += [(8, 30_000, 30_000), (8, 100, 1100), (16, 8000, 8000), (16, 100, 2000)]
BATCHES += [(32, 100, 2000), (64, 100, 1100), (128, 100, 1100), (256, 100, 1100)]


def bytes_read(heads: Heads, num_tokens: int) -> int:
    """Returns the bytes of the keys and values of a layer, with their scales."""
    vector = heads.head_dim + 4 if heads.is_quantized else heads.head_dim * BF16.itemsize
    return 2 * num_tokens * heads.kv_heads * vector


def layer_time(heads: Heads, lens: np.ndarray) -> float:
    """Returns microseconds."""
    q_heads, kv_heads, head_dim, is_quantized = heads
    num_seqs, pages = len(lens), [cdiv(int(n), PAGE_SIZE) for n in lens]
    num_layers = min(max(3, CACHE_BYTES // bytes_read(heads, int(lens.sum()))), 16)
    cuda: Any = {"device": "cuda"}
    tables = torch.zeros(num_seqs, max(pages), dtype=torch.int32, **cuda)
    for i, (count, end) in enumerate(zip(pages, np.cumsum(pages), strict=True)):
        tables[i, :count] = torch.arange(int(end) - count, int(end))
    shape = sum(pages), PAGE_SIZE, kv_heads, head_dim
    caches = []
    for _ in range(num_layers):
        k, v = (torch.randn(shape, dtype=BF16, **cuda) for _ in range(2))
        if is_quantized:
            scales = torch.ones(sum(pages), 2, kv_heads, PAGE_SIZE, **cuda)
            caches.append(KVCache(k.to(FP8), v.to(FP8), scales))
        else:
            caches.append(KVCache(k, v))
    qkv = torch.randn(num_seqs, q_heads + 2 * kv_heads, head_dim, dtype=BF16, **cuda)
    q, new_k, new_v = qkv.split((q_heads, kv_heads, kv_heads), 1)
    last = torch.from_numpy(lens - 1).cuda()
    rows = torch.arange(num_seqs, **cuda)
    slots = tables[rows, last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
    weight = torch.ones(head_dim, dtype=BF16, **cuda)
    rope = RopeInputs(last, torch.randn(int(lens.max()), head_dim, **cuda), weight, weight, 1e-6)
    backend = TritonAttention()
    schedule = backend.split_kv(lens, q_heads, kv_heads, head_dim, BF16, is_quantized)
    context = Context(
        slot_mapping=slots.int(),
        block_tables=tables,
        context_lens=torch.from_numpy(lens).cuda(),
        split_kv_schedule=torch.from_numpy(schedule).cuda(),
        max_seqlen_k=int(lens.max()),
    )
    params, new = AttentionParams(head_dim**-0.5), NewKV(rope, new_k, new_v)
    return microseconds(
        lambda i: backend.decode(q, caches[i % num_layers], context, params, new), 4 * num_layers
    )


def main() -> None:
    for name, heads in MODELS.items():
        for num_seqs, shortest, longest in BATCHES:
            lengths = np.random.default_rng(0).integers(shortest, longest + 1, num_seqs)
            lens = lengths.astype(np.int32)
            time = layer_time(heads, lens)
            rate = bytes_read(heads, int(lens.sum())) / time / 1e6
            batch = f"{num_seqs:4} of {shortest} to {longest}"
            print(f"{name:20} {batch:24} {time:8.1f} us {rate:6.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
