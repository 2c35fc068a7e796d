"""The random numbers: against published values, against Triton's own Philox, and by statistics."""

import numpy as np
import pytest
import torch

from nanovllm.kernels.sampling.philox import (
    GROUP,
    GROUP_STREAM,
    LANES,
    RESAMPLE_STREAM,
    TOKEN_STREAM,
    WIDTH,
    exponential_noise,
    philox,
)
from nanovllm.utils.triton_compat import tl, triton

STREAMS = [GROUP_STREAM, TOKEN_STREAM, RESAMPLE_STREAM]


def test_known_answer():
    """The all-zero vector of seven rounds in the authors' test suite (Random123's kat_vectors)."""
    words = philox(0, np.zeros(1, np.uint64), 0, 0)
    assert [int(word[0]) for word in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@triton.jit
def _philox_kernel(out_ptr, seed_ptr, position, stream, N: tl.constexpr):
    counter = tl.arange(0, N)
    zero = counter * 0
    words = tl.philox(tl.load(seed_ptr), counter, zero + position, zero + stream, zero, 7)
    for lane in tl.static_range(4):
        tl.store(out_ptr + lane * N + counter, words[lane].to(tl.int32, bitcast=True))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 + 5, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize(
    "position, stream", [(0, GROUP_STREAM), (7, TOKEN_STREAM), (2**31 - 1, RESAMPLE_STREAM)]
)
def test_equals_tritons(seed, position, stream, device):
    out = torch.empty(4, 256, dtype=torch.int32, device=device)
    _philox_kernel[(1,)](out, torch.tensor([seed], device=device), position, stream, N=256)
    expected = philox(seed, np.arange(256, dtype=np.uint64), position, stream)
    assert np.array_equal(out.cpu().numpy().view(np.uint32), np.stack(expected))


@pytest.mark.parametrize("stream", STREAMS)
def test_tokens_of_a_group_share_counters_across_its_lanes(stream):
    assert GROUP == LANES * WIDTH
    counter = np.arange(3 * WIDTH, dtype=np.uint64)
    words = philox(5, counter, 9, stream)
    noise = exponential_noise(5, 9, stream, 0, 3 * GROUP)
    for token in (0, 31, 32, 127, 128, 200, 383):
        group, rest = divmod(token, GROUP)
        lane, column = divmod(rest, WIDTH)
        uniform = (float(words[lane][group * WIDTH + column]) + 0.5) / 2**32
        assert noise[token] == pytest.approx(-np.log1p(-uniform), rel=1e-4)


def test_noise_is_that_of_the_item_wherever_a_range_begins_or_ends():
    whole = exponential_noise(3, 4, TOKEN_STREAM, 0, 1000)
    for start, end in ((0, 301), (128, 256), (130, 131), (77, 1000), (500, 500)):
        assert np.array_equal(exponential_noise(3, 4, TOKEN_STREAM, start, end), whole[start:end])


def test_no_two_draws_share_a_counter():
    """Each counter of one key has words of its own: Philox is a bijection."""
    counter = np.arange(300, dtype=np.uint64)
    drawn = [np.stack(philox(1, counter, p, s), 1) for p in range(20) for s in STREAMS]
    assert len(np.unique(np.concatenate(drawn), axis=0)) == 300 * 20 * len(STREAMS)


def test_noise_is_exponential_and_independent():
    """Moments of 1.5 million draws within 5 standard errors (one seed in 10^6 strays further);
    seeds, positions, streams and tokens that are neighbours are not correlated."""
    indices = np.ndindex(22, 22, len(STREAMS))
    noise = np.stack([exponential_noise(s, p, STREAMS[i], 0, 1000) for s, p, i in indices])
    n = noise.size
    assert abs(noise.mean(dtype=np.float64) - 1) < 5 / np.sqrt(n)
    assert abs(noise.var(dtype=np.float64) - 1) < 5 * np.sqrt(8 / n)
    assert noise.min() > 0 and noise.max() < 25
    quantiles = np.quantile(noise, [0.01, 0.5, 0.99])
    assert np.allclose(quantiles, -np.log1p(-np.array([0.01, 0.5, 0.99])), rtol=0.02)
    cube = noise.reshape(22, 22, len(STREAMS), 1000) - 1
    for axis in range(4):
        a, b = np.moveaxis(cube, axis, 0)[:-1], np.moveaxis(cube, axis, 0)[1:]
        assert abs((a * b).mean(dtype=np.float64)) < 5 / np.sqrt(a.size)
