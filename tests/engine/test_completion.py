"""How a completion's text and grammar end its sequence."""

from typing import Any

import numpy as np
import pytest

from nanovllm.engine.completion import Completion
from nanovllm.engine.logprobs import collect_logprobs
from nanovllm.engine.sampling_state import SamplingState
from nanovllm.engine.sequence import Finish, Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import EVERY_TOKEN, IncrementalDetokenizer
from nanovllm.text.token_text import TokenTexts
from tests.text.test_detokenizer import ByteLevel

WORDS = [b"a", b"b", b"STOP", b"<eos>"]
A, B, STOP, EOS = range(4)


def make(token_ids: list[int], finish: Finish | None = None, **params: Any) -> Sequence:
    """A sequence with a prompt of one token and these generated, none of them text yet."""
    tokenizer, ids = ByteLevel().tokenize(WORDS)
    assert ids == [A, B, STOP, EOS]
    sampling_params = SamplingParams(**{"stop": ["STOP"], **params})
    seq = Sequence([A, *token_ids], sampling_params)
    seq.num_prompt_tokens = 1
    if finish is not None:
        seq.status = SequenceStatus.FINISHED
    text = IncrementalDetokenizer(TokenTexts(tokenizer), stop=sampling_params.stop)
    state = SamplingState(sampling_params, 0, (), len(WORDS))
    seq.completion = Completion(state, text, text.stop_candidates, finish)
    return seq


def text_of(seq: Sequence) -> str:
    assert seq.completion.detokenizer is not None
    return seq.completion.detokenizer.text


@pytest.mark.parametrize("finish", [None, Finish("length"), Finish("stop", STOP)])
def test_a_stop_string_outranks_any_other_reason(finish: Finish | None):
    seq = make([A, B, STOP], finish)
    assert seq.completion.process(seq, -1) == Finish("stop", "STOP")
    assert text_of(seq) == "ab"


def test_text_that_does_not_stop_leaves_the_sequence_as_it_ended():
    seq = make([A, B], Finish("length"))
    assert seq.completion.process(seq, -1) is None
    assert text_of(seq) == "ab"


def test_the_token_that_ended_it_is_no_part_of_the_text():
    seq = make([A, EOS], Finish("stop", ends_with_stop_token=True))
    assert seq.completion.process(seq, -1) is None
    assert text_of(seq) == "a"


def test_tokens_become_text_once():
    seq = make([A])
    assert seq.completion.process(seq, -1) is None
    for token_id in (B, A):
        seq.append_token(token_id)
    assert seq.completion.process(seq, -1) is None
    assert text_of(seq) == "aba"


@pytest.mark.parametrize("params", [{"min_tokens": 3}, {"min_tokens": 9}])
def test_a_stop_string_within_min_tokens_is_text(params: dict[str, Any]):
    seq = make([A, B, STOP], **params)
    assert seq.completion.process(seq, -1) is None
    assert text_of(seq) == "abSTOP"


def test_nothing_stops_at_a_stop_string_after_an_error():
    seq = make([A, STOP], Finish("error", error="NaN"))
    assert seq.completion.process(seq, -1) is None


def test_only_tokens_that_may_complete_a_stop_string_need_processing():
    seq = make([A])
    seq.completion.process(seq, -1)
    tokens = seq.completion.tokens_to_process
    assert tokens is not None
    assert [tokens[i] for i in (A, B, STOP)] == [False, False, True]
    seq.completion.tokens_to_process = EVERY_TOKEN
    seq.completion.processes_every_token = True  # as for a stream
    seq.completion.process(seq, -1)
    assert seq.completion.tokens_to_process is EVERY_TOKEN


def test_each_completion_keeps_the_logprobs_that_it_asks_for():
    seqs = [make([A], logprobs=k) for k in (None, 0, 2)]
    rows = np.arange(21, dtype=np.int32).reshape(3, 7)
    collect_logprobs(seqs, [A, A, A], rows)
    collect_logprobs(seqs, [-1, -1, -1], rows)  # no token could be sampled
    found = [[row.tolist() for row in seq.completion.logprobs] for seq in seqs]
    assert found == [[], [rows[1, :3].tolist()], [rows[2].tolist()]]
