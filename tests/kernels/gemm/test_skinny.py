"""Skinny GEMMs and what is fused into them, against separate PyTorch operations."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.fp8 import dequantize, quantize, quantize_blocks
from nanovllm.kernels.gemm.skinny import (
    MAX_ROWS,
    skinny_linear,
    skinny_norm_and_linear,
    skinny_norm_linear,
)
from nanovllm.kernels.rms_norm import rms_norm_reference
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference
from nanovllm.layers.activation import SiluAndMul
from tests.kernels.oracle import poisoned
from tests.quantization.test_unquantized import Norm, make_weight

SHAPES = [
    (36, 300),
    (20, 2048),
    (33, 130),
    (7, 16),
    (20, 1100),
    (20, 3000),
    (20, 4500),
]  # out, in
DTYPES = [torch.float32, torch.float16]
EPS = 1e-5


def make(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype).to(device)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-4 if found.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# The interpreter takes its time: these run always, all combinations with the slow tests.
CHOSEN = [  # num_rows, has_bias, silu, dtype
    (1, False, True, torch.float32),
    (2, True, False, torch.float16),
    (8, True, True, torch.float32),
    (9, False, False, torch.float32),
    (MAX_ROWS, True, True, torch.float16),
]


@pytest.mark.parametrize(
    ("num_rows", "has_bias", "silu", "dtype"),
    [
        pytest.param(*case, marks=[] if case in CHOSEN else pytest.mark.slow)
        for case in itertools.product((1, 2, 8, 9, MAX_ROWS), (False, True), (False, True), DTYPES)
    ],
    ids=str,
)
def test_equals_a_plain_matmul(num_rows, has_bias, silu, dtype, device):
    for features, width in SHAPES:
        out = features * (1 + silu)
        x = make(num_rows, width, dtype=dtype, device=device)
        weight = make(out, width, dtype=dtype, device=device, scale=width**-0.5)
        bias = make(out, dtype=dtype, device=device) if has_bias else None
        expected = F.linear(x, weight, bias)
        if silu:
            expected = silu_and_mul_reference(expected)
        check(skinny_linear(x, weight, bias, silu), expected)


@pytest.mark.parametrize("all_flags", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_and_residual_before_it(dtype, all_flags, device):
    """With or without a residual, a bias and SwiGLU, each shape in one combination or in all."""
    flags = list(itertools.product((False, True), repeat=3))
    cases = itertools.product(SHAPES, flags) if all_flags else zip(SHAPES, flags[1:], strict=True)
    for (features, width), (has_residual, has_bias, silu) in cases:
        out = features * (1 + silu)
        x, residual = (make(1, width, dtype=dtype, device=device) for _ in range(2))
        weight = make(out, width, dtype=dtype, device=device, scale=width**-0.5)
        bias = make(out, dtype=dtype, device=device) if has_bias else None
        norm = make(width, dtype=dtype, device=device)
        total = x + residual if has_residual else x
        expected = F.linear(rms_norm_reference(total, norm, EPS)[0], weight, bias)
        if silu:
            expected = silu_and_mul_reference(expected)
        before = x.clone(), residual.clone()
        found, found_total = skinny_norm_linear(
            x, weight, bias, silu, norm, EPS, residual if has_residual else None
        )
        check(found, expected)
        assert torch.equal(found_total, total)
        assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_the_norm_is_returned_too(dtype, device):
    """By each program a part, also if there are more programs than columns, or just one."""
    for features, width in (*SHAPES, (4, 72), (600, 40)):
        x, residual = (make(1, width, dtype=dtype, device=device) for _ in range(2))
        weight = make(features, width, dtype=dtype, device=device, scale=width**-0.5)
        norm = make(width, dtype=dtype, device=device)
        for added in (None, residual):
            expected, total = rms_norm_reference(x, norm, EPS, added)
            with pytest.MonkeyPatch.context() as context:
                poisoned(context)
                normed, y, found_total = skinny_norm_and_linear(x, weight, None, norm, EPS, added)
            check(normed, expected)
            check(y, F.linear(expected, weight))
            assert torch.equal(found_total, total)


@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize("as_bits", [False, True])
def test_fp8_weights(as_bits, has_blocks, device):
    """With and without the fused operations, against the dequantised weight. All scales differ."""
    shapes = [(128, 2304), (256, 128)] if has_blocks else SHAPES[:4]
    function = quantize_blocks if has_blocks else quantize
    for (features, width), silu in itertools.product(shapes, (False, True)):
        sizes = torch.logspace(-1, 1, features)[:, None] * torch.logspace(-1, 1, width)
        rows = [function(torch.randn(features, width) * sizes * 10**i) for i in range(1 + silu)]
        codes, scales = (torch.cat(parts).to(device) for parts in zip(*rows, strict=True))
        weight = torch.cat([dequantize(part) for part in rows]).to(device)
        x, residual = (make(1, width, dtype=torch.float32, device=device) for _ in range(2))
        bias = make(len(weight), dtype=torch.float32, device=device)
        norm = make(width, dtype=torch.float32, device=device, scale=width**-0.5)
        codes = codes.view(torch.uint8) if as_bits else codes
        for fused in ((), (norm, EPS, residual)):
            total = x + residual if fused else x
            normed = rms_norm_reference(total, norm, EPS)[0] if fused else x
            expected = F.linear(normed, weight, bias)
            if silu:
                expected = silu_and_mul_reference(expected)
            none = (None, 0.0, None)
            found, found_total = skinny_norm_linear(x, codes, bias, silu, *(fused or none), scales)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max())
            assert torch.equal(found_total, total)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, MAX_ROWS])
@pytest.mark.parametrize(
    "model",
    [(1024, 2048, 1024, 3072), (4096, 4096, 1024, 12288), (2560, 4096, 1024, 9728)],
    ids=str,
)
def test_a_chain_of_layers_in_a_cuda_graph(model, num_rows):
    """Guards kernels that start before their input is there, with shapes of real models."""
    hidden, q_size, kv_size, inner = model
    draw = lambda out, width: make(  # noqa: E731
        out, width, dtype=torch.bfloat16, device="cuda", scale=width**-0.5
    )
    weights = [
        (draw(q_size + 2 * kv_size, hidden), draw(hidden, q_size),
         draw(2 * inner, hidden), draw(hidden, inner))
        for _ in range(6)
    ]  # fmt: skip
    norm = Norm(torch.ones(hidden, dtype=torch.bfloat16, device="cuda"), EPS)

    def run(x: torch.Tensor, plain: bool) -> torch.Tensor:
        total = torch.zeros_like(x)
        for qkv, o, gate_up, down in weights:
            if plain:
                total = total + x
                x = F.linear(rms_norm_reference(total, *norm)[0], qkv)[:, :q_size].contiguous()
                total = total + F.linear(x, o)
                x = F.linear(rms_norm_reference(total, *norm)[0], gate_up)
                x = F.linear(silu_and_mul_reference(x), down)
            else:
                x, total = make_weight(qkv).norm_matmul(x, total, norm, None)
                x = skinny_linear(x[:, :q_size].contiguous(), o, None)
                x, total = make_weight(gate_up).norm_matmul(x, total, norm, SiluAndMul())
                x = skinny_linear(x, down, None)
        return total + x

    x = make(num_rows, hidden, dtype=torch.bfloat16, device="cuda")
    run(x, plain=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(x, plain=False)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected = run(x, plain=True).float()
        error = (found.float() - expected).norm() / expected.norm()
        assert error < 0.02
