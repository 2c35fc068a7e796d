"""In-place edits of logits before sampling: penalties, logit bias, token masks.

Each edit touches only the rows and tokens that need it. None synchronises with the host.
"""

from collections.abc import Iterable

import numpy as np
import torch

from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import by_device, tl, triton


def penalise(
    logits: torch.Tensor,
    rows: torch.Tensor,
    penalties: torch.Tensor,
    lens: torch.Tensor,
    token_ids: torch.Tensor,
    generated: torch.Tensor,
) -> None:
    """Applies the repetition penalty to all tokens of a row's prompt and output, then the frequency
    and presence penalties to its output tokens, as vLLM and the OpenAI API define them.

    Args:
        logits: fp32 [N, vocab_size].
        rows: int [M], the distinct rows to penalise.
        penalties: fp32 [M, 3]: repetition, frequency, presence. Neutral values are 1, 0, 0.
        lens: int [M], how many of the tokens belong to each row.
        token_ids: int [total], the prompt and output tokens, row by row.
        generated: bool [total], true for output tokens.
    """
    entries = torch.repeat_interleave(lens, output_size=len(token_ids))  # index into rows
    index = rows[entries].long() * logits.size(1) + token_ids
    counts = torch.zeros_like(logits).view(-1)
    counts.index_add_(0, index, generated.to(counts.dtype))
    repetition, frequency, presence = penalties[entries].unbind(1)
    count = counts[index]
    values = logits.view(-1)[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * count + presence * (count > 0)
    # A repeated token is written repeatedly, each time with the same value.
    logits.view(-1)[index] = values


def add_bias(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor
) -> None:
    """Adds fp32 values [total] to the logits at (row, token). A value of -inf forbids the token."""
    logits.view(-1).index_add_(0, rows.long() * logits.size(1) + token_ids, values)


@triton.jit
def _mask_kernel(logits_ptr, rows_ptr, mask_ptr, vocab_size, num_words, BLOCK: tl.constexpr):
    entry = tl.program_id(0)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(mask_ptr + entry * num_words + word, mask=word < num_words, other=0)
    bit = tl.arange(0, 32)[None, :]
    token = word[:, None] * 32 + bit
    forbidden = ((bits[:, None] >> bit) & 1) == 0
    row = tl.load(rows_ptr + entry).to(tl.int64)
    tl.store(
        logits_ptr + row * vocab_size + token,
        -float("inf"),
        mask=forbidden & (token < vocab_size),
    )


def bit_mask(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Returns a mask row for ``apply_mask`` that allows only the given tokens."""
    bits = np.zeros(cdiv(vocab_size, 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


def apply_mask_reference(logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> None:
    """Forbids the tokens whose bits are 0.

    Args:
        logits: fp32 [N, vocab_size].
        rows: int32 [M], the distinct rows to mask.
        mask: int32 [M, ceil(vocab_size / 32)]. Bit i of word w stands for token 32 * w + i.
    """
    bits = mask.unsqueeze(-1) >> torch.arange(32, device=mask.device) & 1
    forbidden = bits.flatten(1)[:, : logits.size(1)] == 0
    logits[rows.long()] = logits[rows.long()].masked_fill(forbidden, -torch.inf)


def apply_mask_triton(logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> None:
    assert logits.is_contiguous() and mask.is_contiguous() and mask.shape[0] == rows.numel()
    num_words = cdiv(logits.size(1), 32)
    assert mask.shape[1] == num_words
    block = 128
    _mask_kernel[(rows.numel(), cdiv(num_words, block))](
        logits, rows, mask, logits.size(1), num_words, BLOCK=block, num_warps=4
    )


apply_mask = by_device(apply_mask_reference, apply_mask_triton)
