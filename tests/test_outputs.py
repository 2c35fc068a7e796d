"""Results: lazy log-probabilities against the plain lists that they stand for, and the two styles
in which a result can be read."""

import pickle
import random
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.outputs import CompletionOutput, Logprob, Logprobs, RequestMetrics, RequestOutput


def text_of(token_id: int) -> str:
    return f"<{token_id}>"


def no_text(token_id: int) -> None:
    return None


def pack(positions: list[tuple[int, list[tuple[int, float]]]]) -> np.ndarray:
    """Rows as the sampler packs them: rank, then token ids each with its logprob's bits."""
    rows = []
    for rank, pairs in positions:
        row = [rank]
        for token_id, logprob in pairs:
            row += [token_id, int(np.float32(logprob).view(np.int32))]
        rows.append(row)
    return np.array(rows, np.int32)


def random_case(num_positions: int, k: int) -> tuple[np.ndarray, list[dict[int, Logprob]]]:
    """Rows, and by a plain sort what must be read from them, first to last."""
    rng = random.Random(1000 * num_positions + k)
    positions, expected = [], []
    for _ in range(num_positions):
        logprobs = [float(np.float32(-rng.expovariate(0.3))) for _ in range(20)]
        order = sorted(range(20), key=lambda i: -logprobs[i])
        own = rng.choice(order)
        positions.append((order.index(own) + 1, [(i, logprobs[i]) for i in (own, *order[:k])]))
        shown = [own, *(i for i in order[:k] if i != own)]
        expected.append({i: Logprob(logprobs[i], order.index(i) + 1, text_of(i)) for i in shown})
    return pack(positions), expected


SIZES = pytest.mark.parametrize("k", [0, 1, 5, 20])


class TestLogprobs:
    @SIZES
    @pytest.mark.parametrize("num_positions", [1, 2, 30])
    def test_each_position_is_a_dict_led_by_its_own_token(self, num_positions: int, k: int):
        rows, expected = random_case(num_positions, k)
        read = list(Logprobs(rows, text_of))
        assert read == expected
        assert [list(position) for position in read] == [list(position) for position in expected]

    @SIZES
    @given(
        st.booleans(),
        st.integers(-40, 40),
        st.slices(35),
    )
    def test_it_is_indexed_as_the_list_it_stands_for(self, k, starts_with_none, i, cut):
        rows, expected = random_case(30, k)
        logprobs = Logprobs(rows, text_of, starts_with_none)
        plain: list[Any] = [None] * starts_with_none + expected
        assert len(logprobs) == len(plain)
        assert logprobs[cut] == plain[cut]
        if -len(plain) <= i < len(plain):
            assert logprobs[i] == plain[i]
        else:
            with pytest.raises(IndexError, match=rf"{i} of {len(plain)}"):
                logprobs[i]

    def test_a_prompts_first_token_has_none(self):
        rows, expected = random_case(2, 1)
        logprobs = Logprobs(rows, text_of, starts_with_none=True)
        assert list(logprobs) == [None, *expected]
        assert list(Logprobs(rows[:0], text_of, starts_with_none=True)) == [None]
        assert list(Logprobs(rows[:0], text_of)) == []

    def test_it_reads_as_a_sequence(self):
        rows, expected = random_case(4, 2)
        logprobs = Logprobs(rows, text_of)
        assert list(reversed(logprobs)) == expected[::-1]
        assert expected[2] in logprobs and {} not in logprobs
        assert logprobs.index(expected[3]) == 3
        with pytest.raises(TypeError):
            logprobs["0"]

    def test_nothing_is_decoded_until_it_is_looked_at(self):
        """Guards a dict and a text for each of a million tokens."""
        decoded = []

        def decode(token_id: int) -> str:
            decoded.append(token_id)
            return text_of(token_id)

        rows, expected = random_case(1000, 3)
        logprobs = Logprobs(rows, decode)
        assert len(logprobs) == 1000 and repr(logprobs)
        assert logprobs.token_logprobs().sum() < 0
        assert decoded == []
        assert logprobs[17] == expected[17]
        assert decoded == list(expected[17])

    def test_logprobs_of_the_tokens_need_no_dicts(self):
        rows, expected = random_case(50, 4)
        totals = Logprobs(rows, text_of).token_logprobs()
        assert totals.dtype == np.float32
        assert totals.tolist() == [next(iter(position.values())).logprob for position in expected]

    def test_extreme_values_are_read_bit_for_bit(self):
        values = [-np.inf, -0.0, -1e-30, -3.4e38]
        rows = pack([(7, [(3, value)]) for value in values])
        read = [position[3].logprob for position in Logprobs(rows, text_of)]
        assert np.array_equal(np.float32(read).view(np.int32), np.float32(values).view(np.int32))
        assert all(type(value) is float for value in read)

    def test_the_text_is_none_without_a_tokenizer(self):
        (position,) = Logprobs(pack([(1, [(5, -0.5)])]), no_text)
        assert position == {5: Logprob(-0.5, 1, None)}

    def test_it_equals_lists_and_its_like_by_content(self):
        rows, expected = random_case(3, 2)
        logprobs = Logprobs(rows, text_of)
        assert logprobs == expected and expected == logprobs
        assert logprobs == Logprobs(rows.copy(), text_of)
        assert logprobs != expected[:2] and logprobs != Logprobs(rows[1:], text_of)
        assert logprobs != Logprobs(rows, no_text)
        assert logprobs != Logprobs(rows, text_of, starts_with_none=True)
        assert logprobs != 3 and logprobs is not None
        with pytest.raises(TypeError, match="unhashable"):
            hash(logprobs)

    def test_a_pickle_holds_a_plain_list(self):
        """Guards a tokenizer, with its lock or its file handles, in each result that is sent."""

        def unpicklable(token_id: int) -> str:
            return text_of(token_id)

        rows, expected = random_case(3, 2)
        copy = pickle.loads(pickle.dumps(Logprobs(rows, unpicklable, starts_with_none=True)))
        assert type(copy) is list
        assert copy == [None, *expected]

    def test_the_repr_is_short(self):
        assert repr(Logprobs(random_case(1000, 5)[0], text_of)) == "<1000 positions of logprobs>"


