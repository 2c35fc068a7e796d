"""Input building against a loop over single tokens."""

import math
import pickle
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.config import Config
from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.engine.completion import Completion
from nanovllm.engine.logit_edits import PreparedEdits
from nanovllm.engine.model_inputs import (
    GraphSize,
    ModelInputs,
    prepare_block_tables,
    prepare_decode,
    prepare_prefill,
)
from nanovllm.engine.sampling_inputs import prepare_sample
from nanovllm.engine.sampling_state import SamplingState, SamplingStateFactory
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.kernels.attention.block_tables import BlockTables, BlockTableUpdate
from nanovllm.kernels.sampling.logit_edits import add_bias, apply_mask, penalise
from nanovllm.kernels.sampling.sampling_row import SAMPLING_ROW
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.context import Context


def make_item(
    num_tokens: int,
    block_table: list[int] | list[list[int]],
    block_size: int,
    cached: int = 0,
    num_new: int | None = None,
    row: int = 0,
    num_sent: int = 0,
) -> ScheduledSequence:
    """A sequence of ``num_tokens``, the next ``num_new`` (default: all) uncached to compute."""
    tables = [block_table] if isinstance(block_table[0], int) else block_table
    tokens = range(100 * tables[0][0], 100 * tables[0][0] + num_tokens)
    seq = Sequence(tokens, block_size=block_size)
    seq.block_tables, seq.num_cached_tokens = tables, cached
    seq.table_len, seq.last_blocks = min(map(len, tables)), [table[-1] for table in tables]
    seq.table_row, seq.num_sent_blocks = row, num_sent
    start = min(cached, num_tokens - 1)
    end = num_tokens if num_new is None else start + num_new
    return ScheduledSequence(seq, start, end, samples=end == num_tokens)


@dataclass
class Case:
    batch: Batch
    block_size: int
    num_groups: int


