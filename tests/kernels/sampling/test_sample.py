"""Sampling, the kernels and their reference alike, against a plain implementation by sorting and
against the distributions that the draws have to follow."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kernels.sampling.philox import (
    GROUP,
    GROUP_STREAM,
    RESAMPLE_STREAM,
    TOKEN_STREAM,
    exponential_noise,
)
from nanovllm.kernels.sampling.sample import (
    sample_reference,
    sample_shard_reference,
    sample_shard_triton,
    sample_triton,
    unpack_token_ids,
)
from nanovllm.kernels.sampling.sampling_row import SAMPLING_ROW

ON_GPU = torch.cuda.is_available()


def rows(n: int, device: str = "cpu", **fields) -> torch.Tensor:
    """Plain sampling at temperature 1, one seed a row, but for what ``fields`` says."""
    out = np.zeros(n, SAMPLING_ROW)
    out["temperature"] = out["top_p"] = 1
    out["seed"] = np.arange(n) * 7919 - 3
    out["position"] = 5
    for name, value in fields.items():
        out[name] = value
    return torch.from_numpy(out.view(np.int32).reshape(n, -1).copy()).to(device)


def triton_sampler(logits, settings):
    return sample_triton(logits, settings, truncates=True)


@pytest.fixture(params=[triton_sampler, sample_reference], ids=["triton", "reference"])
def sampler(request):
    return request.param


# The interpreter takes its time: what is slow runs with the slow tests, unless there is a GPU.
slow = [] if ON_GPU else [pytest.mark.slow]


# The interpreter gives the reference's tokens exactly: many draws are for the
# reference, and for the kernels on a GPU.
@pytest.fixture(params=[triton_sampler, sample_reference] if ON_GPU else [sample_reference])
def fast_sampler(request):
    return request.param


def kept_tokens(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Which tokens may be drawn, by sorting, in fp64: bool [vocab_size]. Ties are all kept."""
    probs = torch.softmax(logits.double() / temperature, -1)
    keep = probs >= min_p * probs.max()
    if 0 < top_k < len(probs):
        keep &= probs >= probs.sort(descending=True).values[top_k - 1]
    probs = torch.where(keep, probs, 0) / probs[keep].sum()
    ordered, order = probs.sort(descending=True, stable=True)
    above = ordered.cumsum(0) - ordered  # mass ahead of each in the order
    by_token = torch.empty_like(above)
    by_token[order] = above
    for value in ordered.unique():  # a tie stands where its first one stands
        tied = probs == value
        by_token[tied] = by_token[tied].min()
    return keep & ((by_token < top_p) | (top_p >= 1))


def winner(scores: torch.Tensor, seed: int, position: int, stream: int, start: int = 0) -> int:
    """Gumbel-max over fp64 scores of the items from ``start`` on."""
    noise = exponential_noise(seed, position, stream, start, start + len(scores))
    return int((scores - torch.from_numpy(noise).double().log()).argmax())


def expected_token(logits: torch.Tensor, seed: int, position: int, **truncation) -> int:
    """A group, a token of it; if that is not kept, one that is. In fp64 but for the noise."""
    scores = logits.double() / truncation.get("temperature", 1.0)
    groups = scores.split(GROUP)
    group = winner(torch.stack([g.logsumexp(0) for g in groups]), seed, position, GROUP_STREAM)
    token = group * GROUP + winner(groups[group], seed, position, TOKEN_STREAM, group * GROUP)
    keep = kept_tokens(logits, **truncation)
    if keep[token]:
        return token
    return winner(torch.where(keep, scores, -math.inf), seed, position, RESAMPLE_STREAM)


TRUNCATIONS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 300, "top_p": 0.3, "temperature": 1.7},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 0.7},
    {"top_k": 10**6},
]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("vocab_size", [*(pytest.param(n, marks=slow) for n in (5, 128)), 2345])
def test_draws_are_those_of_the_plain_implementation(vocab_size, truncation, sampler, device):
    n = 12 if ON_GPU else 2
    logits = torch.randn(n, vocab_size) * 3
    given_rows = rows(n, device, **truncation)
    drawn = sampler(logits.to(device), given_rows).tolist()
    expected = [expected_token(z, i * 7919 - 3, 5, **truncation) for i, z in enumerate(logits)]
    assert drawn == expected


@pytest.mark.parametrize("truncation", [{"top_k": 40}, {"top_p": 0.7}, {"min_p": 0.3}], ids=str)
def test_ties_at_the_floor_are_all_kept(truncation, sampler, device):
    """Logits of few distinct values, as half precision has them."""
    logits = (torch.randn(4, 700) * 2).round()
    drawn = sampler(logits.to(device), rows(4, device, **truncation)).tolist()
    assert drawn == [expected_token(z, i * 7919 - 3, 5, **truncation) for i, z in enumerate(logits)]


