"""GEMMs of FP8 rows, against fp64 of the same quantised rows."""

import pytest
import torch

from nanovllm.kernels.fp8 import (
    GROUP,
    Fp8Rows,
    dequantize,
    empty_rows,
    quantize,
    quantize_blocks,
    quantize_groups,
)
from nanovllm.kernels.gemm import decode_gemm, fp8, hopper_gemm
from nanovllm.kernels.gemm.fp8 import (
    choose_tile,
    fp8_linear,
    fp8_linear_add,
    fp8_linear_reference,
    fp8_tile_linear,
    has_block_matmul,
    scaled_block_linear,
    scaled_linear,
)
from nanovllm.kernels.gemm.tiled import Tile
from tests.kernels.oracle import assert_as_good_as_eager

SHAPES = [(64, 128), (128, 1024), (256, 384)]  # out, in


def make(num_rows: int, width: int, device: str, function=quantize) -> Fp8Rows:
    rows = torch.randn(num_rows, width) * torch.logspace(-1, 1, num_rows)[:, None]
    if function is not quantize:
        rows *= torch.logspace(-1, 0, width // GROUP).repeat_interleave(GROUP)
    return Fp8Rows(*(part.to(device) for part in function(rows)))


def exact(x: Fp8Rows, weight: Fp8Rows, bias: torch.Tensor | None) -> torch.Tensor:
    a, b = (dequantize(rows, torch.float64) for rows in (x, weight))
    return a @ b.t() + (0 if bias is None else bias.double())


def check(linear, num_rows, features, width, has_bias, dtype, device, has_groups=False) -> None:
    x = make(num_rows, width, device, quantize_groups if has_groups else quantize)
    weight = make(features, width, device, quantize_blocks if has_groups else quantize)
    if linear in (scaled_linear, scaled_block_linear):
        x = padded(x, GROUP if has_groups else None)
    bias = torch.randn(features, device=device).to(dtype) if has_bias else None
    eager = fp8_linear_reference(x, weight, bias, dtype)
    found = linear(x, weight, bias, dtype)
    assert_as_good_as_eager(found, eager, exact(x, weight, bias))


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize(("num_rows", "has_bias"), [(1, True), (3, False), (17, True), (65, True)])
def test_tiles(num_rows, has_bias, has_groups, device):
    for features, width in SHAPES[has_groups:]:
        sizes = num_rows, features, width, has_bias
        check(fp8_tile_linear, *sizes, torch.float16, device, has_groups)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 65, 1000])
def test_groups_of_models(num_rows):
    for features, width in ((6144, 4096), (4096, 12288), (1024, 3072), (256, 384)):
        for dtype in (torch.float16, torch.bfloat16):
            check(fp8_tile_linear, num_rows, features, width, True, dtype, "cuda", True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 32, 64, 65, 128, 256])
def test_tiles_of_models(num_rows, dtype):
    for features, width in ((6144, 4096), (4096, 4096), (4096, 12288), (1024, 3072)):
        check(fp8_tile_linear, num_rows, features, width, num_rows % 2 == 1, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [65, 150, 224, 1000])
def test_scaled_linear(num_rows):
    for features, width in ((6144, 4096), (4096, 12288), (576, 576)):
        for has_bias in (False, True):
            check(scaled_linear, num_rows, features, width, has_bias, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [65, 68, 150, 224, 1000])
def test_scaled_block_linear(num_rows):
    if not has_block_matmul(torch.empty(128, 512, device="cuda")):
        pytest.skip("needs Hopper and CUDA 12.9")
    for features, width in ((6144, 4096), (4096, 12288), (256, 512), (128, 1024)):
        for has_bias in (False, True):
            sizes = num_rows, features, width, has_bias
            check(scaled_block_linear, *sizes, torch.bfloat16, "cuda", True)


def padded(x: Fp8Rows, group: int | None) -> Fp8Rows:
    """Copies quantised rows into the layout in which kernels write them."""
    rows = empty_rows(x.codes, x.codes.size(1), group)
    for target, values in zip(rows, x, strict=True):
        target.copy_(values)
    return rows


