"""Sorts assignments by expert, and cuts each expert's rows into tiles for a grouped GEMM."""

from typing import NamedTuple

import torch

from nanovllm.kernels.moe.route import Routing, chunk_size
from nanovllm.utils.triton_compat import pdl_options, pdl_wait, tl, triton


class Groups(NamedTuple):
    """Assignments grouped by expert. Each group keeps the order of the tokens.

    Attributes:
        order: int32 [N k], the assignments in sorted order. With an alignment it has more elements,
            of which some, before an expert's first one, are undefined.
        positions: int32 [N k], the index in ``order`` of each assignment.
        tiles: int32 [max_tiles, 3], for each tile of at most ``block_m`` rows: its expert, its
            first index in ``order``, and the end of the expert's assignments in ``order``, which
            may be in a later tile.
        num_tiles: int32 [1], the number of tiles. The other rows of ``tiles`` are undefined.
    """

    order: torch.Tensor
    positions: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor


def max_tiles(num_assignments: int, num_experts: int, block_m: int) -> int:
    """Returns an upper bound on the number of tiles. Each expert has at most one partial tile."""
    num_used = min(num_assignments, num_experts)
    return (num_assignments + num_used * (block_m - 1)) // block_m


@triton.jit(do_not_specialize=["num_assignments", "num_chunks"])
def _sort_kernel(
    experts_ptr,
    ranks_ptr,
    counts_ptr,
    order_ptr,
    positions_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_assignments,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program sorts the SIZE assignments of one chunk of tokens. It sums the counts of all
    chunks itself, because a separate kernel for that would take longer."""
    BLOCK: tl.constexpr = triton.next_power_of_2(SIZE) if SIZE < 256 else 256
    BLOCK_E: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    BLOCK_C: tl.constexpr = 4096 // BLOCK_E if BLOCK_E < 4096 else 1
    pdl_wait(PDL)
    chunk = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    row = tl.arange(0, BLOCK_C)
    totals = tl.zeros([BLOCK_E], tl.int32)
    earlier = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_chunks, BLOCK_C):
        rows = start + row
        counts = tl.load(
            counts_ptr + rows[:, None] * NUM_EXPERTS + expert[None, :],
            mask=(rows < num_chunks)[:, None] & (expert < NUM_EXPERTS)[None, :],
            other=0,
        )
        totals += tl.sum(counts, axis=0)
        earlier += tl.sum(tl.where((rows < chunk)[:, None], counts, 0), axis=0)
    aligned = (totals + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    starts = tl.cumsum(aligned, axis=0) - aligned
    per_expert = (totals + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(per_expert, axis=0)
    if chunk == 0:
        tl.store(num_tiles_ptr, tl.sum(per_expert, axis=0))
    for start in tl.static_range(0, SIZE, BLOCK):
        index = start + tl.arange(0, BLOCK)
        assignment = chunk * SIZE + index
        mask = (index < SIZE) & (assignment < num_assignments)
        experts = tl.load(experts_ptr + assignment, mask=mask, other=0)
        rank = tl.load(ranks_ptr + assignment, mask=mask, other=0)
        rank += tl.gather(earlier, experts, 0)  # now among the expert's rows of all chunks
        first = tl.gather(starts, experts, 0)
        end = first + tl.gather(totals, experts, 0)
        position = first + rank
        tl.store(order_ptr + position, assignment, mask=mask)
        tl.store(positions_ptr + assignment, position, mask=mask)
        # The first row of each tile describes the tile.
        tile = tl.gather(tile_ends - per_expert, experts, 0) + rank // BLOCK_M
        is_first = mask & (rank % BLOCK_M == 0)
        tl.store(tiles_ptr + 3 * tile, experts, mask=is_first)
        tl.store(tiles_ptr + 3 * tile + 1, position, mask=is_first)
        tl.store(tiles_ptr + 3 * tile + 2, end, mask=is_first)


def sort_triton(routing: Routing, block_m: int, alignment: int = 1) -> Groups:
    """Groups the assignments of a routing by expert, into tiles of at most ``block_m`` rows. The
    first index of each expert is a multiple of the alignment. The routing must have ranks and
    counts."""
    num_tokens, top_k = routing.topk_ids.shape
    assert routing.counts is not None
    num_chunks, num_experts = routing.counts.shape
    num_assignments = num_tokens * top_k
    size = chunk_size(num_tokens, num_experts) * top_k
    ints = routing.topk_ids
    most_unused = min(num_assignments, num_experts) * (alignment - 1)
    groups = Groups(
        ints.new_empty(num_assignments + most_unused),
        ints.new_empty(num_assignments),
        ints.new_empty(max_tiles(num_assignments, num_experts, block_m), 3),
        ints.new_empty(1),
    )
    _sort_kernel[(num_chunks,)](
        routing.topk_ids,
        routing.ranks,
        routing.counts,
        *groups,
        num_assignments,
        num_chunks,
        NUM_EXPERTS=num_experts,
        SIZE=size,
        BLOCK_M=block_m,
        ALIGNMENT=alignment,
        num_warps=4,
        **pdl_options(ints),
    )
    return groups
