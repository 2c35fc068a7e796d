"""Block tables on the device, over many steps, against lists."""

import random

import pytest
import torch

from nanovllm.kernels.attention.block_tables import (
    BLOCK,
    BlockTables,
    BlockTableUpdate,
    update_reference,
    update_triton,
)


def make_update(groups: list[dict[int, list[int]]], sent: list[dict[int, int]], rows, padding, dev):
    """What a step with the sequences of these rows sends: of each table its end, which has not been
    sent yet. The buffer goes on after them."""
    new_blocks: list[int] = []
    entries = []
    for tables, done in zip(groups, sent, strict=True):
        entries.append([])
        for row in rows:
            new = tables[row][done[row] :]
            entries[-1].append([row, len(tables[row]), len(new_blocks), len(new)])
            new_blocks += new
        entries[-1] += [[-1, 0, 0, 0]] * padding
    values = entries, [*new_blocks, 10**9]
    return BlockTableUpdate(*(torch.tensor(x, dtype=torch.int32, device=dev) for x in values))


@pytest.mark.parametrize("update", [update_reference, update_triton])
@pytest.mark.parametrize("num_groups, width", [(1, 6), (2, 9), (1, BLOCK + 3)])
def test_each_step_reads_the_tables_of_its_sequences(update, num_groups, width, device):
    rng = random.Random(width)
    num_rows = 5
    shape = num_groups, num_rows, width
    resident, step = torch.zeros(2, *shape, dtype=torch.int32, device=device)
    groups = [{row: [] for row in range(num_rows)} for _ in range(num_groups)]
    sent = [dict.fromkeys(range(num_rows), 0) for _ in range(num_groups)]
    for _ in range(12):
        rows = rng.sample(range(num_rows), rng.randrange(1, num_rows))
        for tables, done in zip(groups, sent, strict=True):
            for row in rows:
                if rng.random() < 0.3:  # another sequence has the row now
                    tables[row], done[row] = [], 0
                most = width - len(tables[row])
                count = rng.choice((0, 1, min(3, most), most)) if most else 0
                tables[row] = tables[row] + [rng.randrange(1, 1000) for _ in range(count)]
        change = make_update(groups, sent, rows, rng.randrange(2), device)
        update(resident, change, step[:, : change.entries.size(1)])
        for group, (tables, done) in enumerate(zip(groups, sent, strict=True)):
            for i, row in enumerate(rows):
                done[row] = len(tables[row])
                assert step[group, i, : done[row]].tolist() == tables[row]
                assert resident[group, row, : done[row]].tolist() == tables[row]
    assert step.max() < 1000 and resident.max() < 1000, "what comes after the new blocks was read"


def test_padding_and_rows_left_out_stay_as_they_are(device):
    tables = BlockTables(1, 4, 3, device)
    ints = [[[2, 2, 0, 2]]], [8, 9]
    update = BlockTableUpdate(*(torch.tensor(x, dtype=torch.int32, device=device) for x in ints))
    assert tables.update(update)[0, 0, :2].tolist() == [8, 9]
    ints = [[[1, 1, 0, 1], [-1, 0, 0, 0], [-1, 0, 0, 0]]], [7]
    update = BlockTableUpdate(*(torch.tensor(x, dtype=torch.int32, device=device) for x in ints))
    step = tables.update(update)
    assert (step.shape, step[0, 0, 0].item()) == ((1, 3, 3), 7)
    assert tables.resident[0].tolist() == [[0, 0, 0], [7, 0, 0], [8, 9, 0], [0, 0, 0]]
