"""Input building against a loop over single tokens."""

import pickle
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.engine.model_inputs import (
    ModelInputs,
    blank_decode,
    prepare_block_tables,
    prepare_decode,
    prepare_prefill,
    prepare_sample,
)
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.context import Context


def make_item(
    num_tokens: int,
    block_table: list[int],
    block_size: int,
    cached: int = 0,
    num_new: int | None = None,
    temperature: float = 0.0,
) -> ScheduledSequence:
    """A sequence of ``num_tokens``, the next ``num_new`` (default: all) uncached to compute."""
    tokens = range(100 * block_table[0], 100 * block_table[0] + num_tokens)
    seq = Sequence(tokens, SamplingParams(temperature=temperature), block_size)
    seq.block_table, seq.num_cached_tokens = block_table, cached
    start = min(cached, num_tokens - 1)
    end = num_tokens if num_new is None else start + num_new
    return ScheduledSequence(seq, start, end, samples=end == num_tokens)


@dataclass
class Case:
    batch: Batch
    block_size: int


@st.composite
def cases(draw: st.DrawFn, is_prefill: bool) -> Case:
    block_size = draw(st.integers(1, 5))
    items = []
    blocks = iter(draw(st.permutations(range(40))))
    for _ in range(draw(st.integers(1, 5))):
        num_tokens = draw(st.integers(1, 6 * block_size))
        cached, num_new = num_tokens - 1, None
        if is_prefill:
            cached = draw(st.integers(0, num_tokens))
            num_new = draw(st.none() | st.integers(1, max(num_tokens - cached, 1)))
        table = [next(blocks) for _ in range(-(-num_tokens // block_size))]
        temperature = draw(st.sampled_from([0.0, 0.0, 0.7, 1.0]))
        items.append(make_item(num_tokens, table, block_size, cached, num_new, temperature))
    return Case(Batch(tuple(items), is_prefill), block_size)


def check(tensor: torch.Tensor | None, expected: list, dtype: torch.dtype = torch.int32) -> None:
    assert tensor is not None
    assert (tensor.tolist(), tensor.dtype) == (expected, dtype)
    assert tensor.is_contiguous()


def naive_block_tables(batch: Batch, width: int = 0) -> list[list[int]]:
    width = max(width, *(len(item.seq.block_table) for item in batch.items))
    return [
        item.seq.block_table + [0] * (width - len(item.seq.block_table)) for item in batch.items
    ]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(cases(is_prefill=True))
def test_prefill_is_what_a_loop_over_tokens_gives(case: Case):
    token_ids, positions, slots, bounds_q, bounds_k, logits = [], [], [], [0], [0], []
    reads_cache = False
    for item in case.batch.items:
        seq = item.seq
        for position in range(item.start, item.end):
            token_ids.append(seq.token_ids[position])
            positions.append(position)
            block, offset = divmod(position, case.block_size)
            is_cached = position < seq.num_cached_tokens
            slots.append(-1 if is_cached else seq.block_table[block] * case.block_size + offset)
        bounds_q.append(len(token_ids))
        bounds_k.append(bounds_k[-1] + item.end)
        reads_cache |= item.start > 0
        if item.end == len(seq):
            logits.append(len(token_ids) - 1)
    inputs = prepare_prefill(case.batch, case.block_size)
    context = inputs.context
    check(inputs.input_ids, token_ids)
    check(inputs.positions, positions)
    assert context.is_prefill
    check(context.slot_mapping, slots)
    check(context.cu_seqlens_q, bounds_q)
    check(context.cu_seqlens_k, bounds_k)
    check(context.logits_indices, logits)
    assert context.max_seqlen_q == max(item.num_tokens for item in case.batch.items)
    assert context.max_seqlen_k == max(item.end for item in case.batch.items)
    assert context.context_lens is None
    if reads_cache:
        check(context.block_tables, naive_block_tables(case.batch))
    else:
        assert context.block_tables is None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases(is_prefill=False), st.integers(0, 8), st.integers(0, 8))
def test_decode_is_what_a_loop_over_sequences_gives(case: Case, padded_size: int, width: int):
    token_ids, positions, slots, lens = [], [], [], []
    tables = naive_block_tables(case.batch, width)
    for item in case.batch.items:
        tokens = item.seq.token_ids
        token_ids.append(tokens[-1])
        positions.append(len(tokens) - 1)
        block, offset = divmod(len(tokens) - 1, case.block_size)
        slots.append(item.seq.block_table[block] * case.block_size + offset)
        lens.append(len(tokens))
    while len(slots) < padded_size:  # stores nothing, attends to nothing
        token_ids.append(0)
        positions.append(0)
        slots.append(-1)
        lens.append(0)
        tables.append([0] * len(tables[0]))
    inputs = prepare_decode(case.batch, case.block_size, padded_size, width)
    context = inputs.context
    check(inputs.input_ids, token_ids)
    check(inputs.positions, positions)
    assert not context.is_prefill
    check(context.slot_mapping, slots)
    check(context.context_lens, lens)
    check(context.block_tables, tables)
    assert context.max_seqlen_k == max(lens)
    assert context.logits_indices is None
    assert context.cu_seqlens_q is None
    assert context.cu_seqlens_k is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.booleans().flatmap(cases))
def test_sample_takes_the_temperatures_of_what_is_sampled(case: Case):
    expected = [i.seq.sampling_params.temperature for i in case.batch.items if i.samples]
    temperatures = prepare_sample(case.batch)
    if any(expected):
        assert temperatures is not None
        assert temperatures.dtype == torch.float32
        assert temperatures.tolist() == pytest.approx(expected)
    else:
        assert temperatures is None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.booleans().flatmap(cases))