@st.composite
def cases(draw: st.DrawFn, is_prefill: bool) -> Case:
    block_size, num_groups = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 3]))
    items = []
    blocks = iter(draw(st.permutations(range(40 * num_groups))))
    for row in draw(st.permutations(range(5)))[: draw(st.integers(1, 5))]:
        num_tokens = draw(st.integers(1, 6 * block_size))
        cached, num_new = num_tokens - 1, None
        if is_prefill:
            cached = draw(st.integers(0, num_tokens))
            num_new = draw(st.none() | st.integers(1, max(num_tokens - cached, 1)))
        num_blocks = -(-num_tokens // block_size)
        tables = [[next(blocks) for _ in range(num_blocks)] for _ in range(num_groups)]
        sent = draw(st.integers(0, num_blocks))
        items.append(make_item(num_tokens, tables, block_size, cached, num_new, row, sent))
    return Case(Batch.of(tuple(items), is_prefill, num_groups=num_groups), block_size, num_groups)


def values_of(seq: Sequence) -> dict[str, Any]:
    names = [name for name in Sequence.__slots__ if hasattr(seq, name)]
    return {**{name: getattr(seq, name) for name in names}, "token_ids": [*seq.token_ids]}


def check(tensor: torch.Tensor | None, expected: list, dtype: torch.dtype = torch.int32) -> None:
    assert tensor is not None
    assert (tensor.tolist(), tensor.dtype) == (expected, dtype)
    assert tensor.is_contiguous()


def check_slots(inputs: ModelInputs, expected: list[list[int]]) -> None:
    """In each group, the slots of all tokens; padding after them, so that rows are aligned."""
    slots = inputs.context.slot_mapping
    assert slots is not None and slots.dtype == torch.int32 and slots.is_contiguous()
    num_tokens = len(inputs.input_ids)
    assert slots.size(1) == -(-num_tokens // 4) * 4 and (slots[:, num_tokens:] == -1).all()
    assert slots[:, :num_tokens].tolist() == expected


def packed_views(inputs: ModelInputs) -> dict[str, torch.Tensor]:
    packed = inputs.pack().tensors
    return packed.views(packed.buffer)


def check_tables(inputs: ModelInputs, batch: Batch, padding: int = 0) -> None:
    """A device that holds what has been sent of the block tables gets the rest."""
    tables = BlockTables(len(inputs.tables.entries), 8, 6, torch.device("cpu"))
    for item in batch.items:
        row, sent = item.seq.table_row, item.seq.num_sent_blocks
        for resident, table in zip(tables.resident, item.seq.block_tables, strict=True):
            resident[row, :sent] = torch.tensor(table[:sent]).int()
    step = tables.update(inputs.tables)
    num_new = 0
    assert step.size(1) == len(batch) + padding
    for i, seq in enumerate(item.seq for item in batch.items):
        num_new += (seq.table_len - seq.num_sent_blocks) * len(step)
        for rows, table in zip(step, seq.block_tables, strict=True):
            assert rows[i, : seq.table_len].tolist() == table[: seq.table_len]
    assert len(inputs.tables.new_blocks) == num_new, "nothing is sent twice"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases(is_prefill=True))
def test_prefill_is_what_a_loop_over_tokens_gives(case: Case):
    token_ids, positions, bounds_q, bounds_k, logits = [], [], [0], [0], []
    slots: list[list[int]] = [[] for _ in range(case.num_groups)]
    reads_cache = False
    for item in case.batch.items:
        seq = item.seq
        for position in range(item.start, item.end):
            token_ids.append(seq.token_ids[position])
            positions.append(position)
            block, offset = divmod(position, case.block_size)
            is_cached = position < seq.num_cached_tokens
            for row, table in zip(slots, seq.block_tables, strict=True):
                row.append(-1 if is_cached else table[block] * case.block_size + offset)
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
    check_slots(inputs, slots)
    check(context.cu_seqlens_q, bounds_q)
    check(context.cu_seqlens_k, bounds_k)
    assert context.logits_indices is None
    check(context.output_indices, logits + [0] * (len(case.batch) - len(logits)))
    counts = [sum(start <= row < end for row in logits) for start, end in pairwise(bounds_q)]
    check(context.cu_num_outputs, np.cumsum([0, *counts]).tolist())
    assert context.max_seqlen_q == max(item.num_tokens for item in case.batch.items)
    assert context.max_seqlen_k == max(item.end for item in case.batch.items)
    assert context.num_keys == bounds_k[-1]
    assert context.context_lens is None
    check_tables(inputs, case.batch)
    assert inputs.reads_cache == reads_cache


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases(is_prefill=False), st.integers(0, 8))
def test_decode_is_what_a_loop_over_sequences_gives(case: Case, padded_size: int):
    token_ids, positions, lens = [], [], []
    slots: list[list[int]] = [[] for _ in range(case.num_groups)]
    for item in case.batch.items:
        tokens = item.seq.token_ids
        token_ids.append(tokens[-1])
        positions.append(len(tokens) - 1)
        block, offset = divmod(len(tokens) - 1, case.block_size)
        for row, table in zip(slots, item.seq.block_tables, strict=True):
            row.append(table[block] * case.block_size + offset)
        lens.append(len(tokens))
    while len(lens) < padded_size:  # stores nothing, attends to nothing
        token_ids.append(0)
        positions.append(0)
        for row in slots:
            row.append(-1)
        lens.append(0)
    inputs = prepare_decode(case.batch, case.block_size, padded_size)
    context = inputs.context
    check(inputs.input_ids, token_ids)
    check(inputs.positions, positions)
    assert not context.is_prefill
    check_slots(inputs, slots)
    check(context.context_lens, lens)
    check_tables(inputs, case.batch, max(0, padded_size - len(case.batch)))
    assert inputs.reads_cache
    assert context.max_seqlen_k == max(lens)
    assert context.logits_indices is None
    assert context.cu_seqlens_q is None
    assert context.cu_seqlens_k is None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.booleans().flatmap(cases))