def test_choice(monkeypatch):
    called = []
    names = "fp8_tile_linear", "scaled_linear", "scaled_block_linear", "fp8_linear_reference"
    for name in names:
        monkeypatch.setattr(fp8, name, lambda *args, name=name: called.append(name))
    monkeypatch.setattr(fp8, "use_triton", lambda x: True)

    def choice(num_rows: int, features: int, width: int, dtype=torch.bfloat16) -> str:
        x, weight = (torch.empty(n, width, device="meta") for n in (num_rows, features))
        fp8_linear(Fp8Rows(x, x[:, 0]), Fp8Rows(weight, weight[:, 0]), None, dtype)
        return called.pop()

    assert choice(1, 64, 128) == choice(64, 4096, 4096) == "fp8_tile_linear", "no Hopper GPU"
    assert choice(129, 64, 128) == choice(65, 64, 576) == choice(65, 80, 128) == "scaled_linear"
    assert choice(65, 1 << 15, 4096) == "scaled_linear"
    assert choice(128, 1 << 14, 4096) == "fp8_tile_linear"
    assert choice(1, 64, 576) == choice(64, 80, 128) == "fp8_linear_reference"
    assert choice(65, 64, 128, torch.float16) == "fp8_tile_linear"
    for has_matmul, name in ((False, "fp8_tile_linear"), (True, "scaled_block_linear")):
        monkeypatch.setattr(fp8, "has_block_matmul", lambda weight, result=has_matmul: result)
        for num_rows, expected in ((64, "fp8_tile_linear"), (65, name)):
            x, weight = (torch.empty(n, 128, device="meta") for n in (num_rows, 128))
            rows = Fp8Rows(x, x[:, :1]), Fp8Rows(weight, weight[:1, :1])
            fp8_linear(*rows, None, torch.bfloat16)
            assert called.pop() == expected
    assert choice(1, 64, 72) == choice(1, 72, 64) == "fp8_linear_reference"
    assert choice(65, 64, 64, torch.float16) == "fp8_linear_reference"


def test_which_matmuls_have_the_kernel_for_decodes(monkeypatch):
    """Those of few rows with results in bf16, on Hopper. It leaves parts of a sum to the norm."""
    monkeypatch.setattr(hopper_gemm, "supports", lambda *_: True)
    launched = []

    def launch(x, weight, bias=None, residual=None, part_columns=None, dtype=None):
        launched.append(residual is None)
        return torch.zeros(2, len(x.codes), 64)

    monkeypatch.setattr(decode_gemm, "launch", launch)
    monkeypatch.setattr(
        decode_gemm, "multiply", lambda x, *args: launched.append("multiply") or x.codes
    )
    x, weight, residual = make(5, 128, "cpu"), make(64, 128, "cpu"), torch.zeros(5, 64).bfloat16()
    fp8_linear(x, weight, residual[0], torch.bfloat16)
    parts, rest = fp8_linear_add(x, weight, None, residual)
    assert launched == ["multiply", False] and parts.shape == (2, 5, 64) and rest is residual
    found, rest = fp8_linear_add(x, weight, None, residual.half())
    assert found.shape == (5, 64) and found.dtype is torch.float16 and rest is not None
    fp8_linear(padded(make(257, 128, "cpu"), None), weight, None, torch.bfloat16)
    assert len(launched) == 2


@pytest.mark.usefixtures("exact_fp8")
def test_offsets_fit_into_32_bits(device, monkeypatch):
    """A step with more rows than that is multiplied in pieces."""
    x, weight = torch.randn(40, 128, device=device), torch.randn(64, 128, device=device)
    args = quantize(x), quantize(weight), None, torch.float16
    expected = fp8_tile_linear(*args)
    monkeypatch.setattr(fp8, "MAX_INT32", 18 * 128)
    assert torch.equal(fp8_tile_linear(*args), expected)


@pytest.mark.parametrize(
    ("features", "width", "parts"),
    [(24576, 4096, 1), (6144, 4096, 1), (4096, 12288, 2), (1024, 3072, 4), (1024, 384, 1)],
)
def test_parts_of_a_split(features, width, parts):
    assert choose_tile(16, features, width, 227 << 10) == (Tile(16, num_stages=6), parts)


def test_tiles_of_many_rows():
    large = 227 << 10
    assert choose_tile(128, 24576, 4096, large) == (Tile(128, num_stages=6), 1)
    assert choose_tile(128, 4096, 12288, large) == (Tile(128, num_stages=6), 2)
    assert choose_tile(128, 1024, 3072, large) == (Tile(64, num_stages=6), 4)
    assert choose_tile(128, 4096, 12288, 99 << 10) == (Tile(128, num_stages=4), 2)
