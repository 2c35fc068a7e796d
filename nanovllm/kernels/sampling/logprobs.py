"""Log-probabilities of the token at each position and of the most likely ones.

The k largest of a row lie within the k groups of 128 tokens that have the largest maxima, so two
small top-k replace one over the vocabulary. The same pass that finds the maxima sums each group's
exponentials, for the log-sum-exp, and counts the tokens ahead of the given one, for its rank.
"""

import torch

from nanovllm.utils.triton_compat import tl, triton, use_triton

GROUP = 128


def top_logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, token_ids.unsqueeze(1))
    best, best_ids = logprobs.topk(k, dim=-1)
    ranks = (logprobs > own).sum(-1) + 1
    return torch.cat((token_ids.unsqueeze(1), best_ids), 1), torch.cat((own, best), 1), ranks


@triton.jit
def _group_kernel(
    logits_ptr,
    token_ids_ptr,
    group_max_ptr,
    group_sum_ptr,
    tile_ahead_ptr,
    vocab_size,
    num_groups,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    logits_ptr += row.to(tl.int64) * vocab_size
    groups = tile * TILE + tl.arange(0, TILE)
    token = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf"))
    logits = logits.to(tl.float32)
    own = tl.load(logits_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    largest = tl.max(logits, axis=1)
    shift = tl.where(largest > -float("inf"), largest, 0.0)
    sums = tl.sum(tl.exp(logits - shift[:, None]), axis=1)
    slot = row * num_groups + groups
    tl.store(group_max_ptr + slot, largest, mask=groups < num_groups)
    tl.store(group_sum_ptr + slot, sums, mask=groups < num_groups)
    ahead = tl.sum((logits > own).to(tl.int32))
    tl.store(tile_ahead_ptr + row * tl.num_programs(1) + tile, ahead)


def top_logprobs_triton(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert logits.is_contiguous() and token_ids.shape == logits.shape[:1]
    num_rows, vocab_size = logits.shape
    num_groups, tile = triton.cdiv(vocab_size, GROUP), 32
    num_tiles = triton.cdiv(num_groups, tile)
    group_max = logits.new_empty(num_rows, num_groups, dtype=torch.float32)
    group_sum = torch.empty_like(group_max)
    ahead = logits.new_empty(num_rows, num_tiles, dtype=torch.int32)
    _group_kernel[(num_rows, num_tiles)](
        logits,
        token_ids,
        group_max,
        group_sum,
        ahead,
        vocab_size,
        num_groups,
        GROUP=GROUP,
        TILE=tile,
        num_warps=8,
    )
    total = (group_max + group_sum.log()).logsumexp(-1, keepdim=True)
    groups = group_max.topk(min(k, num_groups), sorted=False).indices.unsqueeze(-1)
    candidates = (groups * GROUP + torch.arange(GROUP, device=logits.device)).flatten(1)
    values = logits.gather(1, candidates.clamp(max=vocab_size - 1)).float()
    values.masked_fill_(candidates >= vocab_size, -torch.inf)
    best, places = values.topk(k)
    ids = torch.cat((token_ids.unsqueeze(1), candidates.gather(1, places)), 1)
    own = logits.gather(1, token_ids.unsqueeze(1)).float()
    return ids, torch.cat((own, best), 1) - total, ahead.sum(-1) + 1


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural logarithms of softmax(logits), for one given token a row and the k most likely.

    Args:
        logits: [N, vocab_size], N at least 1.
        token_ids: int64 [N].
        k: at most vocab_size.

    Returns:
        Token ids, int64 [N, 1 + k], the given one first and then from the most likely; their
        logprobs, fp32 [N, 1 + k]; and the given token's rank, int64 [N], 1 for the most likely.
    """
    if use_triton(logits):
        return top_logprobs_triton(logits, token_ids, k)
    return top_logprobs_reference(logits, token_ids, k)


def pack_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [N, 1 + 2 * (1 + k)] on the logits' device, one buffer to copy to the host: the rank
    of each row's token (int64 [N]), then pairs of token id and fp32 logprob, its own and the k
    best."""
    ids, logprobs, ranks = top_logprobs(logits, token_ids, k)
    pairs = torch.stack((ids.int(), logprobs.contiguous().view(torch.int32)), dim=-1).flatten(1)
    return torch.cat((ranks.int().unsqueeze(1), pairs), dim=1)