def test_a_worker_receives_the_same_inputs_in_a_message(case: Case):
    """Guards workers that store keys and values in other slots than rank 0."""
    prepare = prepare_prefill if case.batch.is_prefill else prepare_decode
    ours = prepare(case.batch, case.block_size)
    size = GraphSize(True, 99, 7)
    message = pickle.dumps(("run_step", (ours.pack(size), ((1, 2),))), pickle.HIGHEST_PROTOCOL)
    method, (packed, copies) = pickle.loads(message)
    assert (method, packed.graph_size, copies) == ("run_step", size, ((1, 2),))
    assert_equal(ours, packed.unpack())
    assert packed.tensors.buffer.numpy().flags.aligned


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.booleans().flatmap(cases))
def test_building_inputs_changes_nothing(case: Case):
    before = [values_of(seq) for seq in case.batch.seqs]
    tables = [list(map(list, item.seq.block_tables)) for item in case.batch.items]
    prepare = prepare_prefill if case.batch.is_prefill else prepare_decode
    assert_equal(
        prepare(case.batch, case.block_size),
        prepare(case.batch, case.block_size),
    )
    assert [values_of(seq) for seq in case.batch.seqs] == before
    assert [item.seq.block_tables for item in case.batch.items] == tables


def assert_equal(a: ModelInputs, b: ModelInputs) -> None:
    assert torch.equal(a.input_ids, b.input_ids)
    assert torch.equal(a.positions, b.positions)
    assert all(map(torch.equal, a.tables, b.tables)) and a.reads_cache == b.reads_cache
    for field in fields(Context):
        x, y = getattr(a.context, field.name), getattr(b.context, field.name)
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y), field.name
        else:
            assert x == y, field.name


def test_whole_prompts_do_not_read_the_cache():
    batch = Batch.of((make_item(5, [3, 1], 4), make_item(2, [7], 4)), is_prefill=True)
    inputs = prepare_prefill(batch, 4)
    assert not inputs.reads_cache
    check_slots(inputs, [[12, 13, 14, 15, 4, 28, 29]])
    check(inputs.context.output_indices, [4, 6])


def test_one_sequence_that_reads_the_cache_makes_all_read_it():
    items = (make_item(5, [3, 1], 4), make_item(7, [7, 6], 4, cached=4, row=1))
    inputs = prepare_prefill(Batch.of(items, is_prefill=True), 4)
    context = inputs.context
    assert inputs.reads_cache
    check(context.cu_seqlens_q, [0, 5, 8])
    check(context.cu_seqlens_k, [0, 5, 12])


def test_last_token_of_a_fully_cached_prompt_is_computed_but_not_stored():
    """Guards a shared block that is written again while others read it."""
    inputs = prepare_prefill(Batch.of((make_item(8, [3, 1], 4, cached=8),), is_prefill=True), 4)
    check(inputs.input_ids, [307])
    check(inputs.positions, [7])
    check_slots(inputs, [[-1]])
    check(inputs.context.output_indices, [0])
    check(inputs.context.cu_seqlens_k, [0, 8])


def test_chunk_that_does_not_end_its_prompt_yields_no_token():
    """What it has logits of comes after those that yield one."""
    items = (make_item(9, [2, 3, 4], 4, num_new=6), make_item(3, [5], 4))
    batch = Batch.of(items, is_prefill=True)
    context = prepare_prefill(batch, 4).context
    check(context.output_indices, [8, 0])
    check(context.cu_num_outputs, [0, 0, 1])
    context = prepare_prefill(Batch.of(items[:1], is_prefill=True), 4).context
    check(context.output_indices, [0])
    check(context.cu_num_outputs, [0, 0])


def test_logprobs_of_a_prompt_take_all_outputs():
    items = (make_item(9, [2, 3, 4], 4, num_new=6), make_item(3, [5], 4))
    items[0].seq.wants_prompt_logprobs = True
    context = prepare_prefill(Batch.of(items, is_prefill=True), 4).context
    assert context.output_indices is context.cu_num_outputs is None
    check(context.logits_indices, [8, 0])


