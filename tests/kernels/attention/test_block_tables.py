"""Block tables spread to wider rows, against plain PyTorch."""

import pytest
import torch

from nanovllm.kernels.attention.block_tables import (
    BLOCK,
    unpack_block_tables_reference,
    unpack_block_tables_triton,
)


@pytest.mark.parametrize("rows, width, max_width", [(1, 1, 1), (3, 2, 7), (2, BLOCK + 5, 2500)])
def test_rows_reach_their_places_and_nothing_else_changes(rows, width, max_width, device):
    packed = torch.arange(1, rows * width + 9, dtype=torch.int32, device=device)
    columns = torch.tensor([width], dtype=torch.int32, device=device)
    tables = torch.full((rows + 1, max_width), -1, dtype=torch.int32, device=device)
    unpack_block_tables_triton(packed, columns, tables[:rows])
    assert tables[:rows, :width].flatten().tolist() == list(range(1, rows * width + 1))
    assert (tables[:rows, width:] == -1).all() and (tables[rows] == -1).all()
    expected = torch.full_like(tables, -1)
    unpack_block_tables_reference(packed, columns, expected[:rows])
    assert torch.equal(tables, expected)
