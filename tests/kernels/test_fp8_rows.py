"""Rows quantised to FP8, alone and after a norm or an activation: bit for bit as in PyTorch."""

from typing import Any

import pytest
import torch

from nanovllm.kernels.fp8 import (
    FP8,
    Fp8Rows,
    pack_rows,
    quantize,
    quantize_groups,
    quantize_rows_triton,
    unpack_rows,
)
from nanovllm.kernels.rms_norm import fp8_rms_norm_triton, rms_norm_triton
from nanovllm.kernels.silu_and_mul import fp8_silu_and_mul_triton, silu_and_mul_triton

WIDTHS = [16, 72, 576, 1024]


def plain_quantizer(x: torch.Tensor) -> Fp8Rows:
    """Independent of the kernels' reference: each scale is the largest magnitude / 448."""
    rows = [row.float() for row in x.cpu()]
    scales = torch.stack([max(row.abs().max(), torch.tensor(1e-30)) / 448 for row in rows])
    codes = torch.stack(
        [
            (row * (1 / scale)).to(FP8).view(torch.uint8)
            for row, scale in zip(rows, scales, strict=True)
        ]
    )
    return Fp8Rows(codes, scales)


def assert_bits(found: Fp8Rows, x: torch.Tensor, group: int | None = None) -> None:
    if group is not None:  # each group is a row
        assert found.scales.shape == (len(x), x.size(1) // group)
        found, x = Fp8Rows(found.codes.view(-1, group), found.scales.flatten()), x.view(-1, group)
    expected = plain_quantizer(x)
    assert torch.equal(found.scales.cpu(), expected.scales)
    assert torch.equal(found.codes.view(torch.uint8).cpu(), expected.codes)


def make(num_rows: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows of many magnitudes, one of zeros, one with an outlier."""
    x = torch.randn(num_rows, width) * torch.logspace(-4, 4, num_rows)[:, None]
    x[0], x[1, 0] = 0, 3e4
    return x.to(dtype).to(device)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("width", WIDTHS)
def test_rows(width, dtype, device):
    x = make(5, width, dtype, device)
    assert_bits(quantize_rows_triton(x), x)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width, has_residual, dtype, device):
    """Quantised as the norm that is returned unquantised."""
    x, residual = (make(5, width, dtype, device) for _ in range(2))
    weight = torch.rand(width, device=device).to(dtype)
    args: Any = (x, weight, 1e-6, residual if has_residual else None)
    found, total = fp8_rms_norm_triton(*args)
    normed, expected_total = rms_norm_triton(*args)
    if device == "cuda" and dtype is torch.float32:  # threads may add squares in another order
        codes, scales = quantize(normed)
        torch.testing.assert_close(found.scales, scales, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.codes.float(), codes.float(), rtol=0.13, atol=2**-8)
    else:
        assert_bits(found, normed)
    assert torch.equal(total, expected_total)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("width", [*WIDTHS, 4100])
def test_activations(width, gelu, dtype, device):
    x = (torch.randn(3, 2 * width) * 3).to(dtype).to(device)
    assert_bits(fp8_silu_and_mul_triton(x, gelu), silu_and_mul_triton(x, gelu))


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize("width", [128, 384])
def test_groups(width, dtype, device):
    x, residual, both = (make(5, n, dtype, device) for n in (width, width, 2 * width))
    weight = torch.rand(width, device=device).to(dtype)
    assert_bits(quantize_rows_triton(x, 128), x, 128)
    found, _ = fp8_rms_norm_triton(x, weight, 1e-6, residual, 128)
    assert_bits(found, rms_norm_triton(x, weight, 1e-6, residual)[0], 128)
    both = both.clamp(-50, 50)
    assert_bits(fp8_silu_and_mul_triton(both, group=128), silu_and_mul_triton(both), 128)


PADDED = (5, 8), (32, 32), (33, 128), (70, 128), (128, 128), (129, 256), (256, 256), (257, 260)


@pytest.mark.usefixtures("exact_fp8")
@pytest.mark.parametrize(("num_rows", "padded"), PADDED)
def test_scales_of_groups_are_padded(num_rows, padded, device):
    x = make(num_rows, 256, torch.bfloat16, device)
    found = quantize_rows_triton(x, 128)
    assert found.scales.stride() == (1, padded)
    assert_bits(found, x, 128)


@pytest.mark.parametrize("has_groups", [False, True])
def test_packed_rows(has_groups):
    rows = (quantize_groups if has_groups else quantize)(torch.randn(6, 256))
    found = unpack_rows(pack_rows(rows), 2 if has_groups else 1)
    assert torch.equal(found.codes.view(torch.uint8), rows.codes.view(torch.uint8))
    assert torch.equal(found.scales.view_as(rows.scales), rows.scales)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 12288, 28672])
def test_wide_rows_of_many_tokens(width):
    x = torch.randn(300, 2 * width, device="cuda", dtype=torch.bfloat16)
    assert_bits(quantize_rows_triton(x), x)
    assert_bits(fp8_silu_and_mul_triton(x), silu_and_mul_triton(x))
