"""One row times an FP8 weight, against fp64 of the dequantised weight."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.fp8 import FP8, Fp8Rows, dequantize, quantize, quantize_blocks
from nanovllm.kernels.gemm.fp8_gemv import fp8_gemv
from nanovllm.kernels.rms_norm import rms_norm_reference
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference
from tests.kernels.oracle import assert_as_good_as_eager

EPS = 1e-6
# out, in: less than a slab, no multiple of one, several tiles, more than a program's rows.
SHAPES = [(24, 16), (7, 200), (40, 576), (1040, 1100), (33, 4608)]
SHAPES_OF_BLOCKS = [(128, 128), (256, 4736), (1152, 384)]
MODELS = [(6144, 4096), (4096, 12288), (5120, 2048), (2048, 4096), (12288, 4096), (1024, 3072)]


def make(features: int, width: int, silu: bool, has_blocks: bool, device: str) -> Fp8Rows:
    """A weight whose scales all differ."""
    sizes = torch.logspace(-0.3, 0.3, features)[:, None] * torch.logspace(-0.3, 0.3, width)
    function = quantize_blocks if has_blocks else quantize
    parts = [
        function(torch.randn(features, width) * sizes * width**-0.5 * 2**i) for i in range(1 + silu)
    ]
    return Fp8Rows(*(torch.cat(part).to(device) for part in zip(*parts, strict=True)))


def compute(x, weight, bias, silu, norm, residual):
    """What the kernel fuses, in x's dtype."""
    if residual is not None:
        x = x + residual
    if norm is not None:
        x = rms_norm_reference(x, norm, EPS)[0]
    y = F.linear(x, weight, bias)
    return silu_and_mul_reference(y) if silu else y


def check(features, width, silu, fused, has_blocks, dtype, device, as_bits=False) -> None:
    weight = make(features, width, silu, has_blocks, device)
    plain = dequantize(weight, torch.float64)
    x, residual, norm = (torch.randn(n, width).to(dtype).to(device) for n in (1, 1, 1))
    bias = torch.randn(len(plain)).to(dtype).to(device) if fused else None
    norm, residual = (norm[0], residual) if fused else (None, None)
    codes = weight.codes.view(torch.uint8) if as_bits else weight.codes
    found, total = fp8_gemv(x, codes, weight.scales, bias, silu, norm, EPS, residual)
    assert torch.equal(total, x if residual is None else x + residual)
    doubles = [None if t is None else t.double() for t in (x, bias, norm, residual)]
    if residual is not None:  # the sum is rounded
        doubles = [total.double(), *doubles[1:3], None]
    exact = compute(doubles[0], plain, doubles[1], silu, *doubles[2:])
    eager = compute(x, plain.to(dtype), bias, silu, norm, residual)
    assert_as_good_as_eager(found, eager, exact)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("as_bits", [False, True], ids=["fp8", "bits"])
def test_rows(as_bits, dtype, device):
    for (features, width), silu in itertools.product(SHAPES, (False, True)):
        check(features, width, silu, silu, False, dtype, device, as_bits)
        check(features, width, silu, not silu, False, dtype, device, as_bits)


@pytest.mark.usefixtures("exact_fp8")
def test_blocks(dtype, device):
    for (features, width), silu in itertools.product(SHAPES_OF_BLOCKS, (False, True)):
        check(features, width, silu, silu, True, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("has_blocks", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("model_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_models(model_dtype, has_blocks):
    for (features, width), silu in itertools.product(MODELS, (False, True)):
        check(features, width, silu, silu, has_blocks, model_dtype, "cuda")


@pytest.mark.usefixtures("exact_fp8")
def test_each_number(dtype, device):
    """All 254 numbers, in each position of a slab, multiplied by 1 or -1 alone."""
    bits = torch.tensor([code for code in range(256) if code % 128 != 127], dtype=torch.uint8)
    codes = bits.view(FP8).expand(64, -1).t().contiguous().to(device)  # [254, 64]
    scales = torch.ones(len(codes), device=device)
    for column in range(64):
        x = torch.zeros(1, 64, dtype=dtype, device=device)
        x[0, column] = (-1) ** column
        found, _ = fp8_gemv(x, codes, scales, None)
        expected = codes[:, column].float() * (-1) ** column
        assert torch.equal(found[0].float(), expected)
