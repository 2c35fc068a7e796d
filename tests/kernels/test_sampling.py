import math

import pytest
import torch

from nanovllm.kernels.sampling import sample_triton

# Draws of the chi-square tests; the interpreter runs one program at a time.
NUM_DRAWS = 200_000 if torch.cuda.is_available() else 1_000


def test_greedy_rows_take_the_largest_logit(dtype, device):
    logits = torch.randn(5, 20_011, device=device).to(dtype)
    tokens = sample_triton(logits, torch.zeros(5, device=device), seed=1)
    # Half precision has ties: any token with the largest value will do.
    assert torch.equal(logits.gather(1, tokens[:, None]).squeeze(1), logits.amax(-1))


def test_masked_tokens_are_never_drawn(device):
    logits = torch.full((64, 9000), -float("inf"), device=device)
    logits[:, [3, 8191, 8999]] = 0.0
    tokens = sample_triton(logits, torch.ones(64, device=device), seed=2)
    assert set(tokens.tolist()) <= {3, 8191, 8999}


def test_draws_depend_on_the_seed_and_the_row_alone(device):
    logits = torch.randn(4, 1000, device=device)
    temperatures = torch.ones(4, device=device)
    first = sample_triton(logits, temperatures, seed=3)
    assert torch.equal(first, sample_triton(logits, temperatures, seed=3))
    draws = {tuple(sample_triton(logits, temperatures, seed=s).tolist()) for s in range(20)}
    assert len(draws) > 10


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature, device):
    """Chi-square over 12 tokens: 11 degrees of freedom, of which 31.3 cuts off 1 in 1,000. The
    seed is fixed, so a pass stays a pass."""
    logits = torch.linspace(-2, 2, 12, device=device)
    rows = logits.repeat(NUM_DRAWS // 10, 1)
    temperatures = torch.full((rows.size(0),), temperature, device=device)
    tokens = torch.cat([sample_triton(rows, temperatures, seed=s) for s in range(10)])
    expected = torch.softmax(logits.double() / temperature, -1) * tokens.numel()
    counts = torch.bincount(tokens, minlength=12).double()
    assert ((counts - expected) ** 2 / expected).sum() < 31.3


def test_rare_tokens_come_as_often_as_they_should(device):
    """10,000 tokens of 1e-6 each beside one of 0.99: noise too coarse near 0 would lose or
    favour them. The count is binomial; 5 standard deviations are 1 in a million."""
    n = 2_000 if torch.cuda.is_available() else 100
    logits = torch.full((n, 10_001), math.log(1e-6), device=device)
    logits[:, 0] = math.log(0.99)
    tokens = torch.cat(
        [sample_triton(logits, torch.ones(n, device=device), seed=s) for s in range(10)]
    )
    rare = (tokens != 0).double().sum().item()
    expected = 10 * n * 0.01
    assert abs(rare - expected) < 5 * math.sqrt(expected)
