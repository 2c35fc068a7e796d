"""The kernels that a batch-invariant engine uses on a CPU compute each row by itself."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.kernels.moe.experts import (
    INVARIANT_OPS,
    ExpertWeights,
    clamped_swiglu,
    experts_reference,
    invariant_clamped_swiglu,
)
from nanovllm.kernels.moe.route import route_reference
from nanovllm.kernels.rms_norm import rms_norm_reference
from nanovllm.kernels.sampling.fixed_point import from_fixed_point, to_fixed_point
from nanovllm.kernels.sampling.logprobs import top_logprobs_reference, top_logprobs_triton
from nanovllm.kernels.sampling.processed_logits import processed_logits
from nanovllm.kernels.sampling.sample_reference import sample_reference, sample_shard_reference
from nanovllm.kernels.sampling.sampling_row import SAMPLING_ROW
from nanovllm.kernels.silu_and_mul import (
    gelu_tanh_and_mul_reference,
    invariant_gelu_tanh_and_mul_reference,
    invariant_silu_and_mul_reference,
    silu_and_mul_reference,
)
from tests.kernels.conftest import DEVICE
from tests.kernels.rows import NUM_ROWS, assert_rows_are_independent, same_bits

SLOW = pytest.mark.slow
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Each activation, and its reference.
ACTIVATIONS = {
    "silu": (invariant_silu_and_mul_reference, silu_and_mul_reference),
    "gelu": (invariant_gelu_tanh_and_mul_reference, gelu_tanh_and_mul_reference),
    "clamped": (
        partial(invariant_clamped_swiglu, limit=3.0, alpha=1.7),
        partial(clamped_swiglu, limit=3.0, alpha=1.7),
    ),
}


@DTYPES
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("width", [13, 3001])
def test_activations(name: str, width: int, dtype: torch.dtype):
    """F.silu fails this with three thousand columns, where threads divide a row."""
    function, reference = ACTIVATIONS[name]
    x = (3 * torch.randn(NUM_ROWS, 2 * width)).to(dtype)
    assert_rows_are_independent(function, x)
    exact = reference(x.double())
    error, eager = ((out.double() - exact).abs().max() for out in (function(x), reference(x)))
    assert error <= 2 * eager
    extreme = torch.tensor([[-200.0, -1e4, 200.0, 1e4, 1, 1, 1, 1]]).to(dtype)
    torch.testing.assert_close(function(extreme), reference(extreme))


@DTYPES
@pytest.mark.parametrize("width", [8, 33, 896, 4096])
def test_norms(width: int, dtype: torch.dtype):
    weight = torch.randn(width)
    x, residual = torch.randn(2, NUM_ROWS, width).to(dtype)
    for w in (weight, weight.to(dtype)):
        norm = partial(rms_norm_reference, weight=w, eps=1e-6)
        assert_rows_are_independent(lambda x, r, norm=norm: norm(x, residual=r), x, residual)


@pytest.mark.parametrize("width", [8, 24, 64])
def test_norms_of_heads(width: int):
    weight = torch.randn(width)

    def norm(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(1, (-1, width))[:, 1:4]  # a part of the projection's output
        return rms_norm_reference(heads, weight, 1e-6)[0]

    assert_rows_are_independent(norm, torch.randn(NUM_ROWS, 5 * width))


@DTYPES
@pytest.mark.parametrize(
    ("num_experts", "top_k", "limit"), [(8, 2, None), (5, 3, 2.0), (4, 1, None)]
)
def test_mixtures_of_experts(num_experts: int, top_k: int, limit: Any, dtype: torch.dtype):
    """Also of tokens that all have the same experts, and of routers with equal logits."""
    weights = torch.randn(num_experts, 96, 40), torch.randn(num_experts, 40, 48)
    biases = torch.randn(num_experts, 96), torch.randn(num_experts, 40)
    experts = ExpertWeights(*(tensor.to(dtype) for tensor in (*weights, *biases)), limit, 1.5)
    x, residual = torch.randn(2, NUM_ROWS, 40).to(dtype)
    logits = torch.randn(NUM_ROWS, num_experts).to(dtype)
    logits[15:25] = logits[15]
    logits[30:] = 0

    def mix(x: torch.Tensor, residual: torch.Tensor, logits: torch.Tensor, ops: Any) -> Any:
        routing = route_reference(logits, top_k, True)
        return (
            experts_reference(x, experts, routing, residual, *ops),
            routing.topk_weights,
            routing.topk_ids,
        )

    assert_rows_are_independent(partial(mix, ops=[INVARIANT_OPS]), x, residual, logits)
    found, expected = (mix(x, residual, logits, ops)[0] for ops in ([INVARIANT_OPS], []))
    tolerance = 0.1 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert_rows_are_independent(lambda logits: route_reference(logits, top_k, False)[:2], logits)


def rows_of(**fields: Any) -> torch.Tensor:
    rows = np.zeros((NUM_ROWS, 1), SAMPLING_ROW)
    defaults = {"temperature": 0.8, "top_p": 1.0, "seed": np.arange(NUM_ROWS)[:, None]}
    for name, value in (defaults | fields).items():
        rows[name] = value
    return torch.from_numpy(rows.view(np.int32))


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.9},
        pytest.param({}, marks=SLOW),
        pytest.param({"temperature": 0}, marks=SLOW),
        pytest.param({"top_k": 50, "top_p": 0.7, "min_p": 1e-3}, marks=SLOW),
    ],
)
def test_sampling_and_processed_logits(fields: dict[str, float]):
    """A vocabulary of more than 32,768 tokens, which threads divide."""
    logits, rows = torch.randn(NUM_ROWS, 33_003) * 2, rows_of(**fields)
    assert_rows_are_independent(sample_reference, logits, rows)
    tokens = sample_reference(logits, rows)
    processed = partial(processed_logits, truncates=True)
    assert_rows_are_independent(processed, logits, rows, tokens)


def test_a_shard_samples_each_row_by_itself():
    shard = partial(sample_shard_reference, num_tokens=1000, first_token=256)
    assert_rows_are_independent(shard, torch.randn(NUM_ROWS, 1024), rows_of())


@DTYPES
@pytest.mark.parametrize(
    "function", [top_logprobs_reference, pytest.param(top_logprobs_triton, marks=SLOW)]
)
def test_log_probabilities(function: Any, dtype: torch.dtype):
    """Rounded logits have many ties."""
    device = DEVICE if function is top_logprobs_triton else "cpu"
    logits = (torch.randn(NUM_ROWS, 1003, device=device) * 3).to(dtype)
    tokens = torch.randint(1003, (NUM_ROWS,), device=device)
    assert_rows_are_independent(partial(function, k=20), logits, tokens)


@pytest.mark.parametrize("function", [top_logprobs_reference, top_logprobs_triton])
def test_fewer_log_probabilities_are_the_first_of_more(function: Any):
    """A step computes as many as the request that asks for the most. With torch.topk, which of
    several equal tokens a request got depended on that."""
    device = DEVICE if function is top_logprobs_triton else "cpu"
    logits = torch.randint(0, 4, (NUM_ROWS, 1003), device=device).bfloat16()
    logits[0] = 0
    logits[1, ::2] = -torch.inf
    tokens = torch.randint(1003, (NUM_ROWS,), device=device)
    all_ids, all_logprobs, _ = function(logits, tokens, 1003)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(all_ids[:, 1:], order)
    for k in (1, 2, 5, 20, 300):
        ids, logprobs, _ = function(logits, tokens, k)
        assert torch.equal(ids, all_ids[:, : k + 1])
        assert same_bits(logprobs, all_logprobs[:, : k + 1])


def test_sums_of_fixed_point_numbers():
    weights = torch.rand(100_000).pow(8)
    found = from_fixed_point(to_fixed_point(weights).sum())
    torch.testing.assert_close(found.double(), weights.double().sum(), rtol=1e-7, atol=0)
    permuted = weights[torch.randperm(len(weights))]
    assert to_fixed_point(permuted).sum() == to_fixed_point(weights).sum()
    large = torch.full((1 << 13,), 128.0)  # groups of 128 tokens whose weight is 1
    assert from_fixed_point(to_fixed_point(large).sum()) == 1 << 20
