"""The sampler's tokens against argmax and against the softmax they must be drawn from."""

import pytest
import torch

from nanovllm.layers.sampler import Sampler

NUM_DRAWS = 40_000
# 8 tokens of graded odds, and one that must never come.
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.3, 0.0, -0.5, -1.0, -1.2, -torch.inf])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(logits: torch.Tensor, temperature: float, num_draws: int = NUM_DRAWS) -> torch.Tensor:
    """Many draws from one distribution, as rows of one batch."""
    temperatures = torch.full((num_draws,), temperature)
    return Sampler()(logits.expand(num_draws, -1), temperatures, generator())


def chi_square_p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Odds that draws from ``probs`` stray as far as ``counts`` did."""
    expected = counts.sum() * probs
    assert expected.min() > 5, "too few draws for the chi-square approximation"
    statistic = ((counts - expected).square() / expected).sum()
    degrees = torch.tensor((len(probs) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("temperatures", [None, torch.zeros(16)], ids=["none", "zeros"])
def test_greedy_is_argmax(dtype, temperatures):
    logits = torch.randn(16, 1000).to(dtype)
    tokens = Sampler()(logits, temperatures, generator())
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, logits.argmax(-1))


def test_greedy_draws_no_random_numbers():
    """A batch without sampling leaves the seed's sequence where it was."""
    used, fresh = generator(), generator()
    Sampler()(torch.randn(4, 50), None, used)
    assert torch.equal(used.get_state(), fresh.get_state())


def test_greedy_rows_of_a_mixed_batch_are_argmax():
    logits = torch.randn(64, 200)
    temperatures = torch.tensor([0.0, 1.0, 0.0, 50.0]).repeat(16)
    tokens = Sampler()(logits, temperatures, generator())
    is_argmax = tokens == logits.argmax(-1)
    assert is_argmax[temperatures == 0].all()
    assert not is_argmax[temperatures == 50].all()


@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.7, 20.0])
def test_draws_follow_the_softmax(temperature):
    """A chi-square test of 40,000 draws over 8 tokens. A right sampler strays this far for one
    seed in a million; the seed is fixed, so it either always does or never. One that ignores
    the temperature, or draws a token 10 % too often, has no chance to pass."""
    counts = draw(LOGITS, temperature).bincount(minlength=len(LOGITS)).double()
    probs = torch.softmax(LOGITS.double() / temperature, -1)
    assert counts[-1] == 0
    assert chi_square_p_value(counts[:-1], probs[:-1]) > 1e-6


def test_each_row_has_its_own_temperature():
    """Two temperatures in alternate rows, each held to its own softmax; false alarms as above,
    one seed in a million for either."""
    temperatures = torch.tensor([0.5, 2.0]).repeat(NUM_DRAWS)
    tokens = Sampler()(LOGITS.expand(2 * NUM_DRAWS, -1), temperatures, generator())
    for i, temperature in enumerate((0.5, 2.0)):
        counts = tokens[i::2].bincount(minlength=len(LOGITS)).double()
        probs = torch.softmax(LOGITS.double() / temperature, -1)
        assert chi_square_p_value(counts[:-1], probs[:-1]) > 1e-6


def test_the_check_itself_can_fail():
    """Draws at temperature 1 are not taken for draws at 1.1."""
    counts = draw(LOGITS, 1.0).bincount(minlength=len(LOGITS)).double()
    probs = torch.softmax(LOGITS.double() / 1.1, -1)
    assert chi_square_p_value(counts[:-1], probs[:-1]) < 1e-6


def test_a_large_vocabulary_is_drawn_from_evenly():
    """16,000 equal tokens: draws must not cluster. Of 1,000 draws about 31 repeat an earlier
    one (nearly Poisson); fewer than 7 or more than 65 come for one seed in a million."""
    tokens = draw(torch.zeros(16_000), 1.0, num_draws=1_000)
    num_repeated = len(tokens) - len(tokens.unique())
    assert 7 <= num_repeated <= 65
    assert 6_500 < tokens.double().mean() < 9_500  # 8,000 +- 10 standard errors


def test_same_seed_gives_the_same_tokens():
    logits, temperatures = torch.randn(256, 100), torch.ones(256)
    first, again, other = (Sampler()(logits, temperatures, generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 1000.0])
def test_masked_tokens_are_never_drawn(temperature):
    logits = torch.full((500,), -torch.inf)
    logits[[7, 123, 499]] = torch.tensor([0.0, 1.0, 0.5])
    tokens = draw(logits, temperature, num_draws=5_000)
    assert set(tokens.tolist()) <= {7, 123, 499}


def test_a_lone_token_is_always_drawn():
    """Also where the noise is at its largest: p / noise stays above the zeros of the rest."""
    logits = torch.full((300,), -torch.inf)
    logits[42] = -1e4
    assert (draw(logits, 1.0, num_draws=20_000) == 42).all()


def test_zero_noise_does_not_win_for_an_impossible_token(monkeypatch):
    """Guards 0 / 0 = NaN, which argmax prefers to every number: the exponential noise rounds
    to 0 about once in 10^7 draws."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator=None: self.zero_())
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0]])
    assert Sampler()(logits, torch.ones(1), generator()).item() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_temperature_approaches_argmax(dtype):
    logits = torch.randn(64, 100).mul(5).to(dtype)
    logits[torch.arange(64), torch.arange(64)] = 40.0
    tokens = Sampler()(logits, torch.full((64,), 1e-3), generator())
    assert torch.equal(tokens, torch.arange(64))


def test_logits_stay_as_they_are():
    logits, temperatures = torch.randn(8, 50), torch.tensor([0.0, 0.7]).repeat(4)
    copies = logits.clone(), temperatures.clone()
    Sampler()(logits, temperatures, generator())
    assert torch.equal(logits, copies[0]) and torch.equal(temperatures, copies[1])
