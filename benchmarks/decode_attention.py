"""Decode attention of Qwen3-8B on a GPU: bf16 and FP8 KV caches in several tiles.

    python -m benchmarks.decode_attention

Prints microseconds of a layer and the bytes of keys and values read per second, for batches of
several sizes with contexts of 100 to 2,000 tokens.
"""

from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.fp8_linear import microseconds
from nanovllm.kernels.attention import decode, triton_backend
from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.decode import DecodeTile, decode_tile
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.fp8 import FP8
from nanovllm.kernels.rope import NewKV, RopeInputs
from nanovllm.utils.context import Context
from nanovllm.utils.math import cdiv

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_LAYERS = 32, 8, 128, 128, 3
# Keys, warps, and programs per multiprocessor.
TILES = [(32, 1, 4), (64, 1, 4), (32, 2, 4), (64, 2, 4), (128, 2, 3)]
TILES += [(32, 4, 4), (64, 4, 4), (64, 4, 3), (128, 4, 3)]


def layer_time(lens: np.ndarray, is_quantized: bool, tile: DecodeTile) -> float:
    """Returns microseconds."""

    def new_tile(*_: Any) -> DecodeTile:
        return tile

    num_seqs, pages = len(lens), [cdiv(int(n), PAGE_SIZE) for n in lens]
    cuda: Any = {"device": "cuda"}
    width = max(pages)
    tables = torch.zeros(num_seqs, width, dtype=torch.int32, **cuda)
    for i, (count, end) in enumerate(zip(pages, np.cumsum(pages), strict=True)):
        tables[i, :count] = torch.arange(int(end) - count, int(end))
    shape = sum(pages), PAGE_SIZE, KV_HEADS, HEAD_DIM
    scales_shape = sum(pages), 2, KV_HEADS, PAGE_SIZE
    caches = []
    for _ in range(NUM_LAYERS):
        k, v = (torch.randn(shape, dtype=torch.bfloat16, **cuda) for _ in range(2))
        if is_quantized:
            caches.append(KVCache(k.to(FP8), v.to(FP8), torch.ones(scales_shape, **cuda)))
        else:
            caches.append(KVCache(k, v))
    qkv = torch.randn(num_seqs, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, **cuda)
    q, new_k, new_v = qkv.split((Q_HEADS, KV_HEADS, KV_HEADS), 1)
    last = torch.from_numpy(lens - 1).cuda().int()
    rows = torch.arange(num_seqs, **cuda)
    slots = tables[rows, last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
    weight = torch.ones(HEAD_DIM, dtype=torch.bfloat16, **cuda)
    rope = RopeInputs(last, torch.randn(int(lens.max()), HEAD_DIM, **cuda), weight, weight, 1e-6)
    backend = triton_backend.TritonAttention()
    with (
        patch.object(decode, "decode_tile", new_tile),
        patch.object(triton_backend, "decode_tile", new_tile),
    ):
        schedule = backend.split_kv(lens, Q_HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, is_quantized)
        context = Context(
            slot_mapping=slots.int(),
            block_tables=tables,
            context_lens=torch.from_numpy(lens).cuda(),
            split_kv_schedule=torch.from_numpy(schedule).cuda(),
            max_seqlen_k=int(lens.max()),
        )
        params, new = AttentionParams(HEAD_DIM**-0.5), NewKV(rope, new_k, new_v)
        return microseconds(
            lambda i: backend.decode(q, caches[i % NUM_LAYERS], context, params, new),
            4 * NUM_LAYERS,
        )


def main() -> None:
    for num_seqs in (256, 128, 64, 16, 1):
        lens = np.random.default_rng(0).integers(100, 2000, num_seqs).astype(np.int32)
        cases = []
        for is_quantized in (False, True):
            shape = Q_HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, is_quantized
            default = decode_tile(num_seqs, *shape)
            tiles = [default, *(DecodeTile(*tile, default.prefetches) for tile in TILES)]
            cases += [(is_quantized, tile) for tile in tiles]
        for is_quantized, tile in cases:
            try:
                time = layer_time(lens, is_quantized, tile)
            except Exception as error:  # the others may work
                print(num_seqs, is_quantized, tile, f"{type(error).__name__}: {error}", flush=True)
                continue
            vector = HEAD_DIM + 4 if is_quantized else 2 * HEAD_DIM
            rate = 2 * int(lens.sum()) * KV_HEADS * vector / time / 1e3
            name = "fp8" if is_quantized else "bf16"
            print(f"{num_seqs:4} sequences, {name:4} {time:8.1f} us {rate:6.0f} GB/s  {tile}")


if __name__ == "__main__":
    main()
