"""Block tables on the device: the host sends only the blocks added since the last step."""

from typing import NamedTuple

import torch

from nanovllm.utils.math import cdiv
from nanovllm.utils.packed_tensors import ALIGNMENT
from nanovllm.utils.triton_compat import by_device, tl, triton

BLOCK = 1024  # columns per program


class BlockTableUpdate(NamedTuple):
    """What a step changes in the block tables, and which rows it reads. All tensors are int32.

    Attributes:
        entries: [groups, num_seqs, 4]. The four numbers of a sequence are its row (-1 for padding),
            the length of its block table, the offset into ``new_blocks`` of its first new block,
            and the number of its new blocks.
        new_blocks: [total number of new blocks or more], the blocks at the end of each block table
            that the device does not have yet.
    """

    entries: torch.Tensor
    new_blocks: torch.Tensor


class BlockTables:
    """The block tables of all sequences with KV blocks, and those of the current step.

    A sequence keeps one row of ``resident`` for as long as it has KV blocks. ``step`` has the block
    tables of the current step's sequences in batch order.

    Args:
        num_groups: groups of attention layers that share a block table.
        num_rows: maximum number of sequences.
        width: maximum number of blocks of a sequence.
    """

    def __init__(self, num_groups: int, num_rows: int, width: int, device: torch.device) -> None:
        # Kernels may load entries that they do not use, so all entries must be valid blocks. The
        # number of rows is rounded up, so that the table of each group is aligned to 16 bytes.
        shape = num_groups, cdiv(num_rows, ALIGNMENT) * ALIGNMENT, width
        self.resident, self.step = torch.zeros(2, *shape, dtype=torch.int32, device=device)

    def update(self, update: BlockTableUpdate) -> torch.Tensor:
        """Stores a step's new blocks and returns the block tables of its sequences.

        Returns:
            int32 [groups, num_seqs, width], which the next update overwrites.
        """
        step = self.step[:, : update.entries.size(1)]
        update_block_tables(self.resident, update, step)
        return step


def update_reference(resident: torch.Tensor, update: BlockTableUpdate, step: torch.Tensor) -> None:
    """Stores new blocks in the resident tables, and copies the step's tables to ``step``, [groups,
    num_seqs, width]. Entries after the end of a table are not written."""
    for group, entries in enumerate(update.entries):
        rows, num_blocks, first_new, num_new = entries.T
        rows = rows.long().clamp(min=0)
        seqs = torch.arange(len(rows), device=rows.device).repeat_interleave(num_new)
        offsets = torch.arange(len(seqs), device=rows.device)  # counted from 0 in each sequence
        offsets -= (num_new.cumsum(0) - num_new)[seqs]
        new_blocks = update.new_blocks[first_new[seqs] + offsets]
        resident[group, rows[seqs], (num_blocks - num_new)[seqs] + offsets] = new_blocks
        width = int(num_blocks.max()) if len(rows) else 0
        used = torch.arange(width, device=rows.device) < num_blocks[:, None]
        step[group, :, :width][used] = resident[group, rows, :width][used]


@triton.jit(do_not_specialize=["num_seqs", "group_stride", "row_stride"])
def _update_kernel(
    resident_ptr,
    entries_ptr,
    new_blocks_ptr,
    step_ptr,
    num_seqs,
    group_stride,
    row_stride,
    BLOCK: tl.constexpr = BLOCK,
):
    seq, group = tl.program_id(0), tl.program_id(2)
    entries_ptr += (group * num_seqs + seq) * 4
    row, num_blocks = tl.load(entries_ptr), tl.load(entries_ptr + 1)
    first_new, num_new = tl.load(entries_ptr + 2), tl.load(entries_ptr + 3)
    num_old = num_blocks - num_new
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = column < num_blocks
    is_new = used & (column >= num_old)
    resident_ptr += group.to(tl.int64) * group_stride + row.to(tl.int64) * row_stride + column
    step_ptr += group.to(tl.int64) * group_stride + seq.to(tl.int64) * row_stride + column
    old = tl.load(resident_ptr, mask=column < num_old)
    new = tl.load(new_blocks_ptr + first_new + column - num_old, mask=is_new)
    tl.store(resident_ptr, new, mask=is_new)
    tl.store(step_ptr, tl.where(is_new, new, old), mask=used)


def update_triton(resident: torch.Tensor, update: BlockTableUpdate, step: torch.Tensor) -> None:
    num_groups, num_seqs, width = step.shape
    grid = num_seqs, cdiv(width, BLOCK), num_groups
    _update_kernel[grid](resident, *update, step, num_seqs, step.stride(0), step.stride(1))


update_block_tables = by_device(update_reference, update_triton)
