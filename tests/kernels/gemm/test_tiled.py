"""Tiled GEMMs of 17 to 64 rows against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.gemm import decode_gemm
from nanovllm.kernels.gemm.tiled import tile_linear
from nanovllm.kernels.rms_norm import rms_norm, rms_norm_reference
from nanovllm.quantization.unquantized import choose_kernel

SHAPES = [(64, 128), (128, 512), (192, 1024), (64, 1536), (4096, 256)]  # out, in
EPS = 1e-5


def make(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype).to(device)


@pytest.mark.parametrize(
    ("num_rows", "has_bias"), [(17, True), (32, False), (33, True), (64, False)], ids=str
)
def test_equals_a_plain_matmul(num_rows, has_bias, device):
    for features, width in SHAPES:
        x = make(num_rows, width, dtype=torch.float16, device=device)
        weight = make(features, width, dtype=torch.float16, device=device, scale=width**-0.5)
        bias = make(features, dtype=torch.float16, device=device) if has_bias else None
        found = tile_linear(x, weight, bias)
        torch.testing.assert_close(found, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [17, 32, 50, 64])
def test_a_chain_of_layers_in_a_cuda_graph(num_rows, monkeypatch):
    """Guards kernels that start before their input is there; and that a graph's results are those
    of separate launches, bit by bit."""
    hidden, inner = 1024, 3072
    make_weight = lambda out, width: make(  # noqa: E731
        out, width, dtype=torch.bfloat16, device="cuda", scale=width**-0.5
    )
    weights = [
        (make_weight(inner, hidden), make_weight(hidden, inner), make_weight(4096, hidden))
        for _ in range(6)
    ]
    norm = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    monkeypatch.setattr(decode_gemm, "is_fastest", lambda *_: False)  # as on other GPUs than Hopper
    for weight in (weight for layer in weights for weight in layer):
        x = weight.new_empty(num_rows, weight.size(1))
        assert choose_kernel("matmul", x, weight, None) is tile_linear

    def run(x: torch.Tensor, plain: bool) -> torch.Tensor:
        multiply = F.linear if plain else lambda x, weight: tile_linear(x, weight, None)
        total = torch.zeros_like(x)
        for up, down, wide in weights:
            for first, second in ((up, down), (wide, wide.t()[:, :inner].contiguous())):
                if plain:
                    total = total + x
                    y = rms_norm_reference(total, norm, EPS)[0]
                else:
                    y, total = rms_norm(x, norm, EPS, total)
                x = multiply(multiply(y, first)[:, :inner].contiguous(), second)
        return total + x

    x = make(num_rows, hidden, dtype=torch.bfloat16, device="cuda")
    run(x, plain=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(x, plain=False)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(found, run(x, plain=False))
        expected = run(x, plain=True).float()
        assert (found.float() - expected).norm() / expected.norm() < 0.02
