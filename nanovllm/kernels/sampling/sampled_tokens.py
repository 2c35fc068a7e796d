"""Replaces the placeholders in a step's input ids by the tokens that the previous step sampled."""

import torch

from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import by_device, tl, triton


def fill_in_sampled_reference(input_ids: torch.Tensor, sampled_tokens: torch.Tensor) -> None:
    """Replaces placeholders in ``input_ids`` by sampled tokens, in place.

    The tokens stay on the device, so a step can be launched before the host knows them.

    Args:
        input_ids: int32 [N]. A negative value is a placeholder: -1 - row stands for the token that
            the previous step sampled in this row.
        sampled_tokens: int64 [rows or more], the tokens of the previous step. A token of -1, which
            means that no token was allowed, becomes token 0. Its results are discarded.
    """
    sampled = sampled_tokens[(-1 - input_ids).clamp(min=0)].clamp(min=0)
    input_ids.copy_(torch.where(input_ids < 0, sampled.to(input_ids.dtype), input_ids))


@triton.jit(do_not_specialize=["num_tokens"])
def _fill_in_sampled_kernel(input_ids_ptr, sampled_tokens_ptr, num_tokens, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(input_ids_ptr + offset, mask=offset < num_tokens, other=0)
    sampled = tl.load(sampled_tokens_ptr - 1 - token, mask=token < 0, other=0).to(tl.int32)
    tl.store(input_ids_ptr + offset, tl.maximum(sampled, 0), mask=token < 0)


def fill_in_sampled_triton(input_ids: torch.Tensor, sampled_tokens: torch.Tensor) -> None:
    block = 256
    grid = (cdiv(len(input_ids), block),)
    _fill_in_sampled_kernel[grid](input_ids, sampled_tokens, len(input_ids), BLOCK=block)


fill_in_sampled = by_device(fill_in_sampled_reference, fill_in_sampled_triton)