def test_only_new_blocks_are_sent():
    items = (make_item(1, [9], 2, row=3), make_item(7, [4, 5, 6, 7], 2, row=1, num_sent=2))
    tables = prepare_block_tables(Batch.of(items, is_prefill=False), 3)
    check(tables.entries, [[[3, 1, 0, 1], [1, 4, 1, 2], [-1, 0, 0, 0]]])
    check(tables.new_blocks, [9, 6, 7])


def test_new_blocks_of_all_groups_are_sent_as_far_as_all_have_them():
    """In a long prompt, a group without a window has more blocks."""
    tables = [[4, 5, 6, 7, 8], [0, 1, 2]]
    batch = Batch.of((make_item(9, tables, 2, num_new=4, row=1, num_sent=1),), True, num_groups=2)
    update = prepare_block_tables(batch, 2)
    check(update.entries, [[[1, 3, 0, 2], [-1, 0, 0, 0]], [[1, 3, 2, 2], [-1, 0, 0, 0]]])
    check(update.new_blocks, [5, 6, 1, 2])


def test_layers_of_a_group_share_a_context():
    tables = [[4, 5], [1, 2], [7, 9]]
    items = (make_item(3, tables, 2, cached=2),)
    schedules = np.arange(2 * 3 * 8, dtype=np.int32).reshape(2, 3, 8)
    batch = Batch.of(items, is_prefill=False, num_groups=3)
    inputs = prepare_decode(batch, 2, 0, lambda lens, prefixes: schedules)
    step_tables = torch.tensor(tables)[:, None]
    contexts = inputs.context.of_groups([None, 4, 4], 1, step_tables)
    for context, slot, table, schedule in zip(
        contexts, (10, 4, 18), step_tables, (0, 1, 1), strict=True
    ):
        check(context.slot_mapping, [slot])
        assert context.block_tables.tolist() == table.tolist()
        check(context.split_kv_schedule, schedules[schedule].tolist())
        assert context.context_lens is inputs.context.context_lens
    blind = inputs.context.of_groups([None, 4, 4], 1, None)
    assert all(context.block_tables is None for context in blind)


def test_inputs_stay_where_they_are_on_a_cpu():
    inputs = prepare_decode(Batch.of((make_item(3, [1], 4, cached=2),), is_prefill=False), 4).pack()
    moved = inputs.to(torch.device("cpu"))
    assert moved.input_ids.untyped_storage().data_ptr() == inputs.tensors.buffer.data_ptr()
    sampling = prepare_sample(sampled_batch([make_sampled([1, 2], [3], SamplingParams(top_k=5))]))
    assert sampling.to(torch.device("cpu")) is sampling


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.booleans().flatmap(cases))
def test_inputs_survive_the_trip_in_one_buffer(case: Case):
    prepare = prepare_prefill if case.batch.is_prefill else prepare_decode
    inputs = prepare(case.batch, case.block_size)
    packed = inputs.pack()
    buffer = packed.tensors.buffer
    assert buffer.dtype == torch.int32
    assert packed.tensors.shapes["input_ids"] == inputs.input_ids.shape
    moved = packed.unpack()
    assert_equal(moved, inputs)
    for name, tensor in packed.tensors.views(buffer).items():
        assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr(), name
        assert tensor.storage_offset() % 4 == 0, f"{name}: kernels expect 16-byte alignment"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases(is_prefill=True), st.integers(0, 9), st.integers(0, 3), st.integers(30, 33))
