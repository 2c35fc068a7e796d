"""Schedules of batch-invariant decode steps."""

import numpy as np
import pytest

from nanovllm.kernels.attention.fixed_schedule import EXTRA_ROWS, SPLIT, make_fixed_schedule
from nanovllm.kernels.attention.split_kv import KV_SPLIT


def rows_of(schedule):
    rows = schedule.view(KV_SPLIT).ravel()
    used = rows[rows["num_splits"] > 0]
    assert rows["padding"][0, 0] == len(used) and (rows[: len(used)] == used).all()
    return used


@pytest.mark.parametrize("window", [None, 1, 600])
def test_schedules_cut_contexts_at_fixed_positions(window):
    lens = np.array([0, 1, SPLIT, SPLIT + 1, 40_000, 700], np.int32)
    for num_copies, kv_heads in ((1, 1), (20, 1), (1, 20)):
        contexts = np.tile(lens, num_copies)
        schedule = make_fixed_schedule(contexts, kv_heads, window)
        assert len(schedule) == len(contexts) + EXTRA_ROWS
        used = rows_of(schedule)
        assert (np.diff(used["end"] - used["begin"]) <= 0).all()
        slots = []
        for seq, length in enumerate(contexts):
            rows = np.sort(used[used["seq"] == seq], order="split")
            first = 0 if window is None else max(0, length - window) // SPLIT * SPLIT
            assert rows["begin"][0] == first and rows["end"][-1] == length
            assert (rows["begin"][1:] == rows["end"][:-1]).all()
            assert (rows["begin"] % SPLIT == 0).all()
            assert (rows["end"][1:] - rows["begin"][1:] <= SPLIT).all()
            assert (rows["split"] == np.arange(len(rows))).all()
            assert (rows["num_splits"] == len(rows)).all()
            if len(rows) > 1:
                slots.extend(rows["first_slot"] + rows["split"])
        assert sorted(slots) == list(range(len(slots)))
        longest = (used["end"] - used["begin"]).max()
        if window is None:  # with 20 copies the rows do not suffice for all splits of each
            assert (longest > SPLIT) == (num_copies * kv_heads > 1)


def test_with_many_splits_few_contexts_have_several_rows():
    """A row of 3 splits takes half as long as a step of 1,806 splits in 264 slots."""
    lens = np.array([600] * 198 + [2000], np.int32)
    used = rows_of(make_fixed_schedule(lens, 3))
    assert len(used) == 199 + 5 and (used["end"] - used["begin"]).max() == 768
