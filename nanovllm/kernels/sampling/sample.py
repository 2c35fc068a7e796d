"""Sampling with temperature, top-k, top-p and min-p: one pass over the logits, and no sort.

**Sampling.** Let items have weights w, and let E ~ Exp(1) be independent noise for each. Then
argmax(log w - log E) is an item with probability proportional to its weight. This is the Gumbel-max
trick, because -log E is Gumbel noise (arXiv:2110.01515, also called an exponential race). A token
is sampled in two stages. The first samples one group of 128 consecutive tokens, by the log-sum-exp
of its logits / temperature. The second samples one token of this group. So each logit costs one
exponential, and only the groups and the tokens of one group need noise. Noise depends only on the
seed, the position and the index of the group or token (philox.py).

**Truncation.** Top-k, top-p and min-p each keep the tokens whose logit reaches some threshold. If
the sampled token is kept, it is a correct sample of the kept tokens (rejection sampling).
Otherwise the kept tokens are sampled again, in one stage and with new noise. The first noise cannot
be used again. It made a truncated token win, so it is biased against the other tokens of the same
group.
The thresholds are:

- min-p: the largest logit + temperature * log(min_p).
- top-k: the k-th largest logit, found by bisection over the row's logits. The k-th largest
  group maximum is a lower bound, so only groups that reach this bound are read again.
- top-p: a token is kept if the tokens with larger logits have less than top_p of the total weight
  of the tokens that min-p and top-k keep. The exact threshold is never computed. While the sampled
  token is truncated, a lower bound is raised above this token's logit, and the argmax of the same
  scores is taken over the tokens that remain. The kept tokens always remain, so the loop ends with
  the argmax over the kept tokens. It ends soon, because truncated tokens have little weight.

All tokens whose logit equals the threshold are kept. A row with a NaN or +inf logit has no sample.

Read on in sample_reference.py (PyTorch), or in sample_kernels.py, gumbel_max.py and truncation.py
(Triton).
"""

import torch

from nanovllm.kernels.sampling.philox import GROUP
from nanovllm.kernels.sampling.sample_kernels import (
    STATS_TILE,
    group_stats_kernel,
    sample_kernel,
    sample_shard_kernel,
)
from nanovllm.kernels.sampling.sample_reference import sample_reference, sample_shard_reference
from nanovllm.kernels.sampling.sampling_row import ROW_WORDS
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import by_device, use_triton


def sample(logits: torch.Tensor, rows: torch.Tensor, truncates: bool) -> torch.Tensor:
    """Samples one token per row.

    Args:
        logits: [N, vocab_size].
        rows: int32 [N, ROW_WORDS], a SAMPLING_ROW each.
        truncates: whether rows may have top_k, top_p or min_p set.

    Returns:
        int64 [N] token ids. -1 if all logits of a row are -inf, or any is NaN or +inf.
    """
    if use_triton(logits):
        return sample_triton(logits, rows, truncates)
    return sample_reference(logits, rows)


def unpack_token_ids(packed: torch.Tensor) -> torch.Tensor:
    """Extracts the tokens from the result of ``sample_shard``, or the maximum over several shards.

    Returns:
        int64 [N] token ids. -1 if all logits of a row are -inf, or any is NaN or +inf.
    """
    infinity = 0x7F800000  # the key of +inf; the key of -inf is -infinity - 1
    score, token = packed >> 32, 0x7FFFFFFF - (packed & 0xFFFFFFFF)
    return torch.where((score > -infinity - 1) & (score < infinity), token, -1)


def sample_triton(logits: torch.Tensor, rows: torch.Tensor, truncates: bool) -> torch.Tensor:
    """See ``sample``. Launches one kernel over groups and one over rows."""
    assert logits.is_contiguous()
    num_rows, vocab_size = logits.shape
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    if not num_rows:
        return tokens
    group_max, group_lse = _group_stats(logits, rows, vocab_size)
    num_groups = group_max.size(1)
    candidates = logits.new_empty(num_rows, num_groups, dtype=torch.int32)
    sample_kernel[(num_rows,)](
        logits,
        rows,
        group_max,
        group_lse,
        candidates,
        tokens,
        vocab_size,
        num_groups,
        TRUNCATES=truncates,
        MAX_GROUPS=next_power_of_2(num_groups),
        num_warps=16,
    )
    return tokens


def sample_shard_triton(
    logits: torch.Tensor, rows: torch.Tensor, num_tokens: int, first_token: int
) -> torch.Tensor:
    """See ``sample_shard_reference``."""
    assert logits.stride(1) == 1 and first_token % GROUP == 0
    _, group_lse = _group_stats(logits, rows, num_tokens)
    out = logits.new_empty(len(logits), dtype=torch.int64)
    num_groups = group_lse.size(1)
    sample_shard_kernel[(len(logits),)](
        logits,
        rows,
        group_lse,
        out,
        num_tokens,
        logits.stride(0),
        num_groups,
        first_token,
        # One more block, because the first group may lie in the middle of one.
        MAX_BLOCKS=next_power_of_2(cdiv(num_groups, GROUP) + 1),
        num_warps=8,
    )
    return out


sample_shard = by_device(sample_shard_reference, sample_shard_triton)


def _group_stats(
    logits: torch.Tensor, rows: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest logit of each group and the log-sum-exp of its logits / temperature, fp32
    [N, groups] each."""
    assert rows.shape == (len(logits), ROW_WORDS)
    assert rows.dtype == torch.int32 and rows.is_contiguous()
    num_groups = cdiv(num_tokens, GROUP)
    group_max = logits.new_empty(len(logits), num_groups, dtype=torch.float32)
    group_lse = torch.empty_like(group_max)
    group_stats_kernel[(len(logits), max(cdiv(num_groups, STATS_TILE), 1))](
        logits,
        rows,
        group_max,
        group_lse,
        num_tokens,
        logits.stride(0),
        num_groups,
        num_warps=4,
    )
    return group_max, group_lse
