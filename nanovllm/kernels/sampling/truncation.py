"""Triton functions for top-k, top-p and min-p, which sample again if a sampled token is truncated.
sample.py explains the algorithm.

Logits are compared by their ``sort_key``. Candidate groups are those whose largest logit reaches
the threshold. Only they are read. A list of their numbers is kept in global memory.
"""

from nanovllm.kernels.sampling.gumbel_max import GROUP, argmax_item, gumbel_scores, sort_key
from nanovllm.utils.triton_compat import tl, triton

TILE = tl.constexpr(64)  # candidate groups that are read at a time


@triton.jit
def resample_if_truncated(
    token,
    logits_ptr,
    row_ptr,
    group_max_ptr,
    group_lse_ptr,
    candidates_ptr,
    vocab_size,
    num_groups,
    MAX_GROUPS: tl.constexpr,
):
    """Returns ``token`` if top-k, top-p and min-p keep it, otherwise a sample of the tokens that
    they keep.

    All pointers point to one row's data. ``candidates_ptr`` is scratch space, int32 [num_groups].
    """
    WIDTH: tl.constexpr = GROUP // 4
    temperature = tl.load(row_ptr).to(tl.float32, bitcast=True)
    top_k = tl.load(row_ptr + 1)
    top_p = tl.load(row_ptr + 2).to(tl.float32, bitcast=True)
    min_p = tl.load(row_ptr + 3).to(tl.float32, bitcast=True)
    if top_k >= vocab_size:
        top_k = 0
    truncates = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if truncates & (temperature > 0) & (token >= 0):
        group = tl.arange(0, MAX_GROUPS)
        exists = group < num_groups
        group_max = tl.load(group_max_ptr + group, mask=exists, other=-float("inf"))
        group_key = sort_key(group_max)
        max_logit = tl.max(group_max)
        threshold = tl.full([], -0x7F800000, tl.int64)  # the key above that of -inf
        if min_p > 0:
            threshold = tl.maximum(threshold, sort_key(max_logit + temperature * tl.log(min_p)))
        if (top_k > 0) & (top_k <= num_groups):
            # The k-th largest group maximum is a lower bound. 20 bisections of the 2^32 keys find
            # it closely enough.
            low = tl.full([], -0x7F800000, tl.int64)
            high = sort_key(max_logit).to(tl.int64) + 1
            for _ in range(20):
                middle = low + ((high - low) >> 1)
                enough = tl.sum((group_key >= middle).to(tl.int32)) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            threshold = tl.maximum(threshold, low)
        num_candidates = _list_candidates(candidates_ptr, group_key, group, threshold)
        if top_k > 0:
            threshold = _kth_largest(
                logits_ptr,
                candidates_ptr,
                num_candidates,
                vocab_size,
                top_k,
                threshold,
                sort_key(max_logit).to(tl.int64) + 1,
            )
        top_p_weight = top_p * 1.0
        if top_p < 1:
            if (top_k > 0) | (min_p > 0):
                top_p_weight *= _sum_weights(
                    logits_ptr,
                    candidates_ptr,
                    num_candidates,
                    vocab_size,
                    threshold,
                    max_logit,
                    temperature,
                )
            else:
                group_lse = tl.load(group_lse_ptr + group, mask=exists, other=-float("inf"))
                top_p_weight *= tl.sum(tl.exp(group_lse - max_logit * (1 / temperature)))
        key = sort_key(tl.load(logits_ptr + token).to(tl.float32)).to(tl.int64)
        resampling = key < threshold
        checking = top_p < 1
        while resampling | checking:
            if resampling:
                best = tl.full([TILE, WIDTH], -float("inf"), tl.float32)
                best_token = tl.zeros([TILE, WIDTH], tl.int32)
                for start in range(0, num_candidates, TILE):
                    slot = start + tl.arange(0, TILE)
                    score, item = gumbel_scores(
                        logits_ptr,
                        tl.load(
                            candidates_ptr + slot, mask=slot < num_candidates, other=vocab_size
                        ),
                        0,
                        vocab_size,
                        temperature,
                        row_ptr,
                        2,  # philox.RESAMPLE_STREAM
                        threshold,
                    )
                    best_token = tl.where(score > best, item, best_token)
                    best = tl.maximum(best, score)
                token = argmax_item(best, best_token)
                key = sort_key(tl.load(logits_ptr + token).to(tl.float32)).to(tl.int64)
            resampling = checking
            if checking:  # top-p truncates the token if the sum of weights above it is too large
                threshold = tl.maximum(threshold, key + 1)
                num_candidates = _list_candidates(candidates_ptr, group_key, group, threshold)
                weight_above = _sum_weights(
                    logits_ptr,
                    candidates_ptr,
                    num_candidates,
                    vocab_size,
                    threshold,
                    max_logit,
                    temperature,
                )
                resampling = (weight_above >= top_p_weight) & (num_candidates > 0)
            checking = resampling
    return token


