"""The GEMM for decodes on Hopper: on a GPU, and run by an emulator on a CPU."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import fallback
from nanovllm.kernels.fp8 import (
    Fp8Rows,
    dequantize,
    empty_rows,
    quantize,
    quantize_blocks,
    quantize_groups,
)
from nanovllm.kernels.gemm import decode_gemm, hopper_gemm
from nanovllm.kernels.gemm.decode_gemm import (
    ROW_TILES,
    choose_tile,
    decode_linear,
    decode_linear_add,
    decode_swiglu,
    is_fastest,
    launch,
)
from nanovllm.kernels.gemm.fp8 import fp8_linear, fp8_linear_add, fp8_linear_reference
from nanovllm.kernels.gemm.same_bits import compare
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul
from tests.kernels.gluon_emulator import emulated
from tests.kernels.oracle import assert_as_good_as_eager

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
# Output and input features, and those of a part: one part whose tiles are all loaded at first, one
# of more tiles, with and without columns past the end, and two parts, with and without.
CASES = ((64, 200, 200), (80, 1600, 1600), (208, 2304, 2304), (64, 2048, 1024), (80, 1096, 640))
MODULES = "nanovllm.kernels.hopper", "nanovllm.kernels.gemm.decode_gemm_kernel"


def make(num_rows, out, width, dtype, device):
    x = torch.randn(num_rows, width, device=device).to(dtype)
    weight = (torch.randn(out, width, device=device) / width**0.5).to(dtype)
    bias, residual = torch.randn(out, device=device), torch.randn(num_rows, out, device=device)
    return x, weight, bias.to(dtype), residual.to(dtype)


@pytest.mark.parametrize("num_rows", [1, 11, 50, 96, 130])
@pytest.mark.parametrize(("out", "width", "part_columns"), CASES)
def test_the_kernel_is_a_gemm_in_the_emulator(out, width, part_columns, num_rows):
    dtype = torch.float16 if num_rows == 11 else torch.bfloat16
    x, weight, bias, residual = make(num_rows, out, width, dtype, "cpu")
    exact, eager = x.double() @ weight.double().t(), x @ weight.t()
    with emulated(*MODULES):
        plain = launch(x, weight, part_columns=part_columns)
        found = launch(x, weight, None, residual, part_columns=part_columns)
    if part_columns < width:  # the parts, to which a norm adds the residual
        assert torch.equal(plain, found) and plain.dtype is torch.float32 and len(plain) == 2
        plain = plain.sum(0).to(dtype)
        found = plain + residual
    assert_as_good_as_eager(plain, eager, exact)
    assert_as_good_as_eager(found, eager + residual, exact + residual.double())
    if part_columns == width:
        with emulated(*MODULES):
            found = launch(x, weight, bias, part_columns=width)
        assert_as_good_as_eager(found, F.linear(x, weight, bias), exact + bias.double())


@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(1, torch.bfloat16), (20, torch.float16), (96, torch.bfloat16)]
)
@pytest.mark.parametrize(("out", "width"), [(64, 200), (208, 1600)])
def test_the_kernel_with_swiglu_is_a_gemm_and_swiglu(out, width, num_rows, dtype):
    x, weight, bias, _ = make(num_rows, out, width, dtype, "cpu")
    for given in (None, bias):
        with emulated(*MODULES):
            expected = silu_and_mul(launch(x, weight, given, part_columns=width))
            found = launch(x, weight, given, swiglu=True, part_columns=width)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("out", "width", "parts"), [(64, 2048, 2), (64, 1024, 1), (4096, 2048, 1)])
def test_few_programs_split_the_columns_and_add_the_parts(out, width, parts, monkeypatch):
    launched = []

    def record(x, weight, bias=None, part_columns=None, dtype=None):
        assert bias is None or part_columns >= width
        columns = [slice(i, i + part_columns) for i in range(0, width, part_columns)]
        launched.append(len(columns))
        sums = torch.stack([x[:, c].float() @ weight[:, c].float().t() for c in columns])
        return sums if len(columns) > 1 else (sums[0] + bias).to(dtype)

    monkeypatch.setattr(decode_gemm, "launch", record)
    monkeypatch.setattr(
        decode_gemm, "add_parts", lambda sums, bias, _, out: out.copy_(sums.sum(0) + bias)
    )
    x, weight, bias, _ = make(5, out, width, torch.bfloat16, "cpu")
    found = decode_gemm.multiply(x, weight, bias, torch.bfloat16)
    assert launched == [parts]
    torch.testing.assert_close(found, F.linear(x, weight, bias))


def make_fp8(num_rows, out, width, has_groups, device):
    """x and a weight in FP8, in the layout in which kernels write them."""
    scales = torch.logspace(-1, 1, num_rows)[:, None] * torch.linspace(0.1, 1, width)
    x, weight = torch.randn(num_rows, width) * scales, torch.randn(out, width) / width**0.5
    x, weight = x.to(device), weight.to(device)
    rows = empty_rows(x, width, 128 if has_groups else None)
    for target, values in zip(rows, (quantize_groups if has_groups else quantize)(x), strict=True):
        target.copy_(values)
    return rows, (quantize_blocks if has_groups else quantize)(weight)


def exact_product(x, weight):
    return dequantize(x, torch.float64) @ dequantize(weight, torch.float64).t()


@pytest.mark.parametrize(
    ("has_groups", "out", "width", "part_columns"),
    [
        (False, 80, 1040, 1040),
        (False, 64, 2048, 1024),
        (True, 128, 384, 384),  # an odd number of groups
        (True, 128, 2048, 2048),
        (True, 256, 2048, 1024),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 11, 50, 96, 150])
def test_the_kernel_multiplies_fp8_in_the_emulator(has_groups, out, width, part_columns, num_rows):
    x, weight = make_fp8(num_rows, out, width, has_groups, "cpu")
    bias, residual = torch.randn(out).bfloat16(), torch.randn(num_rows, out).bfloat16()
    exact, eager = exact_product(x, weight), fp8_linear_reference(x, weight, None, bias.dtype)
    kwargs = {"part_columns": part_columns, "dtype": bias.dtype}
    with emulated(*MODULES):
        found = launch(x, weight, None, residual, **kwargs)
    if part_columns < width:
        found = found.sum(0).to(bias.dtype) + residual
    else:
        with emulated(*MODULES):
            biased = launch(x, weight, bias, **kwargs)
        eager_biased = fp8_linear_reference(x, weight, bias, bias.dtype)
        assert_as_good_as_eager(biased, eager_biased, exact + bias.double())
    assert_as_good_as_eager(found, eager + residual, exact + residual.double())


@pytest.fixture
def two_multiprocessors(monkeypatch):
    monkeypatch.setattr(decode_gemm, "HOPPER_MULTIPROCESSORS", 2)
    choose_tile.cache_clear()
    yield
    choose_tile.cache_clear()


@pytest.mark.usefixtures("two_multiprocessors")
def test_a_tile_of_128_features():
    """Weights with many features, and with long rows, use it if all programs then run at once."""
    x, weight, bias, _ = make(120, 256, 1056, torch.bfloat16, "cpu")
    assert choose_tile(120, 256, 1056, 1056).features == 128
    with emulated(*MODULES):
        found = launch(x, weight, bias, part_columns=1056)
        gated = launch(x, weight, bias, swiglu=True, part_columns=1056)
    exact = x.double() @ weight.double().t() + bias.double()
    assert_as_good_as_eager(found, F.linear(x, weight, bias), exact)
    torch.testing.assert_close(gated, silu_and_mul(found), rtol=0, atol=0)


@pytest.mark.usefixtures("two_multiprocessors")
def test_a_tile_of_96_rows():
    """It loads x in boxes of 32 rows."""
    x, weight, bias, _ = make(90, 128, 680, torch.bfloat16, "cpu")
    assert choose_tile(90, 128, 680, 680)[:3] == (64, 96, 64)
    with emulated(*MODULES):
        found = launch(x, weight, bias, part_columns=680)
    exact = x.double() @ weight.double().t() + bias.double()
    assert_as_good_as_eager(found, F.linear(x, weight, bias), exact)


@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 16, 48, 64, 96, 128, 160, 192, 256])
def test_tiles_fit_into_shared_memory_and_cover_all_columns(num_rows):
    outs, widths = (576, 1024, 4096, 6144, 8192, 34_816), (256, 896, 1024, 3072, 9728, 17_408)
    for out, width in product(outs, widths):
        check_tiles(out, width, num_rows)


def check_tiles(out, width, num_rows):
    forms = [(part_columns, 2, False) for part_columns in (None, width, 512, 640)]
    forms += [
        (part_columns, 1, has_groups)
        for part_columns in (None, width)
        for has_groups in (False, True)
    ]
    for part_columns, itemsize, has_groups in forms:
        tile = choose_tile(num_rows, out, width, part_columns, itemsize, has_groups)
        block_rows = 1 << (tile.rows - 1).bit_length()
        stage = (tile.features + block_rows) * tile.columns * itemsize
        assert tile.stages * stage <= 225 << 10 and tile.rows in ROW_TILES
        parts = -(-width // tile.part_columns)
        assert parts == 1 or tile.part_columns % tile.columns == 0, "a tile is of one part"
        assert tile.part_columns * (parts - 1) < width, "no part is empty"
        steps = -(-min(tile.part_columns, width) // tile.columns)
        if has_groups:
            steps += steps % 2
            assert tile.columns == 128 and tile.stages % 2 == 0
            assert parts == 1 or tile.part_columns % 256 == 0, "pairs of groups are of one part"
        assert 1 <= tile.stages <= steps
        # Rows are not split where a tile has more columns than the layout swizzles.
        assert tile.columns * itemsize == 128 or tile.rows == block_rows
        if part_columns is None and parts > 1:
            assert tile.part_columns >= decode_gemm.MIN_PART_COLUMNS


def test_more_rows_need_a_smaller_weight(monkeypatch):
    monkeypatch.setattr(hopper_gemm, "supports", lambda *_: True)

    def weight(*shape):
        return torch.empty(shape, device="meta")

    large, medium, small = weight(34_816, 5120), weight(24_576, 4096), weight(6144, 1024)
    for num_rows, expected in (
        (64, (True, True, True)),
        (65, (False, True, True)),
        (129, (False, False, True)),
        (257, (False, False, False)),
    ):
        assert tuple(is_fastest(num_rows, w) for w in (large, medium, small)) == expected

    long = weight(5120, 17_408)
    assert is_fastest(64, long) and not is_fastest(65, long)

    blocks, rows = (torch.empty(shape, device="meta") for shape in ((48, 32), (6144,)))
    for num_rows, expected in ((32, (True, True)), (33, (False, True)), (257, (False, False))):
        assert expected == tuple(
            is_fastest(num_rows, Fp8Rows(weight(6144, 4096), scales)) for scales in (blocks, rows)
        )


def test_other_kernels_run_where_it_does_not_compile(monkeypatch, caplog):
    """As on a CPU, without the emulator."""
    monkeypatch.setattr(fallback, "_failed", set())
    x, weight, bias, residual = make(4, 64, 32, torch.float32, "cpu")
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(decode_linear(x, weight, bias), expected)
    found, rest = decode_linear_add(x, weight, bias, residual)
    torch.testing.assert_close(found + rest, expected + residual)
    torch.testing.assert_close(decode_swiglu(x, weight, bias), silu_and_mul(expected))
    assert fallback._failed == {(decode_gemm.KERNEL, x.device)} and "decodes" in caplog.text


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


@pytest.mark.gpu
@hopper
@DTYPES
@pytest.mark.parametrize("num_rows", [1, 5, 8, 13, 16, 20, 48, 64, 80, 96, 128, 150, 192, 224, 256])
def test_the_kernel_is_a_gemm(num_rows, dtype):
    """Also with features and columns that no tile divides."""
    for out, width in ((6144, 1024), (1024, 3072), (24_576, 1000), (1152, 896), (208, 4104)):
        x, weight, bias, residual = make(num_rows, out, width, dtype, "cuda")
        exact = x.double() @ weight.double().t()
        eager, biased = F.linear(x, weight), F.linear(x, weight, bias)
        found, rest = decode_linear_add(x, weight, None, residual)
        if rest is not None:
            found = rms_norm(found, weight.new_ones(out), 1e-6, rest)[1]
        assert_as_good_as_eager(found, eager + residual, exact + residual.double())
        exact = exact + bias.double()
        assert_as_good_as_eager(decode_linear(x, weight, bias), biased, exact)
        gate, up = exact.chunk(2, -1)
        gated = decode_swiglu(x, weight, bias)
        assert_as_good_as_eager(gated, silu_and_mul(biased), F.silu(gate) * up)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 8, 16, 20, 48, 64, 80, 96, 128, 150, 192, 224, 256])
def test_the_kernel_multiplies_fp8(num_rows, has_groups):
    shapes = (6144, 1024), (1024, 3072), (24_576, 2048), (1152, 896), (4096, 12_288)
    for out, width in shapes:
        x, weight = make_fp8(num_rows, out, width, has_groups, "cuda")
        bias = torch.randn(out, device="cuda").bfloat16()
        residual = torch.randn(num_rows, out, device="cuda").bfloat16()
        eager = fp8_linear_reference(x, weight, None, bias.dtype)
        biased = fp8_linear_reference(x, weight, bias, bias.dtype)
        exact = exact_product(x, weight)
        found, rest = fp8_linear_add(x, weight, None, residual)
        if rest is not None:
            found = rms_norm(found, bias, 1e-6, rest)[1]
        assert_as_good_as_eager(found, eager + residual, exact + residual.double())
        found = fp8_linear(x, weight, bias, bias.dtype)
        assert_as_good_as_eager(found, biased, exact + bias.double())
        found = launch(x, weight, bias, part_columns=width, dtype=bias.dtype)
        assert_as_good_as_eager(found, biased, exact + bias.double())


@pytest.mark.gpu
@hopper
@DTYPES
@pytest.mark.parametrize(
    ("out", "width"), [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (6144, 4096)]
)
def test_the_bits_are_those_of_the_batch_invariant_gemm(out, width, dtype):
    from nanovllm.kernels.gemm import same_bits
    from nanovllm.kernels.gemm.invariant import invariant_linear

    counts = [*range(1, 9), 16, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    _, weight, *_ = make(1, out, width, dtype, "cuda")
    assert compare(weight, counts).decode_rows == {n for n in counts if is_fastest(n, weight)}
    for num_rows in compare(weight, counts).decode_rows:
        x, _, _, residual = make(num_rows, out, width, dtype, "cuda")
        for given in (None, residual):
            expected = invariant_linear(x, weight, None, given)
            assert torch.equal(same_bits.decode_linear(x, weight, given), expected)
        found, rest = same_bits.decode_linear_add(x, weight, residual)
        assert torch.equal(rms_norm(found, weight[:, 0].contiguous(), 1e-6, rest)[1], expected)
        expected = silu_and_mul(invariant_linear(x, weight, None))
        assert torch.equal(same_bits.decode_swiglu(x, weight), expected)
