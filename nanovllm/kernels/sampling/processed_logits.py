"""Processed logits, which define the sampling distribution, for
``logprobs_mode="processed_logprobs"``.

Sampling itself does not compute them: sample.py finds one token without the distribution.
"""

import math

import torch

from nanovllm.kernels.sampling.fixed_point import to_fixed_point


def processed_logits(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, truncates: bool
) -> torch.Tensor:
    """Applies temperature, min-p, top-k and top-p, in this order. Truncated logits become -inf.

    Tokens tied with the last kept token are kept. The sampled token is always kept, because
    sampling may round differently. Rows with temperature 0 are not scaled.

    Args:
        logits: [N, vocab_size], after masks, biases and penalties.
        rows: int32 [N, 8], a SAMPLING_ROW each.
        token_ids: int64 [N], the sampled tokens.
        truncates: whether any row has min-p, top-k or top-p.

    Returns:
        fp32 [N, vocab_size].
    """
    settings = rows.view(torch.float32)
    temperature, top_k, top_p, min_p = settings[:, 0], rows[:, 1], settings[:, 2], settings[:, 3]
    scale = torch.where(temperature > 0, temperature, 1.0)
    scaled = logits.float() / scale.unsqueeze(1)
    if not truncates:
        return scaled
    ordered = scaled.sort(dim=-1, descending=True).values
    vocab_size = ordered.size(1)
    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long() - 1
    kept = ordered >= ordered.gather(1, last.unsqueeze(1))
    kept &= ordered >= ordered[:, :1] + min_p.log().unsqueeze(1)
    weights = to_fixed_point((ordered - ordered[:, :1]).exp()).masked_fill_(~kept, 0)
    top_p_weight = top_p.double() * weights.sum(-1)
    weight_before = weights.cumsum(-1).sub_(weights)
    kept &= (weight_before < top_p_weight.unsqueeze(1)) | (top_p >= 1).unsqueeze(1)
    lowest = ordered.masked_fill(~kept, math.inf).amin(1, keepdim=True)
    lowest = torch.minimum(lowest, scaled.gather(1, token_ids.unsqueeze(1)))
    return scaled.masked_fill(scaled < lowest, -math.inf)