@pytest.mark.parametrize(
    ("truncation", "others"),
    [
        ({"min_p": 0.3, "temperature": 0.5}, {-1.0: 1000}),  # the ratio is of probabilities
        ({"min_p": 0.5, "top_p": 0.01}, {-0.5: 100, -3.0: 2000}),  # the share is of what is left
        ({"top_k": 101, "top_p": 0.01}, {-0.5: 100, -3.0: 2000}),
    ],
    ids=str,
)
def test_one_token_is_left(truncation, others, sampler, device):
    """Which the others, if they were kept too, would hardly ever let win."""
    logits = torch.tensor([0.0, *(value for value, n in others.items() for _ in range(n))])
    assert kept_tokens(logits, **truncation).sum() == 1
    drawn = sampler(logits.repeat(3, 1).to(device), rows(3, device, **truncation)).tolist()
    assert drawn == [0, 0, 0]


@settings(deadline=None, max_examples=200 if ON_GPU else 12)
@given(st.data())
def test_kernels_agree_with_the_reference(data):
    device = "cuda" if ON_GPU else "cpu"
    # Few sizes, each of which a GPU compiles for.
    vocab_size = data.draw(st.sampled_from([1, 100, 127, 700, 1184]), "vocab_size")
    scale = data.draw(st.sampled_from([0.0, 0.1, 1.0, 10.0]), "scale")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), "logits"))
    logits = torch.randn(2, vocab_size, generator=generator) * scale
    if data.draw(st.booleans(), "masked"):
        logits[torch.rand(logits.shape, generator=generator) < 0.7] = -torch.inf
    if data.draw(st.booleans(), "negative zeros"):
        logits = logits.round()  # -0.4 to -0.0
    if data.draw(st.booleans(), "half"):
        logits = logits.to(torch.float16)
    settings_ = rows(
        2,
        temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]), "temperature"),
        top_k=data.draw(st.sampled_from([0, 1, 2, 10, 100, 1000]), "top_k"),
        top_p=data.draw(st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]), "top_p"),
        min_p=data.draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]), "min_p"),
        seed=data.draw(st.integers(-(2**63), 2**63 - 1), "seed"),
        position=data.draw(st.integers(0, 2**31 - 1), "position"),
    )
    ours = triton_sampler(logits.to(device), settings_.to(device)).cpu()
    assert torch.equal(ours, sample_reference(logits, settings_))


def test_greedy_rows_take_the_largest_logit(dtype, sampler, device):
    logits = torch.randn(5, 20_011, device=device).to(dtype)
    tokens = sampler(logits, rows(5, device, temperature=0, top_k=3, top_p=0.5, min_p=0.1))
    # Half precision has ties: any token with the largest value will do.
    assert torch.equal(logits.gather(1, tokens[:, None]).squeeze(1), logits.amax(-1))


@pytest.mark.parametrize(
    "scale, temperature", [(1e4, 0.01), (100.0, 1e-5), (1e30, 1.0), (1e30, 1e-5)]
)
@pytest.mark.parametrize("fields", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}], ids=str)
def test_large_logits_and_small_temperatures_give_the_largest(
    fields, scale, temperature, sampler, device
):
    """Logit biases and temperatures may go that far, and no sum may overflow."""
    logits = torch.arange(-500, 500, device=device)[torch.randperm(1000)].repeat(2, 1) / 500 * scale
    logits[1, logits[1] < 0] = -float("inf")
    tokens = sampler(logits, rows(2, device, temperature=temperature, **fields))
    assert torch.equal(tokens, logits.argmax(-1))


def test_a_huge_temperature_draws_from_all(sampler, device):
    logits = torch.randn(8, 1000, device=device)
    logits[:, :500] = -float("inf")
    tokens = sampler(logits, rows(8, device, temperature=1e30))
    assert len(set(tokens.tolist())) > 4 and tokens.min() >= 500


def test_masked_tokens_are_never_drawn(sampler, device):
    logits = torch.full((8, 9000), -float("inf"), device=device)
    logits[:, [3, 8191, 8999]] = 0.0
    assert set(sampler(logits, rows(8, device)).tolist()) <= {3, 8191, 8999}
    few = sampler(logits, rows(8, device, top_k=50, top_p=0.9, min_p=0.1))
    assert set(few.tolist()) <= {3, 8191, 8999}


