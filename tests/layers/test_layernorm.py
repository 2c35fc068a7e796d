"""RMSNorm against transformers' module and the plain formula in fp64."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.all_heads_norm import AllHeadsRMSNorm, mean_of_halves
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.quantization.base import use_batch_invariance
from nanovllm.utils.distributed import TPGroup, use_tp_group

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 8), (5, 123), (3, 4, 40), (0, 16)]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def build(size: int, dtype: torch.dtype, eps: float = 1e-6) -> RMSNorm:
    norm = RMSNorm(size, eps).to(dtype).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    return norm


def reference(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """In fp64."""
    x, weight = x.double(), norm.weight.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Two roundings of the dtype: before the weight and after it."""
    return {"rtol": 3 * torch.finfo(dtype).eps, "atol": 0.0}


@each_dtype
@each_shape
def test_equals_transformers(dtype, shape):
    norm = build(shape[-1], dtype)
    oracle = Qwen3RMSNorm(shape[-1], norm.eps).to(dtype).requires_grad_(False)
    oracle.weight.copy_(norm.weight)
    x = torch.randn(shape, dtype=dtype)
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x), oracle(x))


@each_dtype
@each_shape
def test_equals_the_formula(dtype, shape):
    norm = build(shape[-1], dtype)
    x = torch.randn(shape, dtype=dtype)
    torch.testing.assert_close(norm(x).double(), reference(x, norm), **tolerance(dtype))


@each_dtype
@each_shape
def test_residual_is_added_first(dtype, shape):
    norm = build(shape[-1], dtype)
    x, residual = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    normed, (again, total) = norm(x, residual), rms_norm(x, norm.weight, norm.eps, residual)
    assert normed.dtype == total.dtype == dtype and torch.equal(normed, again)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.double(), reference(total, norm), **tolerance(dtype))


@each_dtype
def test_inputs_stay_as_they_are(dtype):
    """Guards nano-vLLM's in-place arithmetic, which wrote into x itself wherever the cast to
    fp32 was no copy."""
    norm = build(32, dtype)
    x, residual = torch.randn(4, 32, dtype=dtype), torch.randn(4, 32, dtype=dtype)
    copies = x.clone(), residual.clone(), norm.weight.clone()
    outputs = [norm(x), *rms_norm(x, norm.weight, norm.eps, residual)]
    assert all(map(torch.equal, (x, residual, norm.weight), copies))
    for output in outputs:  # nor does a result share their memory
        output.fill_(7)
    assert all(map(torch.equal, (x, residual, norm.weight), copies))


@each_dtype
def test_rows_do_not_affect_each_other(dtype):
    norm = build(16, dtype)
    x = torch.randn(6, 16, dtype=dtype)
    whole, poisoned = norm(x), x.clone()
    poisoned[3] = torch.nan
    rows = [0, 1, 2, 4, 5]
    assert torch.equal(norm(poisoned)[rows], whole[rows])


def test_strided_input():
    """Heads cut out of a packed q, k, v are not contiguous."""
    norm = build(8, torch.float32)
    heads = torch.randn(5, 6, 8)[:, 2:4]
    assert torch.equal(norm(heads), norm(heads.contiguous()))


def test_squares_do_not_overflow_fp16():
    """300^2 is over fp16's largest number; fp32 inside has room."""
    norm = build(64, torch.float16)
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    torch.testing.assert_close(norm(x).double(), reference(x, norm), **tolerance(torch.float16))


def test_eps_counts_for_small_inputs():
    norm = build(16, torch.float32, eps=1e-2)
    x = torch.full((1, 16), 1e-2)
    torch.testing.assert_close(norm(x).double(), reference(x, norm), **tolerance(torch.float32))
    assert torch.equal(norm(torch.zeros(1, 16)), torch.zeros(1, 16))


@each_dtype
@pytest.mark.parametrize(
    ("oracle_class", "offset"), [(Gemma3RMSNorm, 1.0), (Olmo2RMSNorm, 0.0)], ids=["gemma", "olmo"]
)
def test_fp32_weights_equal_transformers(oracle_class, offset, dtype):
    """Bit for bit, also when loaded twice: the offset is not added twice."""
    oracle = oracle_class(40, eps=1e-5).to(dtype).requires_grad_(False)
    norm = RMSNorm(40, 1e-5, torch.float32, offset).requires_grad_(False)
    x = (3 * torch.randn(7, 40)).to(dtype)
    for _ in range(2):
        oracle.weight.uniform_(-0.5, 0.5)
        norm.weight.weight_loader(norm.weight, oracle.weight)
        assert torch.equal(norm(x), oracle(x))


class OtherRank:
    """A group of two ranks, the other of which has this mean square."""

    def __init__(self, rank: int, mean_square: torch.Tensor) -> None:
        self.rank, self.size, self.mean_square = rank, 2, mean_square

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mean_square


@pytest.mark.parametrize("num_heads", [4, 1])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_norm_over_all_heads_is_that_over_all_ranks(num_heads, invariant):
    """Also where both ranks have a copy of the only head."""
    x, weight = torch.randn(5, num_heads, 8), torch.rand(num_heads * 8) + 0.5
    whole = AllHeadsRMSNorm(num_heads, 8, 1e-3).requires_grad_(False)
    whole.weight.weight_loader(whole.weight, weight)
    expected = Olmo2RMSNorm(num_heads * 8, 1e-3).requires_grad_(False)
    expected.weight.copy_(weight)
    torch.testing.assert_close(whole(x), expected(x.flatten(1)).view(x.shape))
    halves = x.chunk(2, 1) if num_heads > 1 else (x, x)
    squares = [half.flatten(1).square().mean(-1, keepdim=True) for half in halves]
    for rank in range(2):
        with use_tp_group(TPGroup(rank, 2)), use_batch_invariance(invariant):
            norm = AllHeadsRMSNorm(num_heads, 8, 1e-3).requires_grad_(False)
        norm.weight.weight_loader(norm.weight, weight)
        norm.tp = OtherRank(rank, squares[1 - rank])
        part = whole(x).chunk(2, 1)[rank] if num_heads > 1 else whole(x)
        torch.testing.assert_close(norm(halves[rank]), part)


def test_a_mean_of_halves_adds_the_second_half_to_the_first():
    """2^24 + 1 rounds to 2^24 in fp32, so each other order has another sum."""
    x = torch.tensor([[2.0**24, 1, -(2.0**24), 0, 0], [1, 2, 3, 4, 5]])
    assert mean_of_halves(x).tolist() == [[pytest.approx(0.2)], [3]]
