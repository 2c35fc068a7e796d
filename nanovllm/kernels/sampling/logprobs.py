"""Log-probabilities of a given token and of the k most likely tokens of each row.

The k largest logits of a row lie in the k groups of 128 tokens with the largest maxima. So a top-k
over group maxima and one over k groups replace a top-k over the vocabulary. The kernel reads the
logits once. Besides each group's maximum it computes the group's sum of exponentials, for the
log-sum-exp, and counts the logits above the given token's logit, for the token's rank.
"""

import torch

from nanovllm.kernels.ordered_bits import ordered_bits
from nanovllm.kernels.sampling.fixed_point import from_fixed_point, to_fixed_point
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import by_device, tl, triton

GROUP = 128
TILE = 32  # groups that a program reads


def top_logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes log-probabilities of one given token per row and of the k most likely tokens.

    Args:
        logits: [N, vocab_size], N at least 1.
        token_ids: int64 [N], the given tokens.
        k: at most vocab_size.

    Returns:
        Token ids, int64 [N, 1 + k]: the given token, then the k most likely in descending order.
        Of equally likely tokens the one with the lower id comes first.
        Their log-probabilities, fp32 [N, 1 + k].
        The given token's rank, int64 [N]. The most likely token has rank 1.
    """
    logprobs = logits.float().log_softmax(-1)
    given = logprobs.gather(1, token_ids.unsqueeze(1))
    best_ids, best = _largest(logprobs, k)
    ranks = (logprobs > given).sum(-1) + 1
    return torch.cat((token_ids.unsqueeze(1), best_ids), 1), torch.cat((given, best), 1), ranks


def _largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the indices and the values of the k largest fp32 values of each row, in descending
    order. If values are equal, the one with the lower index comes first. torch.topk would return
    any of them, and a sort of the whole vocabulary would take longer."""
    bits = (values + 0.0).view(torch.int32)  # adding 0 turns -0 into +0
    keys = ordered_bits(bits).long()  # in the order of the values
    indices = torch.arange(values.size(1), device=values.device)
    best = ((keys << 32) | (0x7FFFFFFF - indices)).topk(k).values
    bits = ordered_bits((best >> 32).int())
    return 0x7FFFFFFF - (best & 0xFFFFFFFF), bits.view(torch.float32)


@triton.jit
def _group_kernel(
    logits_ptr,
    token_ids_ptr,
    group_max_ptr,
    group_sum_ptr,
    tile_above_ptr,
    vocab_size,
    num_groups,
    GROUP: tl.constexpr = GROUP,
    TILE: tl.constexpr = TILE,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    logits_ptr += row.to(tl.int64) * vocab_size
    groups = tile * TILE + tl.arange(0, TILE)
    token = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf"))
    logits = logits.to(tl.float32)
    given = tl.load(logits_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    largest = tl.max(logits, axis=1)
    shift = tl.where(largest > -float("inf"), largest, 0.0)
    sums = tl.sum(tl.exp(logits - shift[:, None]), axis=1)
    slot = row * num_groups + groups
    tl.store(group_max_ptr + slot, largest, mask=groups < num_groups)
    tl.store(group_sum_ptr + slot, sums, mask=groups < num_groups)
    above = tl.sum((logits > given).to(tl.int32))
    tl.store(tile_above_ptr + row * tl.num_programs(1) + tile, above)


def top_logprobs_triton(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``top_logprobs_reference``."""
    assert logits.is_contiguous() and token_ids.shape == logits.shape[:1]
    num_rows, vocab_size = logits.shape
    num_groups = cdiv(vocab_size, GROUP)
    num_tiles = cdiv(num_groups, TILE)
    group_max = logits.new_empty(num_rows, num_groups, dtype=torch.float32)
    group_sum = torch.empty_like(group_max)
    num_above = logits.new_empty(num_rows, num_tiles, dtype=torch.int32)
    _group_kernel[(num_rows, num_tiles)](
        logits,
        token_ids,
        group_max,
        group_sum,
        num_above,
        vocab_size,
        num_groups,
        num_warps=8,
    )
    # torch.logsumexp would add in an order that depends on the number of rows.
    largest = group_max.amax(-1, keepdim=True)
    weights = to_fixed_point(group_sum * (group_max - largest).exp())
    log_sum_exp = largest + from_fixed_point(weights.sum(-1, keepdim=True)).log()
    # Stable sorts, and candidates in ascending order, put the lower id of equal logits first.
    groups = group_max.sort(descending=True, stable=True).indices[:, :k].sort().values
    tokens = torch.arange(GROUP, device=logits.device)
    candidates = (groups.unsqueeze(-1) * GROUP + tokens).flatten(1)
    values = logits.gather(1, candidates.clamp(max=vocab_size - 1)).float()
    values.masked_fill_(candidates >= vocab_size, -torch.inf)
    best, indices = (x[:, :k] for x in values.sort(descending=True, stable=True))
    ids = torch.cat((token_ids.unsqueeze(1), candidates.gather(1, indices)), 1)
    given = logits.gather(1, token_ids.unsqueeze(1)).float()
    return ids, torch.cat((given, best), 1) - log_sum_exp, num_above.sum(-1) + 1


top_logprobs = by_device(top_logprobs_reference, top_logprobs_triton)


def pack_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> torch.Tensor:
    """Packs the results of ``top_logprobs`` into one buffer, so that one copy brings them to the
    host.

    Returns:
        int32 [N, 1 + 2 * (1 + k)]: the rank, then a pair of token id and bits of the fp32 logprob
        for each of the 1 + k tokens.
    """
    ids, logprobs, ranks = top_logprobs(logits, token_ids, k)
    pairs = torch.stack((ids.int(), logprobs.contiguous().view(torch.int32)), dim=-1).flatten(1)
    return torch.cat((ranks.int().unsqueeze(1), pairs), dim=1)
