"""Linear layers with FP8 weights on a GPU: their times, beside those of bf16 weights.

    python -m benchmarks.fp8_linear

For the projections of Qwen3-8B and several numbers of rows, prints microseconds: the default kernel
with bf16 weights; the kernels for FP8 weights with scales of rows: the one that is chosen,
``_scaled_mm``, that for one row of bf16 and the tiles in all their forms; and those for scales of
blocks. The inputs are quantised already. Weights are read from memory, not from the L2 cache.
"""

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from nanovllm.kernels.fp8 import Fp8Rows, quantize, quantize_blocks, quantize_row_groups
from nanovllm.kernels.gemm import fp8
from nanovllm.kernels.gemm.skinny import skinny_norm_linear
from nanovllm.quantization.unquantized import choose_kernel
from nanovllm.utils.triton_compat import shared_memory

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24_576, 4096), "down": (4096, 12_288)}
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 8192)
PARTS, STAGES = (1, 2, 4, 8), (3, 4, 6)
CACHE_BYTES = 200 << 20  # timed weights take at least this much, more than the L2 cache
BF16 = torch.bfloat16


def microseconds(function: Callable[[int], Tensor], count: int) -> float:
    """Returns the time of a call, on average over the arguments 0 to count - 1."""
    for i in range(count):
        function(i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            function(i)
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return sorted(times)[2]


def measure(name: str, num_rows: int) -> None:
    features, width = SHAPES[name]
    count = max(2, CACHE_BYTES // (features * width))
    plain = [torch.randn(features, width, device="cuda").to(BF16) for _ in range(count)]
    weights = [quantize(weight) for weight in plain]
    x = torch.randn(num_rows, width, device="cuda").to(BF16)
    rows = quantize(x)
    kernel = choose_kernel("matmul", x, plain[0], None)
    results = {"bf16": microseconds(lambda i: kernel(x, plain[i], None), count)}

    def fp8_time(linear: Callable[[Fp8Rows, Fp8Rows, None, torch.dtype], Tensor]) -> float:
        return microseconds(lambda i: linear(rows, weights[i], None, BF16), count)

    results["fp8"] = fp8_time(fp8.fp8_linear)
    results["_scaled_mm"] = fp8_time(fp8.scaled_linear)
    if num_rows == 1:
        results["one row"] = microseconds(
            lambda i: skinny_norm_linear(
                x, weights[i].codes, None, name == "gate_up", scales=weights[i].scales
            )[0],
            count,
        )
    groups, blocks = quantize_row_groups(x), [quantize_blocks(weight) for weight in plain]

    def block_time(linear: Callable[[Fp8Rows, Fp8Rows, None, torch.dtype], Tensor]) -> float:
        return microseconds(lambda i: linear(groups, blocks[i], None, BF16), count)

    results["blocks"] = block_time(fp8.fp8_linear)
    results["blocks in tiles"] = block_time(fp8.fp8_tile_linear)
    if num_rows == 1:
        results["one row of blocks"] = microseconds(
            lambda i: skinny_norm_linear(
                x, blocks[i].codes, None, name == "gate_up", scales=blocks[i].scales
            )[0],
            count,
        )
    if num_rows > 1:
        results["blocks by _scaled_mm"] = block_time(fp8.scaled_block_linear)
    default, _ = fp8.choose_tile(num_rows, features, width, shared_memory(x.device))
    for parts in PARTS if num_rows <= 256 else ():
        for stages in STAGES:
            tile = default._replace(num_stages=stages)
            with patch.object(fp8, "choose_tile", return_value=(tile, parts)):
                results[f"{parts} parts {stages} stages"] = fp8_time(fp8.fp8_tile_linear)
    gbytes = features * width / 1e3 / results["fp8"]
    tflops = 2 * num_rows * features * width / 1e6 / results["fp8"]
    print(f"{name:8} {num_rows:5} rows  {gbytes:5.0f} GB/s {tflops:5.0f} TFLOP/s  ", end="")
    best = min((value, key) for key, value in results.items() if "parts" in key or "_" in key)
    print(*(f"{k} {v:.1f}" for k, v in results.items()), f"best: {best[1]}", sep=", ", flush=True)


if __name__ == "__main__":
    for shape in SHAPES:
        for rows_of_x in ROWS:
            try:
                measure(shape, rows_of_x)
            except Exception as error:  # the others may work
                print(f"{shape} {rows_of_x}: {type(error).__name__}: {error}", flush=True)