def test_a_worker_builds_the_same_inputs_from_a_pickled_batch(case: Case):
    """Guards workers that store keys and values in other slots than rank 0."""
    prepare = prepare_prefill if case.batch.is_prefill else prepare_decode
    ours = prepare(case.batch, case.block_size)
    theirs = prepare(pickle.loads(pickle.dumps(case.batch)), case.block_size)
    assert_equal(ours, theirs)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.booleans().flatmap(cases))
def test_building_inputs_changes_nothing(case: Case):
    before = [{**vars(i.seq), "token_ids": list(i.seq.token_ids)} for i in case.batch.items]
    tables = [list(item.seq.block_table) for item in case.batch.items]
    prepare = prepare_prefill if case.batch.is_prefill else prepare_decode
    assert_equal(prepare(case.batch, case.block_size), prepare(case.batch, case.block_size))
    assert [vars(item.seq) for item in case.batch.items] == before
    assert [item.seq.block_table for item in case.batch.items] == tables


def assert_equal(a: ModelInputs, b: ModelInputs) -> None:
    assert torch.equal(a.input_ids, b.input_ids)
    assert torch.equal(a.positions, b.positions)
    for field in fields(Context):
        x, y = getattr(a.context, field.name), getattr(b.context, field.name)
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y), field.name
        else:
            assert x == y, field.name


def test_whole_prompts_need_no_block_tables():
    batch = Batch((make_item(5, [3, 1], 4), make_item(2, [7], 4)), is_prefill=True)
    context = prepare_prefill(batch, 4).context
    assert context.block_tables is None
    check(context.slot_mapping, [12, 13, 14, 15, 4, 28, 29])
    check(context.logits_indices, [4, 6])


def test_one_sequence_that_reads_the_cache_gives_all_a_block_table():
    items = (make_item(5, [3, 1], 4), make_item(7, [7, 6], 4, cached=4))
    context = prepare_prefill(Batch(items, is_prefill=True), 4).context
    check(context.block_tables, [[3, 1], [7, 6]])
    check(context.cu_seqlens_q, [0, 5, 8])
    check(context.cu_seqlens_k, [0, 5, 12])


def test_last_token_of_a_fully_cached_prompt_is_computed_but_not_stored():
    """Guards a shared block that is written again while others read it."""
    inputs = prepare_prefill(Batch((make_item(8, [3, 1], 4, cached=8),), is_prefill=True), 4)
    check(inputs.input_ids, [307])
    check(inputs.positions, [7])
    check(inputs.context.slot_mapping, [-1])
    check(inputs.context.logits_indices, [0])
    check(inputs.context.cu_seqlens_k, [0, 8])


def test_chunk_that_does_not_end_its_prompt_yields_no_logits():
    items = (make_item(9, [2, 3, 4], 4, num_new=6), make_item(3, [5], 4))
    batch = Batch(items, is_prefill=True)
    check(prepare_prefill(batch, 4).context.logits_indices, [8])
    batch = Batch(items[:1], is_prefill=True)
    check(prepare_prefill(batch, 4).context.logits_indices, [])
    assert prepare_sample(batch) is None


def test_short_block_tables_are_padded():
    items = (make_item(1, [9], 2), make_item(5, [4, 5, 6], 2))
    tables = prepare_block_tables(Batch(items, is_prefill=False))
    check(tables, [[9, 0, 0], [4, 5, 6]])


def test_one_warm_sequence_is_enough_for_temperatures():
    items = (make_item(1, [1], 2), make_item(1, [2], 2, temperature=0.5))
    check(prepare_sample(Batch(items, is_prefill=True)), [0.0, 0.5], torch.float32)


def test_inputs_stay_where_they_are_on_a_cpu():
    inputs = prepare_decode(Batch((make_item(3, [1], 4, cached=2),), is_prefill=False), 4)
    assert inputs.to(torch.device("cpu")) is inputs


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.booleans().flatmap(cases))
def test_inputs_survive_the_trip_in_one_buffer(case: Case):
    prepare = prepare_prefill if case.batch.is_prefill else prepare_decode
    inputs = prepare(case.batch, case.block_size)
    buffer = inputs.pack(pin_memory=False)
    assert buffer.dtype == torch.int32
    moved = inputs.unpack(buffer)
    assert_equal(moved, inputs)
    for name, tensor in moved.tensors().items():
        assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr(), name
        assert tensor.storage_offset() % 4 == 0, f"{name}: kernels expect 16-byte alignment"


def test_blank_decode_has_the_shapes_of_a_padded_one():
    batch = Batch((make_item(3, [1], 4, cached=2),), is_prefill=False)
    padded, blank = prepare_decode(batch, 4, 8, 5).tensors(), blank_decode(8, 5).tensors()
    assert list(padded) == list(blank)
    for name, tensor in blank.items():
        assert (tensor.shape, tensor.dtype) == (padded[name].shape, padded[name].dtype), name
        assert torch.equal(tensor[1:], padded[name][1:]), name
    check(blank["slot_mapping"], [-1] * 8)