def test_a_padded_prefill_is_a_prefill_and_padding(case: Case, tokens: int, seqs: int, most: int):
    plain = prepare_prefill(case.batch, case.block_size)
    num_tokens, num_seqs = case.batch.num_tokens + tokens, len(case.batch) + seqs
    args = case.block_size, num_tokens, num_seqs, most
    padded = prepare_prefill(case.batch, *args)
    check(padded.input_ids, plain.input_ids.tolist() + [0] * tokens)
    check(padded.positions, plain.positions.tolist() + [0] * tokens)
    before, after = plain.context, padded.context
    slots = before.slot_mapping[:, : case.batch.num_tokens].tolist()
    check_slots(padded, [row + [-1] * tokens for row in slots])
    check(after.cu_seqlens_q, before.cu_seqlens_q.tolist() + [case.batch.num_tokens] * seqs)
    check(
        after.cu_seqlens_k, before.cu_seqlens_k.tolist() + before.cu_seqlens_k.tolist()[-1:] * seqs
    )
    check_tables(padded, case.batch, seqs)
    check(after.output_indices, before.output_indices.tolist() + [0] * seqs)
    counts = [int(item.samples) for item in case.batch.items] + [0] * seqs
    check(after.cu_num_outputs, np.cumsum([0, *counts]).tolist())
    assert after.is_prefill and after.logits_indices is None
    assert (after.max_seqlen_q, after.max_seqlen_k, after.num_keys) == (num_tokens, most, 0)
    # As graphs are captured with.
    blank = prepare_prefill(Batch.of((), is_prefill=True, num_groups=case.num_groups), *args)
    blanks, others = packed_views(blank), packed_views(padded)
    assert list(blanks) == list(others)
    for name, tensor in blanks.items():
        other = others[name]
        shape = other.shape if name != "new_blocks" else (0,)
        assert (tensor.shape, tensor.dtype) == (shape, other.dtype), name
    check_slots(blank, [[-1] * num_tokens] * case.num_groups)


def test_a_decode_can_be_padding_alone():
    """As graphs are captured with."""
    batch = Batch.of((make_item(3, [1], 4, cached=2),), is_prefill=False)
    padded, blank = (prepare_decode(x, 4, 8) for x in (batch, Batch.of((), is_prefill=False)))
    blanks, others = packed_views(blank), packed_views(padded)
    assert list(blanks) == list(others)
    for name, tensor in blanks.items():
        other = others[name]
        if name not in BlockTableUpdate._fields:
            assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype), name
            assert torch.equal(tensor[..., 1:], other[..., 1:]), name
    check(blank.tables.entries, [[[-1, 0, 0, 0]] * 8])
    check_slots(blank, [[-1] * 8])


@pytest.mark.parametrize("is_prefill", [False, True])
def test_inputs_are_no_larger_for_longer_limits_or_contexts(is_prefill: bool):
    """Block tables as wide as max_model_len were built, copied and sent to all ranks each step:
    16 MiB for 512 sequences of a model of 131,072 tokens, in blocks of 16."""
    table = list(range(8000))
    item = make_item(8000 * 16, table, 16, cached=8000 * 16 - 1, num_sent=7997)
    batch = Batch.of((item,), is_prefill)
    if is_prefill:
        packed = prepare_prefill(batch, 16, 64, 8, 131_072).pack()
    else:
        packed = prepare_decode(batch, 16, 8).pack()
    assert packed.tensors.shapes["new_blocks"] == (3,)
    assert packed.tensors.start_of_last() + 4 == len(packed.tensors.buffer), "they come last"
    assert len(packed.tensors.buffer) < 400


VOCAB_SIZE = 70  # three words of a mask, the last one short
EOS = (2, 69)
FEW = st.integers(0, 5)  # of few tokens, so that bad words and penalties meet the history
TOKEN = st.integers(0, VOCAB_SIZE - 1)


@dataclass
class Sampled:
    """A sequence about to draw its next token, and what its sampling was made from."""

    item: ScheduledSequence
    params: SamplingParams
    seed: int
    bad_words: list[list[int]]


