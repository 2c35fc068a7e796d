"""The router: softmax and top-k in one kernel, which also counts the tokens of each expert.

The experts with the largest logits in fp32 are chosen. If logits are equal, the expert with the
lower index comes first.
"""

from typing import NamedTuple

import torch

from nanovllm.kernels.ordered_bits import ordered_bits_triton
from nanovllm.utils.math import cdiv, next_power_of_2
from nanovllm.utils.triton_compat import by_device, pdl_options, pdl_wait, tl, triton

# Up to this number of tokens, assignments are not sorted, because nearly every one has an expert of
# its own.
MAX_UNSORTED_TOKENS = 4
LOWEST = tl.constexpr(-(1 << 31))  # of int32
UNIT = tl.constexpr(2.0**40)  # of fixed-point probabilities, relative to the largest


class Routing(NamedTuple):
    """The experts of each token.

    ``ranks`` and ``counts`` let ``sort_triton`` sort in one pass. The kernel computes them for more
    than MAX_UNSORTED_TOKENS tokens, or always if asked to. Otherwise they are None.

    Attributes:
        topk_weights: fp32 [N, k], the routing weights: the chosen experts' probabilities, in
            descending order.
        topk_ids: int32 [N, k], the chosen experts' indices.
        ranks: int32 [N, k], the number of earlier tokens in the same chunk with the same expert.
        counts: int32 [num_chunks, E], the number of tokens in each chunk with each expert. A chunk
            is ``chunk_size`` consecutive tokens.
    """

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    ranks: torch.Tensor | None = None
    counts: torch.Tensor | None = None


def chunk_size(num_tokens: int, num_experts: int) -> int:
    """Returns the number of tokens in a chunk: a power of two.

    One program of the router handles one chunk. Small chunks keep more multiprocessors busy, but
    sorting has to sum the counts of all chunks. The tile of logits, [chunk_size, E], has to fit in
    registers.
    """
    return min(16 if num_tokens <= 1024 else 64, max(1, 8192 // next_power_of_2(num_experts)))


def route_reference(
    logits: torch.Tensor, top_k: int, norm_topk_prob: bool, always_sorts: bool = False
) -> Routing:
    """Chooses the experts of each token.

    Args:
        logits: [N, E], the output of the router's linear layer.
        top_k: number of experts per token.
        norm_topk_prob: whether the probabilities of the chosen experts are divided by their sum.
        always_sorts: whether the kernel computes ``ranks`` and ``counts`` for any number of tokens.
            Then the same kernels run for a token, and its routing weights have the same bits,
            whatever the number of tokens.

    Returns:
        The routing, without ``ranks`` and ``counts``.
    """
    logits = logits.float()
    values, experts = logits.sort(dim=-1, descending=True, stable=True)
    values, experts = values[:, :top_k], experts[:, :top_k]
    total = (values if norm_topk_prob else logits).logsumexp(-1, keepdim=True)
    return Routing((values - total).exp(), experts.int())


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    ranks_ptr,
    counts_ptr,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_E: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    BLOCK_K: tl.constexpr = triton.next_power_of_2(TOP_K)
    pdl_wait(PDL)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, BLOCK_E)
    is_real = (token < num_tokens)[:, None] & (expert < NUM_EXPERTS)[None, :]
    address = logits_ptr + token.to(tl.int64)[:, None] * NUM_EXPERTS + expert[None, :]
    logits = tl.load(address, mask=is_real, other=float("-inf")).to(tl.float32)
    # Integers with the order of the logits, because a warp finds the largest of its 32-bit integers
    # in one instruction. An expert that is chosen is no longer free. So none is chosen twice, even
    # of several NaNs.
    order = ordered_bits_triton(tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True))
    is_free = tl.broadcast_to((expert < NUM_EXPERTS)[None, :], (CHUNK, BLOCK_E))
    column = tl.arange(0, BLOCK_K)[None, :]
    values = tl.full([CHUNK, BLOCK_K], float("-inf"), tl.float32)
    largest = tl.full([CHUNK], float("-inf"), tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    experts = tl.zeros([CHUNK, BLOCK_K], tl.int32)
    chosen = tl.zeros([CHUNK, BLOCK_E], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(tl.where(is_free, order, LOWEST), axis=1)
        is_best = is_free & (order == best[:, None])
        index = tl.min(tl.where(is_best, expert[None, :], BLOCK_E), axis=1)
        top = ordered_bits_triton(best).to(tl.float32, bitcast=True)
        values = tl.where(column == i, top[:, None], values)
        if i == 0:
            largest = top
        total += tl.exp(top - largest)  # in order, which does not depend on CHUNK
        experts = tl.where(column == i, index[:, None], experts)
        is_free = is_free & (expert[None, :] != index[:, None])
        chosen += (expert[None, :] == index[:, None]).to(tl.int32)
    if not NORMALIZE:
        # Integers, because their sum does not depend on the order, which depends on CHUNK.
        probabilities = tl.exp(logits - largest[:, None]) * UNIT
        total = tl.sum(probabilities.to(tl.int64), axis=1).to(tl.float32) / UNIT
    weights = tl.exp(values - largest[:, None]) / total[:, None]
    assignment = token[:, None] * TOP_K + column
    mask = (token < num_tokens)[:, None] & (column < TOP_K)
    tl.store(weights_ptr + assignment, weights, mask=mask)
    tl.store(experts_ptr + assignment, experts, mask=mask)
    if ranks_ptr is not None:
        chosen = tl.where((token < num_tokens)[:, None], chosen, 0)
        tl.store(
            counts_ptr + tl.program_id(0) * NUM_EXPERTS + expert,
            tl.sum(chosen, axis=0),
            mask=expert < NUM_EXPERTS,
        )
        earlier = tl.cumsum(chosen, axis=0) - chosen
        ranks = tl.zeros([CHUNK, BLOCK_K], tl.int32)
        for i in tl.static_range(TOP_K):
            index = tl.sum(tl.where(column == i, experts, 0), axis=1)
            rank = tl.sum(tl.where(expert[None, :] == index[:, None], earlier, 0), axis=1)
            ranks = tl.where(column == i, rank[:, None], ranks)
        tl.store(ranks_ptr + assignment, ranks, mask=mask)


def route_triton(
    logits: torch.Tensor, top_k: int, norm_topk_prob: bool, always_sorts: bool = False
) -> Routing:
    num_tokens, num_experts = logits.shape
    assert logits.is_contiguous() and 0 < top_k <= num_experts
    sorts = always_sorts or num_tokens > MAX_UNSORTED_TOKENS
    chunk = chunk_size(num_tokens, num_experts) if sorts else 1
    num_chunks = cdiv(num_tokens, chunk)
    ints = logits.new_empty(2, num_tokens, top_k, dtype=torch.int32)
    routing = Routing(
        logits.new_empty(num_tokens, top_k, dtype=torch.float32),
        ints[0],
        ints[1] if sorts else None,
        logits.new_empty(num_chunks, num_experts, dtype=torch.int32) if sorts else None,
    )
    _route_kernel[(num_chunks,)](
        logits,
        *routing,
        num_tokens,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        NORMALIZE=norm_topk_prob,
        CHUNK=chunk,
        num_warps=(8 if chunk * num_experts > 2048 else 4) if sorts else 1,
        **pdl_options(logits),
    )
    return routing


route = by_device(route_reference, route_triton)
