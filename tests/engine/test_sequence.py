"""Sequences and batches, and what of them crosses to worker processes."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams
from tests.conftest import needs_asserts


def shipped(seq: Sequence) -> Sequence:
    """The sequence as a worker process gets it."""
    return pickle.loads(pickle.dumps(seq))


def decoding(num_tokens: int, num_blocks: int = 3, **kwargs: int) -> Sequence:
    """A sequence of which all but the last token are cached."""
    seq = Sequence(range(1000, 1000 + num_tokens), **kwargs)
    seq.status = SequenceStatus.RUNNING
    seq.num_cached_tokens = num_tokens - 1
    seq.block_table = list(range(num_blocks))
    return seq


def test_new_sequence_waits_with_nothing_cached():
    seq = Sequence([7, 8, 9], SamplingParams(max_tokens=5), block_size=2)
    assert seq.status is SequenceStatus.WAITING
    assert not seq.is_finished
    assert (len(seq), seq.num_prompt_tokens, seq.num_cached_tokens) == (3, 3, 0)
    assert (seq.block_table, seq.siblings) == ([], [])
    assert (seq.finish_reason, seq.stop_reason, seq.ends_with_stop_token) == (None, None, False)
    assert seq.last_token == 9
    assert seq.sampling_params.max_tokens == 5


def test_ids_rise_with_age():
    ids = [Sequence([1]).seq_id for _ in range(4)]
    assert ids == sorted(set(ids))


def test_sequence_owns_its_tokens():
    """Guards a caller's prompt list that grows with the completion."""
    prompt = [1, 2]
    seq = Sequence(prompt)
    seq.append_token(3)
    assert prompt == [1, 2]


@needs_asserts
def test_empty_sequence_is_refused():
    with pytest.raises(AssertionError):
        Sequence([])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=20),
    st.lists(st.integers(0, 99), max_size=20),
    st.integers(1, 9),
    st.data(),
)
def test_counts_and_slices_agree_with_the_token_list(
    prompt: list[int], completion: list[int], block_size: int, data: st.DataObject
):
    seq = Sequence(prompt, block_size=block_size)
    for token in completion:
        seq.append_token(token)
    tokens = prompt + completion
    blocks = [tokens[i : i + block_size] for i in range(0, len(tokens), block_size)]
    assert (seq.token_ids, len(seq), seq.last_token) == (tokens, len(tokens), tokens[-1])
    assert (seq.prompt_token_ids, seq.completion_token_ids) == (prompt, completion)
    assert (seq.num_prompt_tokens, seq.num_completion_tokens) == (len(prompt), len(completion))
    assert [seq.block(i) for i in range(seq.num_blocks)] == blocks
    assert seq.last_block_num_tokens == len(blocks[-1])
    for i in (-1, len(blocks)) if __debug__ else ():
        with pytest.raises(AssertionError):
            seq.block(i)
    seq.num_cached_tokens = data.draw(st.integers(0, len(tokens)))
    assert seq.num_uncached_tokens == len(tokens[seq.num_cached_tokens :])
    full = [block for block in blocks if len(block) == block_size]
    assert seq.num_cached_blocks == min(seq.num_cached_tokens // block_size, len(full))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 2**17), min_size=1, max_size=40),
    st.lists(st.integers(0, 2**17), max_size=10),
    st.integers(1, 9),
    st.data(),
)
def test_shipped_sequence_has_all_that_a_step_reads(
    prompt: list[int], completion: list[int], block_size: int, data: st.DataObject
):
    """Guards a preempted sequence that reaches the workers without its tokens, and workers that
    keep the default block size."""
    seq = Sequence(prompt, SamplingParams(temperature=0.5, max_tokens=77), block_size)
    for token in completion:
        seq.append_token(token)
    seq.num_cached_tokens = data.draw(st.integers(0, len(seq)))
    seq.wants_prompt_logprobs = data.draw(st.booleans())
    seq.num_prompt_logprobs = data.draw(st.integers(0, len(prompt) - 1))
    seq.block_table = data.draw(
        st.lists(st.integers(0, 999), min_size=seq.num_blocks, max_size=seq.num_blocks)
    )
    copy = shipped(seq)
    first = min(seq.num_cached_tokens, len(seq) - 1)
    assert len(copy.token_ids) == len(seq)
    assert copy.token_ids[first:] == seq.token_ids[first:]
    for name in (
        "seq_id",
        "block_size",
        "num_tokens",
        "num_prompt_tokens",
        "num_cached_tokens",
        "num_uncached_tokens",
        "num_prompt_logprobs",
        "wants_prompt_logprobs",
        "num_blocks",
        "last_block_num_tokens",
        "last_token",
        "block_table",
        "sampling_params",
    ):
        assert getattr(copy, name) == getattr(seq, name), name