def make_sampled(
    prompt: list[int],
    completion: list[int],
    params: SamplingParams,
    seed: int = 0,
    bad_words: list[list[int]] | None = None,
    samples: bool = True,
) -> Sampled:
    bad_words = bad_words or []
    seq = Sequence(prompt, params)
    prepared = PreparedEdits(params, SamplingStateFactory(None, VOCAB_SIZE, EOS, Config("model")))
    prepared.bad_words = bad_words
    (edits,) = prepared.start(prompt)
    state = SamplingState(params, seed, edits, VOCAB_SIZE)
    seq.completion = Completion(state)
    for token in completion:
        seq.append_token(token)
        state.append_token(token)
    item = ScheduledSequence(seq, len(seq) - 1, len(seq), samples=samples)
    return Sampled(item, params, seed, bad_words)


def sampled_batch(sampled: list[Sampled]) -> Batch:
    return Batch.of(tuple(s.item for s in sampled), is_prefill=True)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.7, 1.0, 1e30]),
    top_k=st.sampled_from([-1, 0, 0, 3, VOCAB_SIZE, 10**12]),
    top_p=st.sampled_from([1.0, 1.0, 0.25]),
    min_p=st.sampled_from([0.0, 0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    allowed_token_ids=st.none() | st.none() | st.lists(TOKEN, min_size=1, max_size=9),
    logit_bias=st.none() | st.dictionaries(FEW, st.sampled_from([-100.0, 0.5]), max_size=3),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.none() | st.lists(TOKEN, max_size=2),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, None, 0, 4, -1]),
)
PLAIN = st.builds(SamplingParams, temperature=st.sampled_from([0.0, 0.0, 0.0, 1.0]))
SAMPLED = st.builds(
    make_sampled,
    st.lists(FEW, min_size=1, max_size=5),
    st.lists(FEW, max_size=6),
    st.one_of(PLAIN, PARAMS),
    st.integers(-(2**63), 2**64 - 1),
    st.just([]) | st.lists(st.lists(FEW, min_size=1, max_size=3), max_size=3),
    st.sampled_from([True, True, True, False]),
)


def naive_biases(sampled: Sampled) -> dict[int, float]:
    """What is added to the logits of one row, straight from the parameters."""
    params, seq = sampled.params, sampled.item.seq
    completion = seq.token_ids[seq.num_prompt_tokens :]
    biases = dict(params.logit_bias or {})
    for *start, last in sampled.bad_words:
        if completion[len(completion) - len(start) :] == start or not start:
            biases[last] = -math.inf
    if len(completion) < params.min_tokens:
        stops = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else EOS)]
        biases |= dict.fromkeys(stops, -math.inf)
    return biases


