"""Block tables of a captured step: they travel as wide as the step needs, and lie as wide as any
step may need."""

import torch

from nanovllm.utils.triton_compat import tl, triton, use_triton

BLOCK = 1024  # columns that a program copies


def spread_block_tables_reference(
    packed: torch.Tensor, width: torch.Tensor, tables: torch.Tensor
) -> None:
    columns = int(width)
    tables[:, :columns] = packed[: len(tables) * columns].view(len(tables), columns)


@triton.jit(do_not_specialize=["stride"])
def _spread_block_tables_kernel(packed_ptr, width_ptr, tables_ptr, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    width = tl.load(width_ptr)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(packed_ptr + row * width + column, mask=column < width)
    tl.store(tables_ptr + row * stride + column, block, mask=column < width)


def spread_block_tables_triton(
    packed: torch.Tensor, width: torch.Tensor, tables: torch.Tensor
) -> None:
    num_rows, max_width = tables.shape
    _spread_block_tables_kernel[(num_rows, triton.cdiv(max_width, BLOCK))](
        packed, width, tables, tables.stride(0), BLOCK=BLOCK
    )


def spread_block_tables(packed: torch.Tensor, width: torch.Tensor, tables: torch.Tensor) -> None:
    """Copies rows that lie end to end to the first columns of wider ones.

    The width is read on the device, so that a CUDA graph can replay this.

    Args:
        packed: int32, of which the first rows * width elements are copied.
        width: int32 [1], at most the tables' width.
        tables: int32 [rows, columns]; its other columns stay as they are.
    """
    spread = spread_block_tables_triton if use_triton(tables) else spread_block_tables_reference
    spread(packed, width, tables)
