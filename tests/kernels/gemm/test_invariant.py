"""Batch-invariant GEMMs against PyTorch's, and the order of their sums."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.gemm import invariant
from nanovllm.kernels.gemm.invariant import (
    FP32_TILES,
    MAX_BLOCK_K,
    NARROW_TILE,
    SMALL_MEMORY_TILES,
    TILES,
    Launch,
    Tile,
    check_launches,
    choose_launch,
    choose_tiles,
    invariant_linear,
    invariant_linear_add,
    launch_linear,
    num_parts,
    part_columns,
)
from nanovllm.kernels.rms_norm import rms_norm_triton
from tests.kernels.conftest import DEVICE
from tests.kernels.oracle import assert_as_good_as_eager, poisoned

# Tiles whose borders small matrices cross. A GPU's tensor cores need more features.
SMALL = Tile(8, 16, 16, 4, 1), Tile(16, 16, 32, 4, 1), Tile(8, 16, 16, 4, 1, persistent=True)
if DEVICE == "cuda":
    SMALL = tuple(tile._replace(features=64, columns=32) for tile in SMALL)


def make(rows, out, width, dtype, device, whole=False):
    """Whole numbers have sums that are exact in any order."""

    def randn(*shape, scale=1.0):
        x = torch.randint(-4, 5, shape) if whole else torch.randn(shape) * scale
        return x.to(dtype).to(device)

    return (
        randn(rows, width),
        randn(out, width, scale=width**-0.5),
        randn(out),
        randn(rows, out),
    )


@pytest.fixture
def in_parts(monkeypatch):
    """Matrices of 70 columns and more have parts of 32 columns."""
    monkeypatch.setattr(invariant, "MAX_BLOCK_K", 32)
    monkeypatch.setattr(invariant, "MIN_SPLIT_COLUMNS", 70)
    monkeypatch.setattr(invariant, "MIN_PART_COLUMNS", 16)
    monkeypatch.setattr(invariant, "HOPPER_MULTIPROCESSORS", 4)
    if DEVICE == "cpu":  # so that a persistent program computes several tiles
        monkeypatch.setattr(invariant, "num_multiprocessors", lambda device: 2)


SIZES = [(1, 16, 32), (9, 40, 72), (20, 17, 128), (3, 33, 90)]  # rows, out, in


@pytest.mark.parametrize(
    ("rows", "out", "width", "tma"),
    [
        pytest.param(*size, tma, marks=pytest.mark.slow if tma == (i % 2 == 1) else ())
        for i, size in enumerate(SIZES)
        for tma in (True, False)
    ],
    ids=str,
)
def test_as_good_as_eager(rows, out, width, tma, dtype, device, in_parts, monkeypatch):
    """In all tiles, with parts one after the other and in parallel, with and without a bias."""
    x, weight, bias, residual = make(rows, out, width, dtype, device)
    if device == "cpu":
        monkeypatch.setattr(invariant, "is_hopper_or_newer", lambda device: tma)
    elif not tma:
        monkeypatch.setattr(invariant, "is_hopper_or_newer", lambda device: False)
    exact = F.linear(x.double(), weight.double())
    eager = F.linear(x, weight)
    poisoned(monkeypatch)
    is_split = width > part_columns(out, width)
    assert is_split == (width >= 70)
    for tile, is_parallel in product(SMALL, (False, True) if is_split else (False,)):
        launch = Launch(tile, is_parallel)
        assert_as_good_as_eager(launch_linear(x, weight, None, None, launch), eager, exact)
        found = launch_linear(x, weight, bias, residual, launch)
        total = exact + bias.double() + residual.double()
        assert_as_good_as_eager(found, F.linear(x, weight, bias) + residual, total)


def test_all_launches_have_the_same_bits(device, in_parts, monkeypatch):
    """On whole numbers, whose sums do not depend on the order in which the interpreter's matmuls
    add. In fp32, with parts of which the second one cancels the first one: then the order shows."""
    if device == "cuda":
        pytest.skip("benchmarks/invariance.py compares the real tiles")
    x, weight, bias, residual = make(20, 40, 90, torch.float32, device, whole=True)
    x[:, :32] *= 2**22
    x[:, 32:64], weight[:, 32:64] = -x[:, :32], weight[:, :32]
    bias += 0.3
    expected = None
    for tile, is_parallel, rows in product(SMALL, (False, True), (20, 1, 8)):
        if tile.columns > 16:
            continue  # whose part of 32 columns would be one matmul
        found = launch_linear(
            x[:rows], weight, bias, residual[:rows].clone(), Launch(tile, is_parallel)
        )
        expected = found if expected is None else expected
        assert torch.equal(found, expected[:rows])


@pytest.mark.parametrize("is_parallel", [False, True])
def test_parts_are_added_in_order(is_parallel, device, in_parts):
    """2^24 + 1 rounds to 2^24 in fp32, so each other order of the three parts has another sum."""
    x = torch.zeros(2, 90, device=device)
    x[:, 0], x[:, 32], x[:, 64] = 1, 2**24, -(2**24)
    weight = torch.ones(16, 90, device=device)
    found = launch_linear(x, weight, None, None, Launch(FP32_TILES[0], is_parallel))
    assert not found.any()


def test_the_next_norm_adds_parts_with_the_same_bits(dtype, device, in_parts):
    x, weight, bias, residual = make(20, 40, 90, dtype, device)
    norm = torch.rand(40, device=device).to(dtype), 1e-6
    for given in (None, bias):
        total = invariant_linear(x, weight, given, residual)
        found, rest = invariant_linear_add(x, weight, given, residual)
        assert found.dim() == (3 if given is None else 2)
        assert (rest is None) == (given is not None)
        found = rms_norm_triton(found, *norm, rest)
        assert torch.equal(found[1], total)
        assert torch.equal(found[0], rms_norm_triton(total, *norm)[0])


def test_launches_depend_on_rows_and_parts_do_not():
    """Parts as the docstring of ``num_parts`` says; shapes of Qwen3 0.6B, 8B and others."""
    shapes = {
        (4096, 1024): 1, (1024, 2048): 4, (6144, 1024): 1, (1024, 3072): 4, (151_936, 1024): 1,
        (6144, 4096): 1, (4096, 4096): 1, (24_576, 4096): 1, (4096, 12_288): 1, (1536, 8960): 4,
        (64, 64): 1, (32, 20_000): 32,
    }  # fmt: skip
    assert {shape: num_parts(*shape) for shape in shapes} == shapes
    for out, width in shapes:
        columns = part_columns(out, width)
        assert columns % MAX_BLOCK_K == 0 and columns * num_parts(out, width) >= width
        for rows in (1, 16, 17, 64, 65, 256, 1000, 16_384):
            for tiles in (TILES, (NARROW_TILE, *TILES), SMALL_MEMORY_TILES, FP32_TILES):
                tile, is_parallel = choose_launch(rows, out, width, tiles, 132)
                assert columns % tile.columns == 0
                is_split = columns < width
                assert is_split or not is_parallel
                assert tile.rows <= 16 or rows > 16 or tiles is not TILES
                assert (tile == NARROW_TILE) == (rows <= 16 and NARROW_TILE in tiles)
    assert choose_launch(1, 1024, 2048, TILES, 132) == Launch(TILES[0], True)
    assert choose_launch(256, 1024, 2048, TILES, 132) == Launch(TILES[3], True)
    assert choose_launch(1024, 4096, 4096, TILES, 132) == Launch(TILES[-2], False)
    assert choose_launch(16_384, 24_576, 4096, TILES, 132) == Launch(TILES[-1], False)


def test_narrow_tiles_are_for_few_features_on_hopper(monkeypatch):
    monkeypatch.setattr(invariant, "shared_memory", lambda device: 227 << 10)
    monkeypatch.setattr(invariant, "is_hopper", lambda device: is_hopper)
    found = set()
    for is_hopper in (True, False):
        for out, width in ((4096, 4096), (4096, 1024), (6144, 4096), (1024, 2048), (2048, 2048)):
            if NARROW_TILE in choose_tiles(torch.empty(1, width, dtype=torch.half), out):
                found.add((is_hopper, out, width))
    assert found == {(True, 4096, 4096), (True, 2048, 2048)}


@pytest.mark.parametrize("width", [64, 96])
def test_start_up_notices_a_launch_with_other_bits(width, device, in_parts, monkeypatch):
    """With width 96 one that adds its parts in parallel, with width 64 another tile."""
    monkeypatch.setattr(invariant, "_checked", set())
    monkeypatch.setattr(invariant, "choose_tiles", lambda *_: (FP32_TILES[0], SMALL[0]))
    weight = torch.randint(-4, 5, (16, width), device=device).float()
    launches = []

    def launch_with_error(x, weight, bias, residual, launch):
        launches.append(launch)
        out = torch.zeros(len(x), len(weight), device=device)
        out[0, 0] = error if launch == Launch(SMALL[0], width == 96) else 0.0
        return out

    monkeypatch.setattr(invariant, "launch_linear", launch_with_error)
    error = float("nan")
    with pytest.raises(ValueError, match=f"weight of 16 x {width} sums in an order that depends"):
        check_launches(weight)
    error = 0.0
    check_launches(weight)
    num_launches = len(launches)
    check_launches(weight.clone())
    assert len(launches) == num_launches, "a shape is checked once"


def test_rows_do_not_mix(dtype, device):
    x, weight, bias, residual = make(37, 48, 64, dtype, device, whole=True)
    alone = invariant_linear(x, weight, bias, residual)
    assert torch.equal(
        alone, F.linear(x.double(), weight.double(), bias.double()).to(dtype) + residual
    )
    x[20] = float("nan")
    found = invariant_linear(x, weight, bias, residual)
    assert found[20].isnan().all()
    found[20] = alone[20]
    assert torch.equal(found, alone)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("out", "width"), [(4096, 1024), (1024, 3072), (4096, 4096), (1000, 200)], ids=str
)
def test_a_row_has_the_same_bits_in_any_batch(out, width, dtype):
    x, weight, bias, residual = make(1000, out, width, dtype, "cuda")
    expected = invariant_linear(x, weight, bias, residual)
    for rows in (1, 2, 8, 16, 17, 64, 65, 200, 256, 700):
        for first in (0, 1000 - rows):
            part = slice(first, first + rows)
            found = invariant_linear(x[part], weight, bias, residual[part])
            assert torch.equal(found, expected[part]), (rows, first)
