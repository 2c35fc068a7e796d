"""Unpacks block tables for CUDA graphs: the host sends only the columns that a step needs, and a
captured step reads tables of the maximum width."""

import torch

from nanovllm.utils.triton_compat import tl, triton, use_triton

BLOCK = 1024  # columns per program


def unpack_block_tables_reference(
    packed: torch.Tensor, width: torch.Tensor, tables: torch.Tensor
) -> None:
    columns = int(width)
    tables[:, :columns] = packed[: len(tables) * columns].view(len(tables), columns)


@triton.jit(do_not_specialize=["stride"])
def _unpack_block_tables_kernel(packed_ptr, width_ptr, tables_ptr, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    width = tl.load(width_ptr)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(packed_ptr + row * width + column, mask=column < width)
    tl.store(tables_ptr + row * stride + column, block, mask=column < width)


def unpack_block_tables_triton(
    packed: torch.Tensor, width: torch.Tensor, tables: torch.Tensor
) -> None:
    num_rows, max_width = tables.shape
    _unpack_block_tables_kernel[(num_rows, triton.cdiv(max_width, BLOCK))](
        packed, width, tables, tables.stride(0), BLOCK=BLOCK
    )


def unpack_block_tables(packed: torch.Tensor, width: torch.Tensor, tables: torch.Tensor) -> None:
    """Copies contiguous rows of ``width`` columns into the first columns of ``tables``.

    The kernel reads the width on the device, so a CUDA graph can replay it with another width.

    Args:
        packed: int32 [rows * width or more].
        width: int32 [1], at most the number of columns.
        tables: int32 [rows, columns]. Columns from ``width`` on keep their contents.
    """
    unpack = unpack_block_tables_triton if use_triton(tables) else unpack_block_tables_reference
    unpack(packed, width, tables)
