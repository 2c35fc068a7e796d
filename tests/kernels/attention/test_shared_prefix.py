"""Decode attention of sequences that share the first blocks of their contexts."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine import shared_prefixes
from nanovllm.engine.shared_prefixes import find_shared_prefixes
from nanovllm.kernels.attention import decode, prefix_decode, prefix_schedule, triton_backend
from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.prefix_decode import prefix_tile
from nanovllm.kernels.attention.prefix_schedule import (
    MEMBER_WORDS,
    MIN_SEQS,
    NO_PREFIXES,
    PREFIX_SPLIT,
    PrefixTile,
    make_shared_schedule,
    max_shared_slots,
    schedule_layout,
)
from nanovllm.kernels.attention.split_kv import KV_SPLIT, max_num_splits
from nanovllm.kernels.attention.triton_backend import TritonAttention
from tests.kernels.attention.test_attention import Paged
from tests.kernels.conftest import DEVICE

SLOW = [] if DEVICE == "cuda" else [pytest.mark.slow]


class SharedPaged(Paged):
    """Contexts of which some begin with the same blocks.

    Args:
        groups: for each group its sequences, and the number of their common blocks. Inner groups
            come after outer ones.
    """

    def __init__(self, contexts, groups, *args):
        super().__init__(contexts, [1] * len(contexts), *args)
        block = self.cache.k.size(1)
        for seqs, num_blocks in groups:
            leader, num_tokens = seqs[0], num_blocks * block
            for seq in seqs[1:]:
                assert num_tokens < contexts[seq]
                self.tables[seq, :num_blocks] = self.tables[leader, :num_blocks]
                self.ks[seq][:num_tokens] = self.ks[leader][:num_tokens]
                self.vs[seq][:num_tokens] = self.vs[leader][:num_tokens]
        counts = [-(-length // block) for length in contexts]
        tables = [row[:n] for row, n in zip(self.tables.tolist(), counts, strict=True)]
        self.prefixes = find_shared_prefixes(tables, block, 0)


@pytest.fixture(autouse=True)
def short_prefixes_pay(monkeypatch):
    monkeypatch.setattr(shared_prefixes, "MIN_TOKENS", 1)
    if DEVICE == "cpu":  # fewer programs are faster in Triton's interpreter
        monkeypatch.setattr(decode, "NUM_MULTIPROCESSORS", 8)
        monkeypatch.setattr(prefix_decode, "HOPPER_MULTIPROCESSORS", 8)


HALF, FULL = torch.float16, torch.float32
# Context lengths; groups; q_heads, kv_heads, head_dim and block size; dtype.
CASES = {
    "two-groups-beside-others": (
        [50 + 7 * i for i in range(10)] + [1, 40],
        [([0, 1, 2, 4], 2), ([3, 5, 6, 8, 9], 4)],
        (4, 2, 64, 16),
        FULL,
    ),
    "levels": (
        [90 + 5 * i for i in range(10)],
        [([*range(9)], 1), ([0, 2, 3, 5], 4), ([1, 4, 6, 7], 3)],
        (6, 2, 64, 16),
        HALF,
    ),
    "more-than-a-tile": ([80] * 20, [([*range(20)], 2)], (8, 1, 64, 32), FULL),
    "ends-in-a-tile-of-keys": ([77, 78, 90, 81], [([*range(4)], 9)], (2, 2, 128, 8), HALF),
    "only-the-new-token-is-left": ([65] * 4, [([*range(4)], 4)], (4, 2, 96, 16), FULL),
    "d256": ([300, 280, 270, 290, 40], [([*range(4)], 1)], (2, 1, 256, 256), HALF),
    "odd-block-size": ([50, 60, 70, 80, 33], [([*range(4)], 6)], (3, 1, 96, 7), HALF),
    "8-heads-per-kv-head": ([150, 160, 170, 180], [([*range(4)], 2)], (16, 2, 64, 64), HALF),
}
if DEVICE == "cuda":
    MANY = [640 + i % 90 for i in range(100)]
    GROUPS = [([*range(70)], 1), ([*range(40)], 2), ([*range(80, 100)], 2)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        CASES |= {
            f"many-{dtype}": (MANY, GROUPS, (16, 8, 128, 256), dtype),
            f"many-d64-{dtype}": (MANY, GROUPS, (14, 2, 64, 256), dtype),
            f"many-d256-{dtype}": (MANY[:40], GROUPS[1:2], (8, 4, 256, 256), dtype),
            f"many-block16-{dtype}": (MANY, [([*range(70)], 37)], (32, 8, 128, 16), dtype),
        }
FEATURES = {
    "plain": AttentionParams(0.1),
    "softcap-sinks": AttentionParams(0.1, None, 2.0, torch.linspace(-2, 2, 32)),
}


def params_for(name, q_heads, device):
    params = FEATURES[name]
    if params.sinks is None:
        return params
    return params._replace(sinks=params.sinks[:q_heads].contiguous().to(device))


@pytest.mark.parametrize(
    ("case", "features"),
    [
        pytest.param(case, features, marks=[] if i % 2 == j else SLOW)
        for i, case in enumerate(CASES)
        for j, features in enumerate(FEATURES)
    ],
)
def test_attention_with_shared_prefixes(case, features, device, monkeypatch):
    contexts, groups, shape, dtype = CASES[case]
    paged = SharedPaged(contexts, groups, *shape, dtype, device)
    assert len(paged.prefixes.groups) == len(groups)
    backend = TritonAttention()
    params = params_for(features, shape[0], device)
    paged.check_decode(backend, features == "plain", monkeypatch, params)
    assert not any(arrived.any() for arrived in backend._arrived.values())


@pytest.mark.parametrize("num_programs", [1, 64])
def test_prefixes_in_several_splits(num_programs, device, monkeypatch):
    """More splits than programs, and the other way round."""
    monkeypatch.setattr(prefix_schedule, "MIN_SPLIT", 16)
    tile = PrefixTile(16, 8, 16, 4, 2, num_programs)
    for module in (triton_backend, decode, prefix_decode):
        monkeypatch.setattr(module, "prefix_tile", lambda *_: tile)
    contexts, groups = [130 + i for i in range(11)], [([*range(10)], 5), ([1, 3, 4, 6], 7)]
    paged = SharedPaged(contexts, groups, 4, 2, 64, 16, torch.float16, device)
    paged.check_decode(TritonAttention(), True, monkeypatch)


def test_an_exception_between_the_two_launches_leaves_no_counts(device, monkeypatch):
    """Ctrl-C after the launch of the prefix kernel made every later decode wrong."""

    class Interrupted:
        def __getitem__(self, grid):
            raise KeyboardInterrupt

    paged = SharedPaged([200, 201, 202, 203], [([*range(4)], 2)], 4, 2, 64, 16, HALF, device)
    backend = TritonAttention()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(decode, "_decode_kernel", Interrupted())
        paged.check_decode(backend, False, patch)
    (counters,) = backend._arrived.values()
    paged.check_decode(backend, False, monkeypatch)
    assert backend._arrived[len(counters)] is counters, "captured graphs hold its address"


def test_layers_with_a_window_share_nothing(device, monkeypatch):
    contexts, groups = [130 + i for i in range(6)], [([*range(6)], 5)]
    paged = SharedPaged(contexts, groups, 4, 2, 64, 16, torch.float16, device)
    paged.check_decode(TritonAttention(), True, monkeypatch, AttentionParams(0.1, window=40))


def test_a_step_may_turn_out_to_share_nothing(device, monkeypatch):
    """As when a graph is captured."""
    paged = SharedPaged([40, 50, 60], [], 4, 2, 64, 16, torch.float16, device)
    assert paged.prefixes is None
    paged.prefixes = NO_PREFIXES
    paged.check_decode(TritonAttention(), True, monkeypatch)


def covered_tokens(schedule, num_seqs, kv_heads, num_programs, tile):
    """Reads a schedule as the kernels do. Returns the splits of each sequence as (begin, end), in
    order, and the slots in use."""
    num_kv_splits = max_num_splits(num_seqs, kv_heads, num_programs)
    layout = schedule_layout(num_seqs, kv_heads, num_kv_splits, tile)
    assert len(schedule) == layout.num_rows
    members = schedule[layout.members :].reshape(-1, MEMBER_WORDS)
    found, slots, counts = {}, [], {}
    for row in schedule[: layout.prefix_splits].view(KV_SPLIT)[:, 0]:
        if row["num_splits"]:
            seq = int(row["seq"])
            found.setdefault(seq, {})[int(row["split"])] = (int(row["begin"]), int(row["end"]))
            assert counts.setdefault(seq, row["num_splits"]) == row["num_splits"]
            if row["num_splits"] > 1:
                slots.append(int(row["first_slot"] + row["split"]))
    rows = schedule[layout.prefix_splits : layout.members].view(PREFIX_SPLIT)[:, 0]
    num_splits = int(rows[0]["num_prefix_splits"])
    assert not rows[num_splits:].view(np.int32).any()
    for row in rows[:num_splits]:
        assert 0 < row["num_members"] <= tile.num_seqs
        assert row["num_prefix_splits"] == num_splits
        assert row["begin"] < row["end"]
        first = row["first_member"]
        for seq, slot in members[first : first + row["num_members"]]:
            splits = found[int(seq)]
            assert int(row["split"]) not in splits
            splits[int(row["split"])] = (int(row["begin"]), int(row["end"]))
            slots.append(int(slot + row["split"]))
    for seq, splits in found.items():
        assert sorted(splits) == [*range(counts[seq])]
    return {seq: [splits[i] for i in sorted(splits)] for seq, splits in found.items()}, slots


@st.composite
def batches(draw):
    """Block tables that share prefixes as a tree, in shuffled order, with their context lengths."""
    block_size = draw(st.sampled_from([1, 16, 64, 256]))
    free, tables = iter(range(10**6)), []

    def grow(prefix, level):
        prefix = [*prefix, *(next(free) for _ in range(draw(st.integers(0, 9))))]
        for _ in range(draw(st.integers(0, 12))):
            tables.append([*prefix, *(next(free) for _ in range(draw(st.integers(1, 3))))])
        if level < 3:
            for _ in range(draw(st.integers(0, 3))):
                grow(prefix, level + 1)

    grow([], 0)
    grow([], 1)
    tables = draw(st.permutations(tables))
    lens = [len(t) * block_size - draw(st.integers(0, block_size - 1)) for t in tables]
    return block_size, tables, lens


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(batches(), st.integers(1, 64), st.sampled_from([1, 4, 32]), st.sampled_from([16, 264]))
def test_each_token_is_in_one_split(batch, kv_heads, tile_seqs, num_programs):
    block_size, tables, lens = batch
    tile = PrefixTile(64, tile_seqs, 32, 4, 2, num_programs)
    num_padding = 3
    prefixes = find_shared_prefixes(tables, block_size, 1) or NO_PREFIXES
    assert len(set(prefixes.members.tolist())) == len(prefixes.members)
    context_lens = np.array([*lens, *[0] * num_padding], np.int32)
    schedule = make_shared_schedule(context_lens, kv_heads, 32, 264, None, prefixes, tile)
    found, slots = covered_tokens(schedule, len(context_lens), kv_heads, 264, tile)
    assert sorted(found) == [*range(len(context_lens))]
    for seq, splits in found.items():
        assert splits[0][0] == 0 and splits[-1][1] == context_lens[seq]
        assert all(end == begin for (_, end), (begin, _) in pairwise(splits))
    assert len(set(slots)) == len(slots)
    assert max(slots, default=0) < max_shared_slots(len(context_lens), kv_heads, 264, tile)
    for group in prefixes.groups:
        first = group["first_member"]
        seqs = prefixes.members[first : first + group["num_members"]]
        assert len(seqs) >= MIN_SEQS
        blocks = slice(group["begin"] // block_size, group["end"] // block_size)
        assert len({tuple(tables[seq][: blocks.stop]) for seq in seqs}) == 1
        assert blocks.stop > blocks.start


def test_a_prefix_common_to_all_and_one_of_some_are_both_found():
    system, prompts = [1, 2], [[10 * i, 10 * i + 1] for i in range(1, 5)]
    tables = [[*system, *prompts[i % 4], 100 + i] for i in range(16)]
    groups, members = find_shared_prefixes(tables, 16, 1)
    assert groups["begin"].tolist() == [0, 32, 32, 32, 32]
    assert groups["end"].tolist() == [32, 64, 64, 64, 64]
    assert groups["parent"].tolist() == [-1, 0, 0, 0, 0]
    assert groups["num_members"].tolist() == [16, 4, 4, 4, 4]
    assert sorted(members) == [*range(16)] and {seq % 4 for seq in members[:4]} == {0}


@pytest.mark.parametrize(
    ("tables", "min_saved"),
    [
        ([[i, 100 + i] for i in range(20)], 1),
        ([[0, 100 + i] for i in range(MIN_SEQS - 1)], 1),
        ([[0, 100 + i] for i in range(10)], 9 * 16 + 1),
        ([], 1),
    ],
    ids=["nothing-shared", "too-few", "saves-too-little", "no-sequences"],
)
def test_sharing_must_pay(tables, min_saved):
    assert find_shared_prefixes(tables, 16, min_saved) is None


def test_short_prefixes_are_left_to_the_levels_below(monkeypatch):
    monkeypatch.setattr(shared_prefixes, "MIN_TOKENS", 33)
    tables = [[0, 1 + i % 2, 3 + i % 2, 100 + i] for i in range(10)]
    groups, _ = find_shared_prefixes(tables, 16, 1)
    assert groups["begin"].tolist() == [0, 0] and groups["end"].tolist() == [48, 48]
    assert groups["parent"].tolist() == [-1, -1]


def test_tiles_fit_and_hold_whole_groups_of_heads():
    for q_heads, kv_heads in ((2, 2), (16, 8), (32, 8), (9, 3), (64, 8), (71, 1)):
        for head_dim in (64, 128, 256):
            for dtype in (torch.float32, torch.bfloat16):
                tile = prefix_tile(q_heads, kv_heads, head_dim, dtype)
                heads = tile.num_rows // tile.num_seqs
                assert heads >= q_heads // kv_heads and heads & (heads - 1) == 0
                assert tile.num_rows >= 16


@pytest.mark.parametrize(("num_seqs", "num_groups"), [(512, 1), (2048, 32), (64, 1)])
def test_programs_have_equal_shares(num_seqs, num_groups):
    """Guards a program that runs on alone."""
    size = num_seqs // num_groups
    tables = [[seq // size * 10 + i for i in range(8)] + [10**6 + seq] for seq in range(num_seqs)]
    prefixes = find_shared_prefixes(tables, 256, 1)
    tile = prefix_tile(16, 8, 128, torch.bfloat16)
    splits, _ = prefix_schedule.divide_prefixes(prefixes, num_seqs, 8, tile)
    assert len(prefixes.groups) == num_groups
    programs = tile.num_programs // 8
    loads = [(splits["end"] - splits["begin"])[i::programs].sum() for i in range(programs)]
    total = sum(loads)
    assert max(loads) <= 1.3 * total / programs + 2 * tile.num_keys
