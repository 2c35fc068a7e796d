"""benchmarks/gemv_tiles.py finds a model's matrices, and lists tiles that the kernels accept."""

from unittest.mock import patch

import pytest

from benchmarks import gemv_tiles
from benchmarks.gemv_tiles import Matrix, RecordingTable, current_tile, use, vector_tiles
from nanovllm import LLM
from nanovllm.kernels.gemm import skinny
from nanovllm.kernels.moe import gemv


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("silu", [False, True])
def test_tiles_to_try(silu, itemsize):
    for shape in ((4096, 1024), (6144, 4096), (2560, 9728), (128, 2048)):
        tiles = list(vector_tiles(*shape, silu, itemsize))
        assert 5 < len(tiles) == len(set(tiles)) < 60
        for block_n, block_k, num_warps in tiles:
            assert block_n * block_k * itemsize * (1 + silu) <= 128 * 32 * num_warps
            assert block_k * itemsize >= 8 * 32 * num_warps


def test_tiles_of_experts_divide_blocks_of_scales():
    for tiles in gemv_tiles.EXPERTS.values():
        for tile in tiles:
            assert gemv._settings(tile, 768, 128)["GROUP"] == 128  # it asserts that they do


def test_tiles_are_used_only_in_the_block():
    shape = 6144, 2560, False
    for table, other in (gemv_tiles.TABLES, gemv_tiles.TABLES[::-1]):
        matrix = Matrix(table, shape, [])
        before, unused = current_tile(matrix), current_tile(Matrix(other, shape, []))
        with use(matrix, (1, 512, 1)):
            assert current_tile(matrix) == (1, 512, 1)
            assert current_tile(Matrix(other, shape, [])) == unused
        assert current_tile(matrix) == before
    before = gemv.DOWN_CONFIG
    with use(Matrix("DOWN_CONFIG", None, []), (1, 256, 2)):
        assert gemv.DOWN_CONFIG == (1, 256, 2)
    assert before == gemv.DOWN_CONFIG


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe-all", "gpt-oss"])
def test_matrices_of_a_model(family, tiny_models):
    tables = [RecordingTable(getattr(skinny, name)) for name in gemv_tiles.TABLES]
    with (
        patch.multiple(skinny, **dict(zip(gemv_tiles.TABLES, tables, strict=True))),
        LLM(tiny_models.path(family), device="cpu", num_kvcache_blocks=16) as llm,
    ):
        skinny.vector_config(64, 32, False)
        skinny.fp8_vector_config(64, 32, True)
        skinny.vector_config(64, 32, False)
        matrices = gemv_tiles.matrices_of(llm)
    expected = [("TUNED_VECTORS", (64, 32, False)), ("TUNED_FP8_VECTORS", (64, 32, True))]
    if family != "qwen3":  # on a CPU, MXFP4 weights are dequantised
        expected += [("GATE_UP_CONFIG", None), ("DOWN_CONFIG", None)]
    assert [(matrix.table, matrix.shape) for matrix in matrices] == expected
