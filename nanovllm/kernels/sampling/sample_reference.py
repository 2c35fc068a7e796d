"""Sampling in PyTorch and NumPy: for CPUs, and the reference of the kernels. See sample.py for the
algorithm."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.kernels.ordered_bits import ordered_bits
from nanovllm.kernels.sampling import philox
from nanovllm.kernels.sampling.fixed_point import to_fixed_point
from nanovllm.kernels.sampling.philox import GROUP, exponential_noise
from nanovllm.kernels.sampling.sampling_row import SAMPLING_ROW


def sample_reference(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """See ``sample``."""
    params = rows.cpu().numpy().view(SAMPLING_ROW)[:, 0]
    if not params["temperature"].any():
        return torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), -1)
    tokens = [_sample_row(z, p) for z, p in zip(logits.float().cpu(), params, strict=True)]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def sample_shard_reference(
    logits: torch.Tensor, rows: torch.Tensor, num_tokens: int, first_token: int
) -> torch.Tensor:
    """Samples one token per row from one shard of the vocabulary, ignoring top-k, top-p and min-p.

    The maximum of the results over all shards is the sample over the whole vocabulary, and
    ``unpack_token_ids`` extracts its token. The lowest token wins a tie.

    Args:
        logits: [N, num_tokens or more], of the tokens from ``first_token`` on.
        rows: int32 [N, ROW_WORDS], a SAMPLING_ROW each.
        num_tokens: size of the shard.
        first_token: a multiple of GROUP.

    Returns:
        int64 [N]: the score, as a sortable key, in the high 32 bits and the token in the low ones.
    """
    assert first_token % GROUP == 0
    params = rows.cpu().numpy().view(SAMPLING_ROW)[:, 0]
    sampled = [
        _sample_untruncated(z, temperature, seed, position, first_token)
        for z, (temperature, seed, position) in zip(
            logits[:, :num_tokens].float().cpu(),
            params[["temperature", "seed", "position"]].tolist(),
            strict=True,
        )
    ]
    score, token = torch.tensor(sampled, dtype=torch.float64, device="cpu").view(-1, 2).unbind(1)
    key = ordered_bits((score.float() + 0.0).view(torch.int32)).long()
    return ((key << 32) | (0x7FFFFFFF - token.long().clamp(min=0))).to(logits.device)


def _sample_row(logits: torch.Tensor, params: np.void) -> int:
    """Samples one token from fp32 logits [vocab_size]. Returns -1 if all logits are -inf or any is
    NaN or +inf."""
    temperature, top_k, top_p, min_p, seed, position, _ = params.item()
    _, token = _sample_untruncated(logits, temperature, seed, position)
    if token < 0 or temperature == 0:
        return token
    max_logit = logits.max()
    threshold = torch.tensor(-math.inf, device="cpu")
    if min_p > 0:
        threshold = max_logit + temperature * math.log(min_p)
    if 0 < top_k < len(logits):
        threshold = torch.maximum(threshold, logits.topk(top_k).values[-1])
    if top_p < 1:
        weights = to_fixed_point(((logits - max_logit) / temperature).exp())
        top_p_weight = top_p * weights[logits >= threshold].sum()
    scores = None
    while logits[token] < threshold or (
        top_p < 1 and weights[logits > logits[token]].sum() >= top_p_weight
    ):
        if scores is None:
            log_weights = logits * (1 / temperature)
            scores = _gumbel_scores(log_weights, seed, position, philox.RESAMPLE_STREAM, 0)
        scores[(logits < threshold) | (logits <= logits[token])] = -math.inf
        token = int(scores.argmax())
    return token


def _sample_untruncated(
    logits: torch.Tensor, temperature: float, seed: int, position: int, first_token: int = 0
) -> tuple[float, int]:
    """Samples a group and then a token of it, ignoring top-k, top-p and min-p.

    Args:
        logits: fp32 [num_tokens], of the tokens from ``first_token`` on.

    Returns:
        The score of the group and the token: (-inf, -1) if all logits are -inf, and (+inf, -1) if
        any logit is NaN or +inf.
    """
    if not (logits < math.inf).all():
        return math.inf, -1
    # The padding ensures at least one group, even if the shard has no tokens.
    groups = F.pad(logits, (0, GROUP - len(logits) % GROUP), value=-math.inf).view(-1, GROUP)
    scores = groups.amax(1)
    if temperature > 0:
        log_sum_exp = (groups * (1 / temperature)).logsumexp(1)
        first_group = first_token // GROUP
        scores = _gumbel_scores(log_sum_exp, seed, position, philox.GROUP_STREAM, first_group)
    group = int(scores.argmax())
    best, start = scores[group].item(), first_token + group * GROUP
    scores = groups[group]
    if temperature > 0:
        scores = scores * (1 / temperature)
        scores = _gumbel_scores(scores, seed, position, philox.TOKEN_STREAM, start)
    return best, start + int(scores.argmax()) if best > -math.inf else -1


def _gumbel_scores(
    log_weights: torch.Tensor, seed: int, position: int, stream: int, start: int
) -> torch.Tensor:
    """Returns log w - log E for items ``start``, ``start + 1``, ... Their argmax is the sample."""
    noise = exponential_noise(seed, position, stream, start, start + len(log_weights))
    return log_weights - torch.from_numpy(noise).log()
