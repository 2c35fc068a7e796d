"""How a decode step's attention is divided among programs."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kernels.attention import split_kv
from nanovllm.kernels.attention.split_kv import (
    KV_SPLIT,
    make_split_kv_schedule,
    max_num_splits,
    max_partial_slots,
    max_window_splits,
)
from nanovllm.utils.math import cdiv


def divide(
    lens: list[int], kv_heads: int, tile: int, num_programs: int, window: int | None = None
) -> np.ndarray:
    """The items that are any."""
    context_lens = np.array(lens, np.int32)
    rows = make_split_kv_schedule(context_lens, kv_heads, tile, num_programs, window)
    assert rows.dtype == np.int32
    assert len(rows) == max_num_splits(len(lens), kv_heads, num_programs)
    items = rows.view(KV_SPLIT)[:, 0]
    used = items[items["num_splits"] > 0]
    assert (items[: len(used)]["num_splits"] > 0).all(), "what is nothing comes last"
    return used


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 5000) | st.integers(0, 60), min_size=1, max_size=300),
    st.integers(1, 64),
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from([264, 528]),
    st.none() | st.integers(1, 2000),
)
def test_each_token_of_the_window_is_in_one_split(lens, kv_heads, tile, num_programs, window):
    items = divide(lens, kv_heads, tile, num_programs, window)
    found: dict[int, list[tuple[int, int]]] = {}
    slots: list[int] = []
    for item in items[np.lexsort((items["split"], items["seq"]))]:
        splits = found.setdefault(int(item["seq"]), [])
        assert item["split"] == len(splits)
        splits.append((int(item["begin"]), int(item["end"])))
        if item["num_splits"] > 1:
            slots.append(int(item["first_slot"] + item["split"]))
    assert sorted(found) == list(range(len(lens)))
    for seq, splits in found.items():
        assert (items[items["seq"] == seq]["num_splits"] == len(splits)).all()
        window_begin = max(0, lens[seq] - (window or lens[seq]))
        assert splits[0][0] == window_begin // tile * tile and splits[-1][1] == lens[seq]
        assert all(end == begin for (_, end), (begin, _) in pairwise(splits))
        assert all(begin % tile == 0 for begin, _ in splits)
        assert len(splits) == 1 or all(begin < end for begin, end in splits), "an empty split"
    if window is not None:  # the kernel launches no more
        assert max(map(len, found.values())) <= max_window_splits(window, tile)
    assert len(set(slots)) == len(slots)
    assert max(slots, default=0) < max_partial_slots(kv_heads, num_programs)
    sizes = -((items["begin"] - items["end"]) // tile)
    assert (sizes[:-1] >= sizes[1:]).all(), "not the longest first, in tiles"


@pytest.mark.parametrize("num_programs", [264, 528])
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize(
    "lens", [[4000], [8000, 100, 100], [500] * 8, [100, 2000] * 8, list(range(100, 1400, 20))]
)
def test_no_split_is_much_longer_than_an_even_share(kv_heads, lens, num_programs):
    """Guards a program that runs on alone."""
    items = divide(lens, kv_heads, 64, num_programs)
    share = sum(lens) * kv_heads / num_programs
    assert (items["end"] - items["begin"]).max() <= share + 2 * 64


@pytest.mark.parametrize("kv_heads", [2, 4, 8])
@pytest.mark.parametrize("num_seqs", [1, 2, 4, 8, 12])
def test_even_shares_are_computed_at_once(num_seqs, kv_heads):
    """A few programs that start later would take a third of the time again, or more."""
    for num_programs in (396, 528):
        items = divide([30_100] * num_seqs, kv_heads, 64, num_programs)
        assert 0.7 * num_programs < len(items) * kv_heads <= num_programs


def end_of_last_split(lens: list[int], target: int, num_splits: int) -> float:
    """In tiles: of the longest split, or of the first one that starts late."""
    splits: list[int] = []
    for length in filter(None, lens):
        count = cdiv(length, target)
        splits += [cdiv(length, count)] * count
    splits.sort(reverse=True)
    share_of_late = len(splits) / num_splits - 1
    late = splits[num_splits] if share_of_late > 0 else 0
    return max(splits[0], (1.3 + 0.6 * share_of_late) * late)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 300) | st.just(40), min_size=1, max_size=40),
    st.sampled_from([49, 66, 99]),
    st.integers(0, 80),
)
def test_the_last_split_ends_as_early_as_possible(lens, num_splits, num_padding):
    """Among up to 32 lengths of splits. Rows that pad a CUDA graph make no difference."""
    found = split_kv._target_length(np.array(lens + [0] * num_padding), num_splits)
    if not any(lens):
        assert found == 1
        return
    least = cdiv(sum(lens), num_splits)
    targets = range(least, 2 * least, cdiv(least, 32))
    assert found in targets and len(targets) <= 32
    ends = {target: end_of_last_split(lens, target, num_splits) for target in targets}
    assert ends[found] == pytest.approx(min(ends.values()))


def test_with_more_sequences_than_splits_at_once_lengths_are_the_least():
    assert split_kv._target_length(np.array([10] * 50), 49) == 11
    assert split_kv._target_length(np.array([10] * 50 + [0] * 14), 50) == 10


def test_short_splits_may_start_later():
    """Those of 100 tokens take less time than what longer splits of the others would add."""
    items = divide([100, 2000] * 8, 8, 64, 264)
    lens = items["end"] - items["begin"]
    assert len(items) * 8 > 264 and lens.max() == 512


def test_what_is_outside_of_the_window_takes_no_program():
    items = divide([50_000, 700, 90], 4, 64, 264, window=512)
    lens = items["end"] - items["begin"]
    assert lens.sum() <= 512 + 512 + 90 + 3 * 64
    assert lens.max() <= lens.sum() * 4 / 264 + 2 * 64


def test_a_window_bounds_the_number_of_programs_of_one_sequence():
    """A window of 128 tokens overlaps two tiles of 64 at least, and three unless it is aligned."""
    lens = range(1, 2000)
    counts = {len(divide([length], 8, 64, 528, window=128)) for length in lens}
    assert counts == {1, 2, 3} and max_window_splits(128, 64) == 3
    assert max_window_splits(1, 64) == 1 and max_window_splits(65, 64) == 2


def test_a_step_later_only_the_ends_differ():
    """Schedules of equal numbers of tiles are computed once."""
    lens = np.array([300, 65, 700], np.int32)
    before = split_kv._split_few.cache_info().hits
    now, later = (
        make_split_kv_schedule(lens + step, 8, 64, 264).view(KV_SPLIT)[:, 0] for step in (0, 2)
    )
    assert split_kv._split_few.cache_info().hits == before + 1
    last = now["end"] == lens[now["seq"]]
    assert last.sum() == 3 and (later["end"] == now["end"] + 2 * last).all()
    now["end"] = later["end"]
    assert (now == later).all()
    assert (make_split_kv_schedule(lens, 8, 64, 264).view(KV_SPLIT)[:, 0]["end"] <= 700).all()


def test_many_contexts_are_not_cut():
    assert len(divide([700] * 256, 8, 64, 264)) == 256
