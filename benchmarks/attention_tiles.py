"""Tunes the tiles of decode attention: ``python -m benchmarks.attention_tiles [OPTIONS]``.

Options are those of ``bench.py``; ``--input-len`` are the lengths of contexts, by default 100 to
2,000 tokens. For each number of sequences, each tile is timed in a whole decode step, whose CUDA
graph is captured again with the tile. In a benchmark of attention alone, other tiles are the best:
it lacks the kernels before, during which programs may load their first keys.

Prints a JSON line for each number of sequences, with the microseconds of a step by tile.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from bench import parse_args
from benchmarks.decode_step import decode_inputs, decode_size, replay_microseconds
from nanovllm import LLM
from nanovllm.engine.cuda_graphs import skip_middle_layers
from nanovllm.kernels.attention import decode, triton_backend
from nanovllm.kernels.attention.decode import DecodeTile
from nanovllm.kernels.gemm.cublas import small_cublas_workspace
from nanovllm.utils.compile_ahead import compiling_only

NUM_SEQS = 1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256
INPUT_LEN = 100, 2000
# Keys, warps and programs per multiprocessor.
TILES = [(64, 1, 4), (64, 2, 4), (128, 2, 3), (64, 4, 4), (64, 4, 3), (128, 4, 3)]


@contextmanager
def use(tile: DecodeTile) -> Iterator[None]:
    """Makes decode attention have a tile, in a ``with`` block."""
    with (
        patch.object(decode, "decode_tile", lambda *_: tile),
        patch.object(triton_backend, "decode_tile", lambda *_: tile),
    ):
        yield


def tiles_for(llm: LLM, num_seqs: int) -> dict[str, DecodeTile]:
    """Returns the tiles to try, by a name, among them the one in use, "now"."""
    model, config = llm.model_runner.model_config, llm.config
    heads = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    now = decode.decode_tile(num_seqs, *heads, llm.model_runner.dtype, config.quantizes_kv)
    tiles = {"now": now}
    for sizes in TILES:
        for prefetches in (False, True):
            tile = DecodeTile(*sizes, prefetches)
            if tile != now and (sizes[1] > 1 or not prefetches):
                tiles["x".join(map(str, sizes)) + " early" * prefetches] = tile
    return tiles


def step_times(llm: LLM, input_lens: list[int]) -> dict[str, float]:
    """Returns the microseconds of a decode step of sequences of about these lengths, by tile."""
    graphs: Any = llm.model_runner.graphs
    size, tiles, times = decode_size(llm, len(input_lens)), tiles_for(llm, len(input_lens)), {}
    with torch.inference_mode(), compiling_only():
        for tile in tiles.values():
            with use(tile), skip_middle_layers(llm.model_runner.model.model):
                for _, step in graphs.make_steps([size]):
                    step()

    def capture() -> None:
        with torch.inference_mode(), small_cublas_workspace():
            graphs.capture([size])

    for name, tile in tiles.items():
        with use(tile):
            capture()
            decode_inputs(llm, input_lens)  # the last step leaves its inputs in the graphs' buffer
            times[name] = round(replay_microseconds(graphs.graphs[size].graph.replay), 1)
    capture()
    return times


def main() -> None:
    args = parse_args()
    with LLM(args.model, **args.engine) as llm:
        for num_seqs in NUM_SEQS:
            lengths = random.Random(num_seqs)
            input_lens = [lengths.randint(*args.input_len or INPUT_LEN) for _ in range(num_seqs)]
            times = step_times(llm, input_lens)
            record = {"model": args.model_name, "num_seqs": num_seqs, "tokens": sum(input_lens)}
            record["step_us"] = dict(sorted(times.items(), key=lambda item: item[1]))
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
