"""Weights brought into the L2 cache while the GPU's memory has nothing else to do.

Between the products of a layer are small kernels, which read little. Programs of their own, beside
those that do a kernel's work, then ask for the first weights of the product that comes next.
"""

import torch

from nanovllm.kernels.compat import tl, triton

MAX_ROWS = 512  # with more of them, reading weights is a small part of their product
MAX_BYTES = 16 << 20  # some of the L2 cache stays for the rest
NUM_SHARES = 128
PIECE = 1024  # columns asked for at once


def num_columns_ahead(num_rows: int, weight: torch.Tensor | None, pdl: bool) -> int:
    """How many columns of the weight to bring in for so many rows; 0 where that is not possible.
    GPUs that can are those with programmatic dependent launch (``pdl``)."""
    if weight is None or not pdl or num_rows > MAX_ROWS:
        return 0
    out_features, width = weight.shape
    if weight.itemsize != 2 or not weight.is_contiguous() or width % 8:  # pieces of 16 bytes
        return 0
    return min(width, MAX_BYTES // (2 * out_features) // 8 * 8)


@triton.jit
def prefetch(address, num_bytes):
    """Asks for bytes from each address on, a multiple of 16 like their number, from Hopper on.
    Nothing is asked for where that is 0. A warp's threads ask one after the other."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [address.to(tl.int64, bitcast=True), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_share(
    ptr, num_rows, width, columns, share, NUM_SHARES: tl.constexpr, PIECE: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """One of NUM_SHARES of the first columns of a matrix [num_rows, width] of half precision, in
    pieces of up to PIECE columns, by a program of so many threads."""
    pieces_of_row = tl.cdiv(columns, PIECE)
    num_pieces = num_rows * pieces_of_row
    for start in tl.range(share * THREADS, num_pieces, NUM_SHARES * THREADS):
        piece = start + tl.arange(0, THREADS)
        column = piece % pieces_of_row * PIECE
        address = ptr + (piece // pieces_of_row).to(tl.int64) * width + column
        num_columns = tl.where(piece < num_pieces, tl.minimum(columns - column, PIECE), 0)
        prefetch(address, num_columns * 2)