@triton.jit
def _list_candidates(candidates_ptr, group_key, group, threshold):
    """Lists the groups whose key reaches the threshold. Returns their number."""
    reaches = group_key >= threshold
    slot = tl.cumsum(reaches.to(tl.int32)) - 1
    tl.store(candidates_ptr + slot, group, mask=reaches)
    tl.debug_barrier()  # each thread also reads entries that others wrote
    return tl.sum(reaches.to(tl.int32))


@triton.jit
def _kth_largest(
    logits_ptr,
    candidates_ptr,
    num_candidates,
    vocab_size,
    k,
    low,
    high,
):
    """Returns the key of the k-th largest candidate logit, or ``low`` if fewer than k reach it.

    Bisects [low, high). Each step moves a bound to the key of a candidate logit, or just above it.
    """
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        count = tl.zeros([TILE, GROUP], tl.int32)
        above = tl.full([TILE, GROUP], 0x7FFFFFFF, tl.int32)
        below = tl.full([TILE, GROUP], -0x80000000, tl.int32)
        for start in range(0, num_candidates, TILE):
            _, keys = _load_candidates(
                logits_ptr, candidates_ptr, start, num_candidates, vocab_size
            )
            hit = keys >= middle
            count += hit.to(tl.int32)
            above = tl.minimum(above, tl.where(hit, keys, 0x7FFFFFFF))
            below = tl.maximum(below, tl.where(hit, -0x80000000, keys))
        num_above = tl.sum(count)
        if num_above >= k:
            low = tl.min(above).to(tl.int64)
            high = tl.where(num_above == k, low + 1, high)
        else:
            high = tl.max(below).to(tl.int64) + 1
    return low


@triton.jit
def _sum_weights(
    logits_ptr,
    candidates_ptr,
    num_candidates,
    vocab_size,
    threshold,
    max_logit,
    temperature,
):
    """Sums exp((logit - max_logit) / temperature) over the candidate tokens that reach the
    threshold."""
    total = tl.zeros([TILE, GROUP], tl.float32)
    for start in range(0, num_candidates, TILE):
        logits, keys = _load_candidates(
            logits_ptr, candidates_ptr, start, num_candidates, vocab_size
        )
        weights = tl.exp((logits - max_logit) * (1 / temperature))
        total += tl.where(keys >= threshold, weights, 0.0)
    return tl.sum(total)


@triton.jit
def _load_candidates(
    logits_ptr,
    candidates_ptr,
    start,
    num_candidates,
    vocab_size,
):
    """Loads the logits of the next TILE candidate groups. Returns them as fp32 and as keys, -inf
    past the end."""
    slot = start + tl.arange(0, TILE)
    groups = tl.load(candidates_ptr + slot, mask=slot < num_candidates, other=vocab_size)
    token = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf"))
    logits = logits.to(tl.float32)
    return logits, sort_key(logits)