@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"top_k": 5, "top_p": 0.5}], ids=str)
def test_a_row_without_a_possible_token_gives_minus_one(fields, sampler, device):
    logits = torch.randn(3, 500, device=device)
    logits[1] = -float("inf")
    tokens = sampler(logits, rows(3, device, **fields)).tolist()
    assert tokens[1] == -1 and tokens[0] >= 0 and tokens[2] >= 0


@pytest.mark.parametrize(
    ("place", "bad"),
    [
        pytest.param(
            place,
            bad,
            marks=[]
            if (place, bad) in ((0, math.inf), (130, math.nan), (5999, -math.nan))
            else slow,
        )
        for place in (0, 130, 5000, 5999)
        for bad in (math.nan, -math.nan, math.inf)
    ],
)
@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"top_k": 5, "top_p": 0.5}], ids=str)
def test_a_row_with_a_nan_or_infinite_logit_gives_minus_one(fields, bad, place, sampler, device):
    """And its neighbours draw what they draw without it."""
    logits = torch.randn(3, 6000, device=device)
    expected = sampler(logits, rows(3, device, **fields)).tolist()
    logits[1, place] = bad
    assert sampler(logits, rows(3, device, **fields)).tolist() == [expected[0], -1, expected[2]]


def test_a_draw_depends_on_its_row_alone(sampler, device):
    """Not on the batch around it, or the place in it."""
    logits = torch.randn(5, 777, device=device)
    settings_ = rows(5, device, top_k=[0, 5, 0, 9, 0], top_p=[1, 1, 0.5, 0.5, 1])
    together = sampler(logits, settings_)
    alone = [sampler(logits[i : i + 1], settings_[i : i + 1]).item() for i in range(5)]
    backwards = sampler(logits.flip(0).contiguous(), settings_.flip(0).contiguous()).flip(0)
    assert together.tolist() == alone == backwards.tolist()


def test_seed_and_position_each_change_the_draw(sampler, device):
    n = 64 if ON_GPU else 8
    logits = torch.zeros(n, 1000, device=device)
    tokens = sampler(logits, rows(n, device, seed=3, position=np.arange(n)))
    assert len(set(tokens.tolist())) > 0.75 * n
    tokens = sampler(logits, rows(n, device, seed=2**40 * np.arange(n), position=3))
    assert len(set(tokens.tolist())) > 0.75 * n


