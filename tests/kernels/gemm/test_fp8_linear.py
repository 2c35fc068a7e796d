"""GEMMs of FP8 rows, against fp64 of the same quantised rows."""

import pytest
import torch

from nanovllm.kernels.fp8 import GROUP, Fp8Rows, quantize, quantize_groups
from nanovllm.kernels.gemm import fp8
from nanovllm.kernels.gemm.fp8 import (
    fp8_linear,
    fp8_linear_reference,
    fp8_tile_linear,
    num_parts,
    scaled_linear,
)
from tests.kernels.oracle import assert_as_good_as_eager

SHAPES = [(64, 128), (128, 1024)]  # out, in


def make(num_rows: int, width: int, device: str, has_groups: bool = False) -> Fp8Rows:
    rows = torch.randn(num_rows, width) * torch.logspace(-1, 1, num_rows)[:, None]
    if has_groups:
        rows *= torch.logspace(-1, 0, width // GROUP).repeat_interleave(GROUP)
    parts = quantize_groups(rows) if has_groups else quantize(rows)
    return Fp8Rows(*(part.to(device) for part in parts))


def exact(x: Fp8Rows, weight: Fp8Rows, bias: torch.Tensor | None) -> torch.Tensor:
    scales = [rows.scales.double().view(len(rows.codes), -1) for rows in (x, weight)]
    a, b = (
        rows.codes.double() * scale.repeat_interleave(rows.codes.size(1) // scale.size(1), 1)
        for rows, scale in zip((x, weight), scales, strict=True)
    )
    return a @ b.t() + (0 if bias is None else bias.double())


def check(linear, num_rows, features, width, has_bias, dtype, device, has_groups=False) -> None:
    x, weight = (make(n, width, device, has_groups) for n in (num_rows, features))
    bias = torch.randn(features, device=device).to(dtype) if has_bias else None
    eager = fp8_linear_reference(x, weight, bias, dtype)
    found = linear(x, weight, bias, dtype)
    assert_as_good_as_eager(found, eager, exact(x, weight, bias))


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize(("num_rows", "has_bias"), [(1, True), (3, False), (17, True), (65, True)])
def test_tiles(num_rows, has_bias, has_groups, device):
    for features, width in SHAPES:
        sizes = num_rows, features, width, has_bias
        check(fp8_tile_linear, *sizes, torch.float16, device, has_groups)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 65, 1000])
def test_groups_of_models(num_rows):
    for features, width in ((6144, 4096), (4096, 12288), (1024, 3072), (192, 384)):
        for dtype in (torch.float16, torch.bfloat16):
            check(fp8_tile_linear, num_rows, features, width, True, dtype, "cuda", True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 32, 64])
def test_tiles_of_models(num_rows, dtype):
    for features, width in ((6144, 4096), (4096, 4096), (4096, 12288), (1024, 3072)):
        check(fp8_tile_linear, num_rows, features, width, num_rows % 2 == 1, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [65, 1000])
def test_scaled_linear(num_rows):
    for features, width in ((6144, 4096), (4096, 12288), (576, 576)):
        for has_bias in (False, True):
            check(scaled_linear, num_rows, features, width, has_bias, torch.bfloat16, "cuda")


def test_choice(monkeypatch):
    called = []
    for name in ("fp8_tile_linear", "scaled_linear", "fp8_linear_reference"):
        monkeypatch.setattr(fp8, name, lambda *args, name=name: called.append(name))
    monkeypatch.setattr(fp8, "use_triton", lambda x: True)

    def choice(num_rows: int, features: int, width: int, dtype=torch.bfloat16) -> str:
        x, weight = (torch.empty(n, width, device="meta") for n in (num_rows, features))
        fp8_linear(Fp8Rows(x, x[:, 0]), Fp8Rows(weight, weight[:, 0]), None, dtype)
        return called.pop()

    assert choice(1, 64, 128) == choice(64, 4096, 4096) == "fp8_tile_linear"
    assert choice(65, 64, 128) == choice(65, 64, 576) == choice(65, 80, 128) == "scaled_linear"
    assert choice(1, 64, 576) == choice(64, 80, 128) == "fp8_linear_reference"
    assert choice(65, 64, 128, torch.float16) == "fp8_tile_linear"
    x, weight = (torch.empty(n, 64, device="meta") for n in (65, 64))
    fp8_linear(Fp8Rows(x, x[:, :1]), Fp8Rows(weight, weight[:, :1]), None, torch.bfloat16)
    assert called.pop() == "fp8_linear_reference", "_scaled_mm has no groups"
    assert choice(1, 64, 72) == choice(1, 72, 64) == "fp8_linear_reference"
    assert choice(65, 64, 64, torch.float16) == "fp8_linear_reference"


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
    [(24576, 4096, 1), (6144, 4096, 4), (4096, 12288, 8), (4096, 4096, 8), (1024, 384, 1)],
)
def test_parts_of_a_split(features, width, parts):
    assert num_parts(features, width) == parts
