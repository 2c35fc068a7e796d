"""What is asked for ahead: the right weights, and nothing else changes."""

import pytest
import torch

from nanovllm.kernels import prefetch as module
from nanovllm.kernels.compat import tl, triton
from nanovllm.kernels.prefetch import MAX_BYTES, MAX_ROWS, PIECE, num_columns_ahead
from nanovllm.kernels.rms_norm import rms_norm_triton
from nanovllm.kernels.silu_and_mul import silu_and_mul_triton


@triton.jit
def write_ones(address, num_bytes):
    """In place of the prefetch: shows where it would be."""
    column = tl.arange(0, 1024)
    tl.store(address[:, None] + column, 1.0, mask=(column * 2)[None, :] < num_bytes[:, None])


@triton.jit
def share_kernel(
    ptr, num_rows, width, columns, NUM_SHARES: tl.constexpr, PIECE: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0)
    module.prefetch_share(ptr, num_rows, width, columns, share, NUM_SHARES, PIECE, THREADS)


@pytest.mark.parametrize("shape", [(1, 8), (100, 1024), (33, 2056), (7, 5000)])
def test_shares_make_up_the_first_columns(shape, monkeypatch):
    monkeypatch.setattr(module, "prefetch", write_ones)
    num_rows, width = shape
    for columns in (8, width // 16 * 8 or 8, width):
        weight = torch.zeros(num_rows + 1, width, dtype=torch.float16)
        share_kernel[(5,)](weight, num_rows, width, columns, 5, PIECE, 32)
        expected = torch.zeros_like(weight)
        expected[:-1, :columns] = 1
        assert torch.equal(weight, expected)


def test_how_much_is_asked_for():
    weight = torch.empty(4096, 1024, dtype=torch.bfloat16)
    assert num_columns_ahead(256, weight, pdl=True) == 1024
    assert num_columns_ahead(MAX_ROWS + 1, weight, pdl=True) == 0
    assert num_columns_ahead(256, weight, pdl=False) == 0
    assert num_columns_ahead(256, weight.float(), pdl=True) == 0
    assert num_columns_ahead(256, weight[:, :1001].contiguous(), pdl=True) == 0
    assert num_columns_ahead(256, None, pdl=True) == 0
    large = torch.empty(24576, 4096, dtype=torch.bfloat16, device="meta")
    columns = num_columns_ahead(256, large, pdl=True)
    assert columns % 8 == 0 and MAX_BYTES * 0.9 < columns * 2 * 24576 <= MAX_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [17, 256, MAX_ROWS])
def test_results_stay_the_same(num_rows):
    for width, out in ((1024, 4096), (4096, 24576), (1000, 96), (3072, 1024)):
        x, residual = torch.randn(2, num_rows, width, dtype=torch.bfloat16, device="cuda").unbind()
        norm = torch.rand(width, dtype=torch.bfloat16, device="cuda")
        then = torch.randn(out, width, dtype=torch.bfloat16, device="cuda")
        pairs = torch.cat((x, residual), 1)
        for _ in range(3):
            ahead = rms_norm_triton(x, norm, 1e-6, residual, then)
            plain = rms_norm_triton(x, norm, 1e-6, residual)
            assert all(torch.equal(a, b) for a, b in zip(ahead, plain, strict=True))
            assert torch.equal(silu_and_mul_triton(pairs, then), silu_and_mul_triton(pairs))
