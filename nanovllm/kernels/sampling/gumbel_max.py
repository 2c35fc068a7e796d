"""Triton functions for sampling by the Gumbel-max trick: argmax(log w - log E) over items with
weights w, with noise E ~ Exp(1) from philox.py. sample.py explains the algorithm.

Items lie in groups of GROUP = 128. In each group, the four items whose indices are equal modulo
GROUP / 4 share a Philox counter, which yields the noise of all of them.
"""

from nanovllm.kernels.ordered_bits import ordered_bits_triton
from nanovllm.kernels.sampling import philox
from nanovllm.utils.triton_compat import tl, triton

GROUP = tl.constexpr(philox.GROUP)  # for kernels


@triton.jit
def sample_untruncated(
    logits_ptr,
    group_lse_ptr,
    row_ptr,
    num_tokens,
    num_groups,
    first_token,
    MAX_BLOCKS: tl.constexpr,
):
    """Samples a token of one row, ignoring top-k, top-p and min-p.

    First samples a group of tokens, weighted by the groups' log-sum-exps, then a token of this
    group. The groups of tokens are items too, which lie in up to MAX_BLOCKS blocks of GROUP groups.

    Returns the score of the group and the token: (-inf, -1) if all logits are -inf, and
    (+inf, -1) if any logit is NaN or +inf.
    """
    temperature = tl.load(row_ptr).to(tl.float32, bitcast=True)
    first_group = first_token // GROUP
    score, group = gumbel_scores(
        group_lse_ptr - first_group,
        first_group // GROUP + tl.arange(0, MAX_BLOCKS),
        first_group,
        first_group + num_groups,
        tl.where(temperature > 0, 1.0, 0.0),  # the log-sum-exps are scaled already
        row_ptr,
        0,  # philox.GROUP_STREAM
    )
    best = tl.max(score)
    group = tl.maximum(argmax_item(score, group), first_group)
    score, token = gumbel_scores(
        logits_ptr - first_token,
        group + tl.zeros([1], tl.int32),
        first_token,
        first_token + num_tokens,
        temperature,
        row_ptr,
        1,  # philox.TOKEN_STREAM
    )
    return best, tl.where(best < float("inf"), argmax_item(score, token), -1)


@triton.jit
def gumbel_scores(values_ptr, groups, start, end, temperature, row_ptr, stream, threshold=None):
    """Scores the items of some groups. An item's log weight is value / temperature. With
    temperature 0 its score is the value itself.

    Skips items outside [start, end) and items whose ``sort_key`` is below ``threshold``, if given.

    Returns two tensors [groups, GROUP / 4]: the highest score among the four items of each counter,
    and the item that has it.
    """
    WIDTH: tl.constexpr = GROUP // 4
    column = tl.arange(0, WIDTH)[None, :]
    counter = groups[:, None] * WIDTH + column
    zero = counter * 0
    word = zero.to(tl.uint32, bitcast=True)
    words = word, word, word, word
    if temperature > 0:
        position = zero + tl.load(row_ptr + 6)
        # philox.ROUNDS
        words = tl.philox(_load_seed(row_ptr), counter, position, zero + stream, zero, 7)
    best = tl.full(counter.shape, -float("inf"), tl.float32)
    best_item = zero
    for lane in tl.static_range(4):
        item = (groups[:, None] * 4 + lane) * WIDTH + column
        exists = (item >= start) & (item < end)
        value = tl.load(values_ptr + item, mask=exists, other=-float("inf")).to(tl.float32)
        score = value
        if temperature > 0:
            score = _score(value * (1 / temperature), words[lane])
        if threshold is not None:
            score = tl.where(sort_key(value) >= threshold, score, -float("inf"))
        best_item = tl.where(score > best, item, best_item)
        best = tl.maximum(best, score)
    return best, best_item


@triton.jit
def _score(log_weight, word):
    """Returns log w - log E, with E from a random 32-bit word."""
    uniform = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.99999994)  # as philox.LARGEST_UNIFORM
    # Small u use the Taylor series of -log(1 - u), because fp32 rounds 1 - u to 1.
    series = uniform * (1 + uniform * (0.5 + uniform * 0.33333334))
    noise = tl.where(uniform < 1e-3, series, -tl.log(1 - uniform))
    return log_weight - tl.log(noise)


@triton.jit
def _load_seed(row_ptr):
    low = tl.load(row_ptr + 4).to(tl.int64) & 0xFFFFFFFF
    return (tl.load(row_ptr + 5).to(tl.int64) << 32) | low


@triton.jit
def argmax_item(score, item):
    """Returns the item with the highest score, in a tie the lowest such item. Returns -1 if all
    scores are -inf."""
    best = tl.max(score)
    winner = tl.min(tl.where(score == best, item, 0x7FFFFFFF))
    return tl.where(best > -float("inf"), winner, -1)


@triton.jit
def sort_key(x):
    """Maps fp32 to int32 in the same order. Adding 0 turns -0 into +0."""
    return ordered_bits_triton((x + 0.0).to(tl.int32, bitcast=True))