def test_what_only_rank_0_needs_is_not_shipped():
    """Guards a tokenizer, a grammar or all logprobs so far in each step's message."""
    seq = decoding(10)
    before = len(pickle.dumps(seq))
    seq.siblings = [decoding(1000)]
    seq.logprobs = seq.prompt_logprobs = [np.zeros(1000, np.int32)]
    seq.detokenizer = seq.sampling = lambda: None  # cannot be pickled
    assert len(pickle.dumps(seq)) == before
    assert shipped(seq).siblings == []
    assert shipped(seq).detokenizer is None


@pytest.mark.parametrize(
    ("wanted", "num_known", "reusable"),
    [(False, 0, 12), (True, 0, 0), (True, 4, 4), (True, 8, 8), (True, 9, 12)],
)
def test_prompt_tokens_without_logprobs_are_not_taken_from_the_cache(wanted, num_known, reusable):
    """Of ten prompt tokens, nine have log-probabilities: then all may be reused."""
    seq = Sequence(range(10))
    seq.append_token(3)
    seq.append_token(4)
    seq.wants_prompt_logprobs, seq.num_prompt_logprobs = wanted, num_known
    assert seq.num_reusable_tokens == reusable


def test_decode_ships_no_history():
    """Guards a step whose message to the workers grows with what has been generated."""
    short, long = (len(pickle.dumps(decoding(n))) for n in (300, 60_000))  # two-byte counts
    assert long == short
    assert len(pickle.dumps(decoding(60_000, num_blocks=235))) > short


def test_long_prompt_ships_only_the_tokens_not_yet_cached():
    whole, half = Sequence(range(1000, 9000)), Sequence(range(1000, 9000))
    half.num_cached_tokens = 4000
    assert len(pickle.dumps(half)) < 0.6 * len(pickle.dumps(whole))
    assert shipped(half).token_ids[4000:] == list(range(5000, 9000))


def test_preempted_sequence_ships_its_completion_too():
    seq = decoding(10, block_size=4)
    for token in (1, 2, 3):
        seq.append_token(token)
    seq.num_cached_tokens, seq.block_table = 0, [5, 6, 7, 8]
    assert shipped(seq).token_ids == [*range(1000, 1010), 1, 2, 3]


def test_shipped_sequence_can_grow():
    copy = shipped(decoding(10, block_size=4))
    copy.append_token(3)
    assert (len(copy), copy.last_token, copy.num_completion_tokens) == (11, 3, 1)


def test_shipped_fully_cached_prompt_has_its_last_token():
    seq = decoding(8, block_size=4, num_blocks=2)
    seq.num_cached_tokens = 8
    copy = shipped(seq)
    assert (copy.last_token, copy.token_ids[7], copy.num_cached_tokens) == (1007, 1007, 8)


def test_batch_ships_its_ranges_and_block_copies():
    seq = Sequence(range(10), block_size=4)
    copies = ((3, 5), (3, 6))
    batch = Batch((ScheduledSequence(seq, 0, 6, False),), is_prefill=True, block_copies=copies)
    copy = pickle.loads(pickle.dumps(batch))
    assert copy.block_copies == copies
    (item,) = copy.items
    assert (item.start, item.end, item.samples, copy.is_prefill) == (0, 6, False, True)
    assert item.seq.token_ids[:6] == list(range(6))


def test_batch_counts_tokens_and_lists_what_it_samples():
    a, b, c = (Sequence(range(10)) for _ in range(3))
    items = (
        ScheduledSequence(a, 2, 10, True),
        ScheduledSequence(b, 0, 4, False),
        ScheduledSequence(c, 9, 10, True),
    )
    batch = Batch(items, is_prefill=True)
    assert (len(batch), batch.num_tokens) == (3, 13)
    assert batch.sampled == [items[0], items[2]]
