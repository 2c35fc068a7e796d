"""The Triton kernels of sampling. Launched by sample.py, which explains the algorithm."""

from nanovllm.kernels.sampling.gumbel_max import GROUP, sample_untruncated, sort_key
from nanovllm.kernels.sampling.philox import WIDTH
from nanovllm.kernels.sampling.sampling_row import ROW_WORDS
from nanovllm.kernels.sampling.truncation import resample_if_truncated
from nanovllm.utils.triton_compat import tl, triton

STATS_TILE = 32  # groups that a program of group_stats_kernel reads


# num_groups follows from vocab_size, so Triton need not specialise on it.
@triton.jit(do_not_specialize=["num_groups"])
def group_stats_kernel(
    logits_ptr,
    rows_ptr,
    group_max_ptr,
    group_lse_ptr,
    vocab_size,
    stride,
    num_groups,
    ROW_WORDS: tl.constexpr = ROW_WORDS,
    WIDTH: tl.constexpr = WIDTH,
    TILE: tl.constexpr = STATS_TILE,
):
    """Computes the largest logit and the log-sum-exp of logits / temperature for TILE groups of one
    row. The log-sum-exp is the largest logit for temperature 0, and +inf if a logit is NaN or
    +inf."""
    row, tile = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(rows_ptr + row * ROW_WORDS).to(tl.float32, bitcast=True)
    scale = 1 / tl.where(temperature > 0, temperature, 1.0)
    groups = tile * TILE + tl.arange(0, TILE)
    # Each thread holds tokens of all four quarters of a group, which saves warp shuffles.
    token = groups[:, None] * (4 * WIDTH) + tl.arange(0, WIDTH)[None, :]
    logits_ptr += row.to(tl.int64) * stride
    z0 = _load(logits_ptr, token, vocab_size)
    z1 = _load(logits_ptr, token + WIDTH, vocab_size)
    z2 = _load(logits_ptr, token + 2 * WIDTH, vocab_size)
    z3 = _load(logits_ptr, token + 3 * WIDTH, vocab_size)
    largest = tl.max(tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3)), axis=1)
    shift = tl.maximum(largest, -3.4028234663852886e38)[:, None]  # finite if all logits are -inf
    scale_log2e = scale * 1.4426950408889634
    weights = tl.exp2((z0 - shift) * scale_log2e) + tl.exp2((z1 - shift) * scale_log2e)
    weights += tl.exp2((z2 - shift) * scale_log2e) + tl.exp2((z3 - shift) * scale_log2e)
    total = tl.sum(weights, axis=1)
    lse = tl.where(temperature > 0, largest * scale + tl.log(total), largest)
    lse = tl.where(total == total, lse, float("inf"))
    slot = row * num_groups + groups
    tl.store(group_max_ptr + slot, largest, mask=groups < num_groups)
    tl.store(group_lse_ptr + slot, lse, mask=groups < num_groups)


@triton.jit
def _load(logits_ptr, token, vocab_size):
    """Loads logits as fp32, -inf past the end."""
    return tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)


@triton.jit(do_not_specialize=["num_groups"])
def sample_kernel(
    logits_ptr,
    rows_ptr,
    group_max_ptr,
    group_lse_ptr,
    candidates_ptr,
    token_ptr,
    vocab_size,
    num_groups,
    TRUNCATES: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    ROW_WORDS: tl.constexpr = ROW_WORDS,
):
    """Samples the token of one row."""
    MAX_BLOCKS: tl.constexpr = triton.cdiv(MAX_GROUPS, GROUP)
    row = tl.program_id(0)
    row_ptr = rows_ptr + row * ROW_WORDS
    logits_ptr += row.to(tl.int64) * vocab_size
    group_lse_ptr += row * num_groups
    _score, token = sample_untruncated(
        logits_ptr, group_lse_ptr, row_ptr, vocab_size, num_groups, 0, MAX_BLOCKS
    )
    if TRUNCATES:
        token = resample_if_truncated(
            token,
            logits_ptr,
            row_ptr,
            group_max_ptr + row * num_groups,
            group_lse_ptr,
            candidates_ptr + row * num_groups,
            vocab_size,
            num_groups,
            MAX_GROUPS,
        )
    tl.store(token_ptr + row, token.to(tl.int64))


@triton.jit(do_not_specialize=["num_tokens", "stride", "num_groups", "first_token"])
def sample_shard_kernel(
    logits_ptr,
    rows_ptr,
    group_lse_ptr,
    out_ptr,
    num_tokens,
    stride,
    num_groups,
    first_token,
    MAX_BLOCKS: tl.constexpr,
    ROW_WORDS: tl.constexpr = ROW_WORDS,
):
    """Samples the token of one row from one shard, and packs its score and id into an int64."""
    row = tl.program_id(0)
    score, token = sample_untruncated(
        logits_ptr + row.to(tl.int64) * stride,
        group_lse_ptr + row * num_groups,
        rows_ptr + row * ROW_WORDS,
        num_tokens,
        num_groups,
        first_token,
        MAX_BLOCKS,
    )
    key = sort_key(score).to(tl.int64)
    tl.store(out_ptr + row, (key << 32) | (0x7FFFFFFF - tl.maximum(token, 0)))
