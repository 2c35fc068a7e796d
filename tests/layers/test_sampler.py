"""The sampler's tokens against argmax, against the softmax they must be drawn from, and against
the edits of logits written out one token at a time."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kernels.sampling.logit_edits import add_bias, apply_mask, penalise
from nanovllm.kernels.sampling.logprobs import pack_logprobs
from nanovllm.kernels.sampling.pipeline import (
    LogitEdits,
    SamplingInputs,
    edit_logits,
    sample_with_logprobs,
)
from nanovllm.kernels.sampling.sampling_row import SAMPLING_ROW
from nanovllm.layers.parallel_sampler import ParallelSampler

NUM_DRAWS = 5_000
# 8 tokens of graded odds, and one that must never come.
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.3, 0.0, -0.5, -1.0, -1.2, -torch.inf])


def sampling_rows(n: int, **values: Any) -> torch.Tensor:
    """Plain sampling at temperature 1 with seed 0, a position a row, but for what is given."""
    out = np.zeros(n, SAMPLING_ROW)
    out["temperature"] = out["top_p"] = 1
    out["position"] = np.arange(n)
    for name, value in values.items():
        out[name] = value
    return torch.from_numpy(out.view(np.int32).reshape(n, -1))


def sample(logits: torch.Tensor, inputs: SamplingInputs | None = None, **values: Any):
    """Token ids of a batch, drawn with the given fields of SAMPLING_ROW."""
    if inputs is None:
        truncates = not {"top_k", "top_p", "min_p"}.isdisjoint(values)
        inputs = SamplingInputs(rows=sampling_rows(len(logits), **values), truncates=truncates)
    token_ids, logprobs = sample_with_logprobs(logits, inputs)
    assert token_ids.dtype == torch.int64 and token_ids.shape == logits.shape[:1]
    assert logprobs is None
    return token_ids


def chi_square_p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Odds that draws from ``probs`` stray as far as ``counts`` did."""
    expected = counts.sum() * probs
    assert expected.min() > 5, "too few draws for the chi-square approximation"
    statistic = ((counts - expected).square() / expected).sum()
    degrees = torch.tensor((len(probs) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


def follows(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    """The p-value of draws for a distribution, of whose impossible tokens there is none."""
    counts = tokens.bincount(minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    return chi_square_p_value(counts[probs > 0], probs[probs > 0])


def softmax(temperature: float) -> torch.Tensor:
    return torch.softmax(LOGITS.double() / temperature, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_greedy_is_argmax(dtype):
    logits = torch.randn(16, 1000).to(dtype)
    assert torch.equal(sample(logits, temperature=0), logits.argmax(-1))


def test_greedy_takes_no_token_where_none_is_allowed():
    logits = torch.randn(3, 50)
    logits[1] = -math.inf
    assert sample(logits, temperature=0).tolist() == [
        *logits[:1].argmax(-1),
        -1,
        logits[2].argmax(),
    ]


def test_greedy_rows_of_a_mixed_batch_are_argmax():
    logits = torch.randn(64, 200)
    temperatures = torch.tensor([0.0, 1.0, 0.0, 50.0]).repeat(16)
    is_argmax = sample(logits, temperature=temperatures) == logits.argmax(-1)
    assert is_argmax[temperatures == 0].all()
    assert not is_argmax[temperatures == 50].all()


@pytest.mark.parametrize(
    "temperatures", [[0.5, 20.0], pytest.param([1.0, 1.7], marks=pytest.mark.slow)], ids=str
)
def test_samples_follow_the_softmax_each_row_at_its_own_temperature(temperatures):
    """Chi-square tests of many draws over 8 tokens, the temperatures in alternate rows. A right
    sampler strays this far for one seed in a million; the seed is fixed, so it either always does
    or never. One that takes the wrong temperature, or draws a token 20 % too often, has no chance
    to pass."""
    batch = LOGITS.expand(2 * NUM_DRAWS, -1)
    tokens = sample(batch, temperature=temperatures * NUM_DRAWS)
    for i, temperature in enumerate(temperatures):
        assert follows(tokens[i::2], softmax(temperature)) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("varied", ["position", "seed"])
def test_draws_are_independent_of_their_neighbours(varied):
    """What a row draws tells nothing of the next row's, one position or one seed further: pairs
    of draws follow the product of two softmaxes."""
    fields = {"position": 0, "seed": 0, varied: np.arange(2 * NUM_DRAWS)}
    logits = LOGITS[:4]
    tokens = sample(logits.expand(2 * NUM_DRAWS, -1), **fields).view(-1, 2)
    probs = torch.softmax(logits.double(), -1)
    assert follows(tokens[:, 0] * 4 + tokens[:, 1], torch.outer(probs, probs).flatten()) > 1e-6


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_p": 0.7}, 3),  # the best two have 0.62, the best three 0.79
        ({"min_p": 0.3}, 3),  # exp(-1) of the best is 0.37, exp(-1.7) is 0.18
        pytest.param({"top_k": 2, "top_p": 0.9}, 2, marks=pytest.mark.slow),
        ({"top_k": 5, "min_p": 0.5}, 2),
        pytest.param({"top_k": 100}, 8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_truncated_draws_follow_what_is_left(truncation, kept):
    probs = softmax(1.0)
    probs[kept:] = 0
    tokens = sample(LOGITS.expand(NUM_DRAWS // 2, -1), **truncation)
    assert follows(tokens, probs / probs.sum()) > 1e-6


@pytest.mark.slow
def test_the_check_itself_can_fail():
    """Draws at temperature 1 are not taken for draws at 1.25."""
    assert follows(sample(LOGITS.expand(NUM_DRAWS, -1)), softmax(1.25)) < 1e-6


def test_a_large_vocabulary_is_drawn_from_evenly():
    """16,000 equal tokens: draws must not cluster. Of 1,000 draws about 31 repeat an earlier
    one (nearly Poisson); fewer than 7 or more than 65 come for one seed in a million."""
    tokens = sample(torch.zeros(1_000, 16_000))
    num_repeated = len(tokens) - len(tokens.unique())
    assert 7 <= num_repeated <= 65
    assert 6_500 < tokens.double().mean() < 9_500  # 8,000 +- 10 standard errors


def test_a_token_depends_on_its_seed_and_position_alone():
    """Not on what was drawn before, nor on the batch: there is no state to keep."""
    logits, positions = torch.randn(64, 100), torch.arange(64)
    first, again = (sample(logits, seed=3, position=positions) for _ in range(2))
    assert torch.equal(first, again)
    order = torch.randperm(64)
    shuffled = sample(logits[order], seed=3, position=positions[order])
    assert torch.equal(shuffled, first[order])
    for other in ({"seed": 4, "position": positions}, {"seed": 3, "position": positions + 64}):
        assert not torch.equal(sample(logits, **other), first)


def test_drawing_leaves_the_process_wide_generator_alone():
    state = torch.get_rng_state()
    sample(torch.randn(4, 50, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 1000.0])
def test_impossible_tokens_are_never_drawn(temperature):
    logits = torch.full((500,), -torch.inf)
    logits[[7, 123, 499]] = torch.tensor([0.0, 1.0, 0.5])
    tokens = sample(logits.expand(500, -1), temperature=temperature)
    assert set(tokens.tolist()) <= {7, 123, 499}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rank_that_samples_for_itself_leaves_out_the_padding_of_the_vocabulary(temperature):
    """The second of two ranks has tokens 256 to 299, then padding, whose logits are the largest."""
    tp = SimpleNamespace(size=2, all_reduce_max=lambda x: x)
    head: Any = SimpleNamespace(
        tp=tp, vocab_start=256, num_embeddings_per_rank=256, num_embeddings=300
    )
    logits = torch.full((8, 256), 9.0)
    logits[:, :44] = torch.randn(8, 44)
    inputs = SamplingInputs(rows=sampling_rows(8, temperature=temperature))
    token_ids, _ = ParallelSampler(head)(logits, inputs, per_shard=True)
    assert token_ids.min() >= 256 and token_ids.max() < 300
    if not temperature:
        assert torch.equal(token_ids, logits[:, :44].argmax(-1) + 256)


@pytest.mark.parametrize("values", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_a_lone_token_is_always_drawn(values):
    """However unlikely its logit alone would make it."""
    logits = torch.full((300,), -torch.inf)
    logits[42] = -1e4
    assert (sample(logits.expand(300, -1), **values) == 42).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_temperature_approaches_argmax(dtype):
    logits = torch.randn(64, 100).mul(5).to(dtype)
    logits[torch.arange(64), torch.arange(64)] = 40.0
    assert torch.equal(sample(logits, temperature=1e-3), torch.arange(64))


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def mask_of(*allowed: set[int], vocab_size: int) -> torch.Tensor:
    """Bit masks, written with Python's integers."""
    num_words = -(-vocab_size // 32)
    numbers = [sum(1 << token for token in tokens) for tokens in allowed]
    words = [[n >> 32 * i & 0xFFFFFFFF for i in range(num_words)] for n in numbers]
    return torch.from_numpy(np.array(words, np.uint32).view(np.int32))


@st.composite
def edits(draw: st.DrawFn) -> tuple[torch.Tensor, SamplingInputs, torch.Tensor]:
    """Logits, edits of them, and by plain loops in fp64 what they have to become."""
    num_rows, vocab_size = draw(st.integers(1, 4)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    row, token = st.integers(0, num_rows - 1), st.integers(0, vocab_size - 1)
    value = st.sampled_from([-math.inf, -100.0, -0.5, 3.25])
    given: LogitEdits = {}
    expected = logits.double().clone()

    if masked := draw(st.lists(row, unique=True)):
        allowed = [draw(st.sets(token)) for _ in masked]
        given |= {apply_mask: (int32(masked), mask_of(*allowed, vocab_size=vocab_size))}
        for i, tokens in zip(masked, allowed, strict=True):
            for t in set(range(vocab_size)) - tokens:
                expected[i, t] = -math.inf
    if biases := draw(st.dictionaries(st.tuples(row, token), value, max_size=6)):
        rows, tokens = (int32(column) for column in zip(*biases, strict=True))
        given |= {add_bias: (rows, tokens, torch.tensor(list(biases.values())))}
        for (i, t), bias in biases.items():
            expected[i, t] += bias
    if penalised := draw(st.lists(row, unique=True)):
        penalties, lens, entries = [], [], []
        for i in penalised:
            repetition = draw(st.sampled_from([0.5, 1.0, 1.5]))
            frequency, presence = (draw(st.sampled_from([-0.75, 0.0, 0.5])) for _ in range(2))
            penalties.append([repetition, frequency, presence])
            history = draw(st.lists(st.tuples(token, st.booleans()), min_size=1, max_size=8))
            lens.append(len(history))
            entries += history
            for t in {t for t, _ in history}:
                z = float(expected[i, t])
                z = z / repetition if z > 0 else z * repetition
                count = history.count((t, True))
                expected[i, t] = z - count * frequency - (presence if count else 0)
        tokens, generated = zip(*entries, strict=True)
        columns = torch.tensor(penalties), int32(lens), int32(tokens), torch.tensor(generated)
        given |= {penalise: (int32(penalised), *columns)}
    return logits, SamplingInputs(sampling_rows(num_rows, temperature=0), edits=given), expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(edits())
def test_edits_act_in_the_documented_order(case):
    """Every logit, and the greedy token after them. The logits that came stay as they are: they
    are a graph's output, and logprobs are read from them."""
    logits, inputs, expected = case
    before, edited = logits.clone(), edit_logits(logits, inputs.edits)
    assert torch.allclose(edited.double(), expected, atol=1e-4)
    for row, token in zip(expected, sample(logits, inputs).tolist(), strict=True):
        best = row.max()
        if best == -math.inf:
            assert token == -1
        else:
            assert best - row[token] < 1e-4 * max(1, abs(best))
    assert torch.equal(logits, before)


def test_edited_logits_are_drawn_from_by_their_softmax():
    """Bias and penalty at work in the odds, not in the argmax alone; false alarms as above."""
    n = NUM_DRAWS
    rows = torch.arange(n, dtype=torch.int32)
    edits: LogitEdits = {
        apply_mask: (rows, mask_of({1, 2, 3, 4, 5, 8}, vocab_size=9).expand(n, -1).contiguous()),
        add_bias: (rows, torch.full((n,), 4, dtype=torch.int32), torch.full((n,), 1.5)),
        penalise: (
            rows,
            torch.tensor([[2.0, 0.25, 0.5]]).expand(n, -1),
            torch.full((n,), 3, dtype=torch.int32),
            int32([1, 1, 5]).repeat(n),
            torch.tensor([True, True, False]).repeat(n),
        ),
    }
    inputs = SamplingInputs(sampling_rows(n), edits=edits)
    z = LOGITS.double().clone()
    z[[0, 6, 7]] = -math.inf
    z[4] += 1.5
    z[1] = z[1] / 2 - 2 * 0.25 - 0.5
    z[5] *= 2  # below 0, and in the prompt only
    assert follows(sample(LOGITS.expand(n, -1), inputs), torch.softmax(z, -1)) > 1e-6


def test_a_row_without_a_token_spoils_no_other():
    logits = torch.randn(3, 40)
    mask = mask_of(set(), vocab_size=40)
    edits: LogitEdits = {apply_mask: (int32([1]), mask)}
    inputs = SamplingInputs(sampling_rows(3, temperature=[0, 1, 0]), truncates=True, edits=edits)
    best = logits.argmax(-1).tolist()
    assert sample(logits, inputs).tolist() == [best[0], -1, best[2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [0, 1, 6, 40])
def test_logprobs_are_those_of_the_logits_as_they_came(dtype, k):
    """By a plain log-softmax and sort in fp64, whatever temperature and edits did to the draw."""
    logits = torch.randn(5, 40).to(dtype)
    inputs = SamplingInputs(
        rows=sampling_rows(5, temperature=[0, 1, 5, 1, 1]),
        edits={
            apply_mask: (int32([4]), mask_of(set(), vocab_size=40)),
            add_bias: (int32([0, 1, 3]), int32([5, 6, 7]), torch.tensor([100.0, 100.0, -50.0])),
        },
        num_logprobs=k,
    )
    token_ids, packed = sample_with_logprobs(logits, inputs)
    assert token_ids[:2].tolist() == [5, 6] and token_ids[4] == -1
    assert packed.dtype == torch.int32 and packed.shape == (5, 3 + 2 * k)
    reference = torch.log_softmax(logits.double(), -1)
    for i, token in enumerate(token_ids.clamp(min=0).tolist()):
        rank, *pairs = packed[i].tolist()
        ids = pairs[::2]
        values = np.array(pairs[1::2], np.int32).view(np.float32)
        assert ids[0] == token
        assert rank == 1 + int((reference[i] > reference[i, token]).sum())
        assert len(set(ids[1:])) == k
        best = reference[i].sort(descending=True).values[:k]
        assert np.allclose(values[1:], best, atol=1e-5)
        assert np.allclose(values, reference[i, ids], atol=1e-5)


def test_logprobs_come_only_when_they_are_asked_for():
    rows = sampling_rows(2)
    assert sample_with_logprobs(torch.randn(2, 9), SamplingInputs(rows))[1] is None
    assert (
        sample_with_logprobs(torch.randn(2, 9), SamplingInputs(rows, num_logprobs=0))[1] is not None
    )


def test_packed_logprobs_keep_every_bit():
    """Large token ids and tiny logprobs go through one int32 buffer."""
    logits = torch.full((1, 200_000), -200.0)
    logits[0, 199_999] = 0.0
    rank, *pairs = pack_logprobs(logits, torch.tensor([123_456]), 1)[0].tolist()
    assert (rank, pairs[0], pairs[2]) == (2, 123_456, 199_999)
    own, best = np.array(pairs[1::2], np.int32).view(np.float32)
    assert own == -200 and abs(best) < 1e-6


@pytest.mark.parametrize("values", [{"temperature": [0.0, 0.7] * 4}, {"top_p": 0.5, "top_k": 9}])
def test_logits_and_settings_stay_as_they_are(values):
    logits, rows = torch.randn(8, 50), sampling_rows(8, **values)
    copies = logits.clone(), rows.clone()
    sample(logits, SamplingInputs(rows=rows, truncates="top_p" in values, num_logprobs=None))
    assert torch.equal(logits, copies[0]) and torch.equal(rows, copies[1])