def make_output(**changes: Any) -> RequestOutput:
    rows, _ = random_case(3, 1)
    logprobs = Logprobs(rows, text_of)
    completions = [
        CompletionOutput(0, "one", [4, 5, 2], "stop", None, -3.5, logprobs),
        CompletionOutput(1, "two", [7], "length"),
    ]
    metrics = RequestMetrics(10.0, 11.0, 12.0)
    values = {"prompt_logprobs": logprobs, "num_cached_tokens": 16, "metrics": metrics, **changes}
    return RequestOutput("7", "hello", [1, 3], completions, **values)


class TestRequestOutput:
    def test_both_styles_read_the_first_completion(self):
        out = make_output()
        assert out["text"] == out.outputs[0].text == "one"
        assert out["token_ids"] is out.outputs[0].token_ids

    @pytest.mark.parametrize("key", ["logprobs", "outputs", "", 0, None])
    def test_any_other_key_is_refused_with_those_there_are(self, key: Any):
        with pytest.raises(KeyError, match=r"'text' and 'token_ids'"):
            make_output()[key]

    def test_a_completion_knows_whether_it_has_finished(self):
        assert [c.finished() for c in make_output().outputs] == [True, True]
        assert not CompletionOutput(0, "", []).finished()

    def test_reprs_are_short_and_tell_the_text(self):
        """Guards a log line with a prompt of thousands of ids, or with their logprobs."""
        out = RequestOutput("7", None, list(range(5000)), make_output().outputs)
        assert len(repr(out)) < 500
        for part in ("request_id='7'", "text='one'", "token_ids=[7]", "finish_reason='stop'"):
            assert part in repr(out)
        assert "positions of" not in repr(make_output())

    def test_what_was_not_asked_for_is_none(self):
        completion = CompletionOutput(0, "", [])
        assert completion.logprobs is completion.cumulative_logprob is None
        assert completion.finish_reason is completion.stop_reason is None
        out = RequestOutput("0", None, [1], [completion])
        assert out.prompt_logprobs is out.metrics is None
        assert (out.finished, out.num_cached_tokens) == (True, 0)

    def test_results_cannot_be_changed_by_mistake(self):
        out = make_output()
        for target, name in ((out, "finished"), (out.outputs[0], "text")):
            with pytest.raises(FrozenInstanceError):
                setattr(target, name, None)

    def test_results_survive_the_trip_to_another_process(self):
        out = make_output()
        assert pickle.loads(pickle.dumps(out)) == out
