"""Tunes the tiles of one row's GEMVs: ``python -m benchmarks.gemv_tiles [OPTIONS]``.

Options are those of ``bench.py``. A kernel's own time says little about its best tile: with
programmatic dependent launch, a tile also decides how soon the next kernel can start. So each tile
is timed in a whole decode step of one sequence. The step's CUDA graph is captured again with the
tile, and replayed. A matrix keeps its best tile while the next one is tuned.

Prints a JSON line for each matrix, with the tiles and the microseconds of a step. The best ones of
public models are in ``kernels/gemm/skinny.py`` and ``kernels/moe/gemv.py``.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from bench import parse_args
from benchmarks.decode_step import decode_inputs, decode_size, step_microseconds
from nanovllm import LLM
from nanovllm.engine.cuda_graphs import skip_middle_layers
from nanovllm.kernels.gemm import skinny
from nanovllm.kernels.moe import gemv
from nanovllm.layers.moe import Experts
from nanovllm.quantization.experts import Mxfp4Experts
from nanovllm.utils.compile_ahead import compiling_only

Tile = tuple[int, int, int]  # BLOCK_N, BLOCK_K, num_warps
TABLES = "TUNED_VECTORS", "TUNED_FP8_VECTORS"
EXPERTS: dict[str, list[Tile]] = {
    "GATE_UP_CONFIG": [
        (1, 1024, 1), (1, 1024, 2), (1, 2048, 2), (1, 2048, 4), (2, 1024, 2), (2, 2048, 2),
        (2, 2048, 4), (2, 2048, 8), (4, 2048, 4), (4, 2048, 8),
    ],
    "DOWN_CONFIG": [
        (1, 256, 2), (2, 256, 2), (2, 256, 4), (4, 256, 2), (4, 256, 4), (4, 256, 8), (8, 256, 4),
        (8, 256, 8), (4, 512, 4),
    ],
}  # fmt: skip
NUM_CONFIRMED = 3  # best tiles that are timed again, beside the one before


class Matrix(NamedTuple):
    """A matrix and the tiles to try.

    Attributes:
        table: the name of the table in skinny.py, or of the constant in gemv.py.
        shape: the key in the table: output features, input features, whether SwiGLU follows; None
            for a constant.
    """

    table: str
    shape: tuple[int, int, bool] | None
    tiles: list[Tile]


class RecordingTable(dict[tuple[int, int, bool], Tile]):
    """A table that remembers for which matrices it was asked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shapes: list[tuple[int, int, bool]] = []

    def get(self, shape: tuple[int, int, bool], default: Any = None) -> Any:
        if shape not in self.shapes:
            self.shapes.append(shape)
        return super().get(shape, default)


def vector_tiles(out_features: int, width: int, silu: bool, itemsize: int) -> Iterator[Tile]:
    """Yields the tiles to try for a matrix: 16 to 64 weights of 16 bits per thread, or 16 to 128 of
    8 bits; at least 8 bytes of a row per thread; and enough programs for an H200."""
    for num_warps in (1, 2, 4, 8):
        for block_n in (1, 2, 4, 8):
            for block_k in (512, 1024, 2048, 4096):
                per_thread = block_n * block_k * (1 + silu) // (32 * num_warps)
                is_read_at_once = block_k * itemsize // (32 * num_warps) >= 8
                has_programs = out_features // block_n >= 132 or out_features < 1024
                fits = 16 <= per_thread <= 128 // itemsize and block_k < 2 * width
                if fits and is_read_at_once and has_programs:
                    yield block_n, block_k, num_warps


def use(matrix: Matrix, tile: Tile) -> AbstractContextManager[Any]:
    """Makes a matrix have a tile, in a ``with`` block."""
    if matrix.shape is None:
        return patch.object(gemv, matrix.table, tile)
    return patch.dict(getattr(skinny, matrix.table), {matrix.shape: tile})


def current_tile(matrix: Matrix) -> Tile:
    if matrix.shape is None:
        return getattr(gemv, matrix.table)
    is_fp8 = matrix.table == "TUNED_FP8_VECTORS"
    return (skinny.fp8_vector_config if is_fp8 else skinny.vector_config)(*matrix.shape)


def matrices_of(llm: LLM) -> list[Matrix]:
    """Returns the matrices for which the tables in skinny.py, RecordingTables, have been asked, and
    those of experts."""
    matrices = []
    for table in TABLES:
        for shape in getattr(skinny, table).shapes:
            itemsize = 1 if table == "TUNED_FP8_VECTORS" else 2
            matrices.append(Matrix(table, shape, list(vector_tiles(*shape, itemsize))))
    modules = llm.model_runner.model.modules()
    experts = next((module for module in modules if isinstance(module, Experts)), None)
    if experts is not None and not isinstance(experts.weights, Mxfp4Experts):
        prefix = "FP8_" if experts.down_proj.itemsize == 1 else ""  # MXFP4 has other kernels
        matrices += [Matrix(prefix + name, None, tiles) for name, tiles in EXPERTS.items()]
    return matrices


def main() -> None:
    args = parse_args()
    args.engine |= {"max_num_seqs": 1}
    with ExitStack() as stack:
        for table in TABLES:
            recording = RecordingTable(getattr(skinny, table))
            stack.enter_context(patch.object(skinny, table, recording))
        llm = stack.enter_context(LLM(args.model, **args.engine))
        inputs, matrices = decode_inputs(llm), matrices_of(llm)
        graphs: Any = llm.model_runner.graphs
        few_layers = skip_middle_layers(llm.model_runner.model.model)
        with torch.inference_mode(), compiling_only(), few_layers:
            for matrix in matrices:
                for tile in matrix.tiles:
                    with use(matrix, tile):
                        for _, step in graphs.make_steps([decode_size(llm)]):
                            step()

        def step_us(matrix: Matrix, tile: Tile) -> float:
            with use(matrix, tile):
                return step_microseconds(llm, inputs, decode_size(llm))

        for matrix in matrices:
            before = current_tile(matrix)
            times = {tile: step_us(matrix, tile) for tile in {*matrix.tiles, before}}
            fastest = sorted(times, key=times.__getitem__)[:NUM_CONFIRMED]
            for tile in {before, *fastest}:
                times[tile] = min(times[tile], step_us(matrix, tile))
            best = min({before, *fastest}, key=times.__getitem__)
            stack.enter_context(use(matrix, best))
            record = {"model": args.model_name, "table": matrix.table, "shape": matrix.shape}
            record |= {"tile": best, "step_us": round(times[best], 1)}
            record |= {"before": before, "before_us": round(times[before], 1)}
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