def check_frequencies(sampler, logits: torch.Tensor, n: int, device: str, **truncation) -> None:
    """Chi-square over the kept tokens, at odds of 1 to 1,000 for a right sampler to fail with
    other seeds; these are fixed, so a pass stays a pass."""
    keep = kept_tokens(logits, **truncation) & (logits > -math.inf)
    probs = torch.softmax(logits.double() / truncation.get("temperature", 1.0), -1)[keep]
    tokens = sampler(logits.to(device).repeat(n, 1), rows(n, device, **truncation)).cpu()
    counts = torch.bincount(tokens, minlength=len(logits)).double()
    assert counts[~keep].sum() == 0
    expected = probs / probs.sum() * n
    assert expected.min() > 5, "too few draws for the chi-square approximation"
    statistic = ((counts[keep] - expected) ** 2 / expected).sum()
    degrees = torch.tensor((int(keep.sum()) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(degrees, statistic / 2) > 1e-3


@pytest.mark.parametrize(
    "truncation",
    [
        pytest.param({"temperature": 0.7}, marks=slow),
        pytest.param({}, marks=slow),
        pytest.param({"temperature": 2.0}, marks=slow),
        pytest.param({"top_k": 6}, marks=slow),
        pytest.param({"top_p": 0.8}, marks=slow),
        pytest.param({"min_p": 0.15}, marks=slow),
        {"top_k": 8, "top_p": 0.7, "temperature": 1.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("places", [pytest.param("one group", marks=slow), "many groups"])
def test_frequencies_follow_the_distribution(truncation, places, fast_sampler, device):
    """Of 12 tokens, by themselves or scattered unevenly over groups of impossible ones."""
    logits = torch.linspace(-2, 2, 12)
    if places == "many groups":
        scattered = torch.full((700,), -math.inf)
        scattered[[0, 1, 2, 128, 129, 127, 255, 400, 640, 641, 642, 699]] = logits
        logits = scattered
    n = 4_000 if fast_sampler is sample_reference else 100_000
    check_frequencies(fast_sampler, logits, n, device, **truncation)


@pytest.mark.parametrize(
    "truncation",
    [
        pytest.param({"top_k": 2}, marks=slow),
        pytest.param({"top_p": 0.5}, marks=slow),
        pytest.param({"min_p": 0.3}, marks=slow),
        {"top_k": 2, "top_p": 0.99, "min_p": 0.1},
    ],
    ids=str,
)
def test_a_redraw_knows_nothing_of_the_draw_that_was_rejected(truncation, fast_sampler, device):
    """Tokens 0 and 128 are kept. 2 of 5 first draws are rejected, all where group 0 wins: were the
    noise of groups or tokens used again, token 0 would come a seventh too often or too rarely."""
    logits = torch.full((256,), -math.inf)
    logits[1:128] = math.log(2 / 127)
    logits[[0, 128]] = torch.tensor([1.0, 2.0]).log()
    n = 3_000 if fast_sampler is sample_reference else 100_000
    check_frequencies(fast_sampler, logits, n, device, **truncation)


def test_rare_tokens_come_as_often_as_they_should(fast_sampler, device):
    """10,000 tokens of 1e-6 each beside one of 0.99: noise too coarse near 0 would lose or
    favour them. The count is binomial; 5 standard deviations are 1 in a million."""
    n = 1_000 if fast_sampler is sample_reference else 20_000
    logits = torch.full((n, 10_001), math.log(1e-6), device=device)
    logits[:, 0] = math.log(0.99)
    num_rare = (fast_sampler(logits, rows(n, device)) != 0).double().sum().item()
    assert abs(num_rare - n * 0.01) < 5 * math.sqrt(n * 0.01)


@pytest.fixture(params=[sample_shard_reference, sample_shard_triton], ids=["reference", "triton"])
def sample_shard(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "num_shards, shard, vocab_size",
    [
        pytest.param(1, 1024, 924, marks=slow),
        pytest.param(2, 512, 1000, marks=slow),
        pytest.param(3, 384, 1152, marks=slow),
        pytest.param(8, 128, 1024, marks=slow),
        (4, 512, 900),
        pytest.param(4, 11_520, 46_000, marks=slow),
    ],
)
def test_the_best_of_all_shards_is_the_draw_from_the_whole(
    num_shards, shard, vocab_size, dtype, sample_shard, device
):
    """Shards of padded width, the last ones short or empty; groups of several blocks of noise."""
    n = 8
    logits = torch.randn(n, vocab_size, device=device).to(dtype)
    logits[3] = -float("inf")
    logits[2, : vocab_size // 2 + 100] = -float("inf")
    logits[[4, 5, 6], 30] = torch.tensor([math.nan, math.nan, math.inf], device=device).to(dtype)
    logits[7, -1] = -math.nan
    temperature = [0.0, 0.7, 1.0, 5.0] * (n // 4)
    settings_ = rows(n, device, temperature=temperature, seed=2**50 + np.arange(n))
    expected = sample_reference(logits, settings_)
    found = []
    for start in range(0, num_shards * shard, shard):
        padded = torch.zeros(n, shard, dtype=dtype, device=device)
        own = logits[:, start : start + shard]
        padded[:, : own.size(1)] = own
        found.append(sample_shard(padded, settings_, own.size(1), start))
    best = torch.stack(found).amax(0)
    assert best.dtype == torch.int64
    assert torch.equal(unpack_token_ids(best), expected)
    assert expected[[3, 4, 5, 6, 7]].tolist() == [-1] * 5


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_tie_between_shards_goes_to_the_first_token(num_shards, sample_shard, device):
    logits = torch.zeros(4, 256, device=device)
    logits[:, [100, 200]] = 1
    size, settings_ = 256 // num_shards, rows(4, device, temperature=0)
    shards = [logits[:, i : i + size].contiguous() for i in range(0, 256, size)]
    best = [sample_shard(x, settings_, size, i * size) for i, x in enumerate(shards)]
    assert unpack_token_ids(torch.stack(best).amax(0)).tolist() == [100] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("truncates", [False, True])
def test_replays_in_a_cuda_graph(truncates):
    """The same tokens as eagerly, for other logits and settings than it was captured with."""
    fields = {"top_k": 50, "top_p": 0.9, "min_p": 0.01} if truncates else {}
    logits = torch.randn(32, 50_000, device="cuda") * 2
    settings_ = rows(32, "cuda", **fields)
    sample_triton(logits, settings_, truncates)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample_triton(logits, settings_, truncates)
    for _ in range(3):
        logits.copy_(torch.randn_like(logits) * 2)
        settings_.copy_(rows(32, "cuda", seed=torch.randint(2**40, (32,)).numpy(), **fields))
        graph.replay()
        assert torch.equal(captured, sample_triton(logits, settings_, truncates))
