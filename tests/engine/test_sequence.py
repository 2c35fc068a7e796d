"""Sequences and batches, and what of them crosses to worker processes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.engine.prefix_cache import num_reusable_tokens
from nanovllm.engine.recovery import unshared_copy
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams
from tests.conftest import needs_asserts


def decoding(num_tokens: int, num_blocks: int = 3, **kwargs: int) -> Sequence:
    """A sequence of which all but the last token are cached."""
    seq = Sequence(range(1000, 1000 + num_tokens), **kwargs)
    seq.status = SequenceStatus.RUNNING
    seq.num_cached_tokens = num_tokens - 1
    seq.block_tables, seq.table_len = [list(range(num_blocks))], num_blocks
    return seq


def test_new_sequence_waits_with_nothing_cached():
    seq = Sequence([7, 8, 9], SamplingParams(max_tokens=5), block_size=2)
    assert seq.status is SequenceStatus.WAITING
    assert not seq.is_finished
    assert (len(seq), seq.num_prompt_tokens, seq.num_cached_tokens) == (3, 3, 0)
    assert (seq.block_tables, seq.siblings) == ([], [])
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
    assert seq.completion_token_ids == completion
    assert (seq.num_prompt_tokens, seq.num_completion_tokens) == (len(prompt), len(completion))
    assert [seq.block(i) for i in range(seq.num_blocks)] == blocks
    for i in (-1, len(blocks)) if __debug__ else ():
        with pytest.raises(AssertionError):
            seq.block(i)
    seq.num_cached_tokens = data.draw(st.integers(0, len(tokens)))
    assert seq.num_uncached_tokens == len(tokens[seq.num_cached_tokens :])


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
    assert num_reusable_tokens(seq) == reusable


def test_a_copy_that_is_computed_alone_starts_over():
    seq = decoding(10, block_size=4)
    seq.num_full_blocks = 2
    seq.append_token(3)
    seq.completion = object()
    copy = unshared_copy(seq)
    assert (copy.status, copy.shares_no_blocks) == (SequenceStatus.WAITING, True)
    assert (copy.token_ids, len(copy), copy.last_token) == (seq.token_ids, 11, 3)
    assert (copy.block_tables, copy.num_cached_tokens, num_reusable_tokens(copy)) == ([], 0, 0)
    assert (copy.table_len, copy.num_full_blocks) == (0, 0)
    assert copy.completion is seq.completion and seq.block_tables == [[0, 1, 2]]


def test_batch_counts_tokens_and_lists_what_it_samples():
    a, b, c = (Sequence(range(10)) for _ in range(3))
    items = (
        ScheduledSequence(a, 2, 10, True),
        ScheduledSequence(b, 0, 4, False),
        ScheduledSequence(c, 9, 10, True),
    )
    batch = Batch.of(items, is_prefill=True)
    assert (len(batch), batch.num_tokens) == (3, 13)
    assert batch.sampled == [a, c]