def naive_penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def grouped(rows: torch.Tensor, *columns: torch.Tensor) -> dict[int, list]:
    """Entries of a sparse list by row."""
    assert rows.dtype == torch.int32 and len(rows)
    entries: dict[int, list] = {}
    for row, *values in zip(rows.tolist(), *(c.tolist() for c in columns), strict=True):
        entries.setdefault(row, []).append(tuple(values))
    return entries


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(SAMPLED, min_size=1, max_size=5))
def test_sampling_inputs_are_what_a_loop_over_sequences_gives(sequences: list[Sampled]):
    inputs = prepare_sample(sampled_batch(sequences))
    sampled = [s for s in sequences if s.item.samples]
    params = [s.params for s in sampled]

    allowed = {
        i: sorted(set(p.allowed_token_ids)) for i, p in enumerate(params) if p.allowed_token_ids
    }
    edits = dict(inputs.edits)
    if allowed:
        rows, mask = edits.pop(apply_mask)
        check(rows, list(allowed))
        assert mask.dtype == torch.int32
        bits = [[word >> bit & 1 for word in row for bit in range(32)] for row in mask.tolist()]
        assert [[i for i, bit in enumerate(row) if bit] for row in bits] == list(allowed.values())
        assert {len(row) for row in bits} == {96}

    biases = {i: naive_biases(s) for i, s in enumerate(sampled) if naive_biases(s)}
    if biases:
        found = grouped(*edits.pop(add_bias))
        assert {i: dict(sorted(pairs, reverse=True)) for i, pairs in found.items()} == biases

    histories = {
        i: [
            (token, place >= s.item.seq.num_prompt_tokens)
            for place, token in enumerate(s.item.seq.token_ids)
        ]
        for i, s in enumerate(sampled)
        if naive_penalties(s.params) != (1, 0, 0)
    }
    if histories:
        rows, penalties, lens, *history = edits.pop(penalise)
        assert grouped(rows.repeat_interleave(lens), *history) == histories
        expected = [list(naive_penalties(params[i])) for i in histories]
        check(penalties, expected, torch.float32)
    assert not edits, "what nobody asks for is not there"
    in_order = [edit for edit in (apply_mask, add_bias, penalise) if edit in inputs.edits]
    assert list(inputs.edits) == in_order

    assert inputs.rows.dtype == torch.int32
    rows = inputs.rows.numpy().view(SAMPLING_ROW)[:, 0]
    assert rows.tolist() == [naive_row(s) for s in sampled]
    assert inputs.truncates == any(
        p.temperature >= 1e-5 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params
    )
    counts = [VOCAB_SIZE if p.logprobs == -1 else p.logprobs for p in params]
    assert inputs.num_logprobs == max((c for c in counts if c is not None), default=None)


def naive_row(sampled: Sampled) -> tuple:
    """The fields of SAMPLING_ROW: fp32 settings, the seed's 64 bits, where the token will be, and
    the bits of the features."""
    params = sampled.params
    is_cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    truncates = is_cut and params.temperature >= 1e-5
    edits = bool(sampled.item.seq.completion.sampling.edits)
    return (
        0.0 if params.temperature < 1e-5 else float(np.float32(params.temperature)),
        0 if params.top_k <= 0 else min(params.top_k, VOCAB_SIZE),
        params.top_p,
        params.min_p,
        int.from_bytes((sampled.seed % 2**64).to_bytes(8, "little"), "little", signed=True),
        len(sampled.item.seq),
        truncates + 2 * edits + 4 * (params.logprobs is not None),
    )


def test_a_sequence_that_has_finished_meanwhile_asks_for_nothing():
    """Guards a grammar at its end, which is asked for one more mask."""
    params = SamplingParams(allowed_token_ids=[3], min_tokens=4, presence_penalty=1)
    done, open_ = make_sampled([1], [2], params), make_sampled([1], [2], params)
    done.item.seq.status = SequenceStatus.FINISHED
    inputs = prepare_sample(sampled_batch([done, open_]))
    for rows, *_ in inputs.edits.values():
        assert set(rows.tolist()) == {1}
    assert list(inputs.edits) == [apply_mask, add_bias, penalise]
    assert len(inputs.rows) == 2


def test_one_warm_sequence_is_enough_for_rows():
    params = [SamplingParams(temperature=t) for t in (0, 0.5)]
    inputs = prepare_sample(sampled_batch([make_sampled([1], [], p) for p in params]))
    assert inputs.rows.numpy().view(SAMPLING_ROW)["temperature"][:, 0].tolist() == [0.0, 0.5]


def test_building_sampling_inputs_changes_nothing():
    params = SamplingParams(
        min_tokens=2, allowed_token_ids=[3], presence_penalty=1, logit_bias={1: 1}
    )
    batch = sampled_batch([make_sampled([1, 5], [4], params, bad_words=[[4, 1], [2]])] * 2)
    first, again = prepare_sample(batch), prepare_sample(batch)
    assert torch.equal(first.rows, again.rows)
    assert list(first.edits) == list(again.edits) == [apply_mask, add_bias, penalise]
    for edit, tensors in first.edits.items():
        for a, b in zip(tensors, again.edits[edit], strict=True):
            assert torch.equal(a, b), edit
