"""The batch-invariant matmul of CPUs."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.gemm import onednn
from nanovllm.kernels.gemm.onednn import (
    ROWS,
    check_row_blocks,
    pack_for_row_blocks,
    row_block_linear,
)
from tests.kernels.rows import NUM_ROWS, assert_rows_are_independent, same_bits

# in, out; also sizes of models.
SHAPES = [(64, 48), (100, 37), (1, 5), (896, 1200), (4864, 100), (1024, 3001)]
MODELS = [(12288, 64), (3072, 1024), (8192, 1024), (1024, 40_000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("width", "out"), [*SHAPES, *(pytest.param(*m, marks=pytest.mark.slow) for m in MODELS)]
)
def test_rows_are_independent(width: int, out: int, dtype: torch.dtype):
    weight, bias = torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    x = torch.randn(NUM_ROWS, width).to(dtype)
    packed = pack_for_row_blocks(weight)
    check_row_blocks(packed)
    assert_rows_are_independent(lambda x: row_block_linear(x, packed, bias), x)
    # The same in another place of memory, and with a weight that is packed for the call.
    shifted = torch.empty(NUM_ROWS * width + 3).to(dtype)[3:].view(NUM_ROWS, width).copy_(x)
    expected = row_block_linear(x, packed)
    assert same_bits(row_block_linear(shifted, packed), expected)
    assert same_bits(row_block_linear(x, weight), expected)
    exact = F.linear(x.double(), weight.double())
    tolerance = width * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
    assert (expected - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("num_rows", [0, 1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS])
def test_any_number_of_rows(num_rows: int):
    x, weight = torch.randn(num_rows, 12), torch.randn(7, 12)
    torch.testing.assert_close(row_block_linear(x, weight), F.linear(x, weight))


def test_a_matmul_that_depends_on_the_position_is_refused(monkeypatch: pytest.MonkeyPatch):
    multiply = onednn._multiply

    def uneven(block: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = multiply(block, weight)
        out[-3:] *= 1 + 2**-20
        return out

    weight = pack_for_row_blocks(torch.randn(7, 12))
    check_row_blocks(weight)
    monkeypatch.setattr(onednn, "_multiply", uneven)
    with pytest.raises(ValueError, match="weight of 7 x 12 sums in an order"):
        check_row_blocks(weight)


def test_a_matmul_that_depends_on_the_threads_is_refused(monkeypatch: pytest.MonkeyPatch):
    multiply, threads = onednn._multiply, torch.get_num_threads()

    def uneven(block: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return multiply(block, weight) * (1 + 2**-20 * torch.get_num_threads())

    monkeypatch.setattr(onednn, "_multiply", uneven)
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="set OMP_NUM_THREADS=1"):
            check_row_blocks(pack_for_row_blocks(torch.randn(7, 12)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
