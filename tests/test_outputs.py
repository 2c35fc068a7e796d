"""Results: packed log-probabilities against plain lists of dicts, and the two styles in which a
result can be read."""

import json
import pickle
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from nanovllm.engine.logprobs import PackedLogprobs
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def text_of(token_id: int) -> str:
    return f"<{token_id}>"


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


def texts_of(before: Sequence[int], token_ids: Sequence[int]) -> list[str]:
    return [text_of(token_id) for token_id in token_ids]


class TestLogprobs:
    @SIZES
    @pytest.mark.parametrize("num_positions", [1, 2, 30])
    def test_each_position_is_a_dict_led_by_its_own_token(self, num_positions: int, k: int):
        rows, expected = random_case(num_positions, k)
        read = PackedLogprobs(rows, texts_of).to_list()
        assert read == expected
        assert [list(position) for position in read] == [list(position) for position in expected]

    def test_a_prompts_first_token_has_none(self):
        rows, expected = random_case(2, 1)
        packed = PackedLogprobs(rows, texts_of, starts_with_none=True)
        assert packed.to_list() == [None, *expected]
        assert PackedLogprobs(rows[:0], texts_of, starts_with_none=True).to_list() == [None]
        assert PackedLogprobs(rows[:0], texts_of).to_list() == []

    def test_texts_are_made_with_the_tokens_before_them(self):
        seen = []

        def decode(before: Sequence[int], token_ids: Sequence[int]) -> list[str]:
            seen.append((list(before), list(token_ids)))
            return texts_of(before, token_ids)

        rows, _ = random_case(7, 2)
        PackedLogprobs(rows, decode).to_list()
        own = rows[:, 1].tolist()
        assert seen == [(own[max(0, i - 4) : i], rows[i, 1::2].tolist()) for i in range(7)]
        seen.clear()
        PackedLogprobs(rows, decode, starts_with_none=True, before=[9]).to_list()
        own.insert(0, 9)  # a prompt's first token
        assert [before for before, _ in seen] == [own[max(0, i - 3) : i + 1] for i in range(7)]

    def test_logprobs_of_the_tokens_need_no_dicts(self):
        rows, expected = random_case(50, 4)
        totals = PackedLogprobs(rows, texts_of).token_logprobs()
        assert totals.dtype == np.float32
        assert totals.tolist() == [next(iter(position.values())).logprob for position in expected]

    def test_extreme_values_are_read_bit_for_bit(self):
        values = [-np.inf, -0.0, -1e-30, -3.4e38]
        rows = pack([(7, [(3, value)]) for value in values])
        read = [position[3].logprob for position in PackedLogprobs(rows, texts_of).to_list()]
        assert np.array_equal(np.float32(read).view(np.int32), np.float32(values).view(np.int32))
        assert all(type(value) is float for value in read)

    def test_the_text_is_none_without_a_decoder(self):
        (position,) = PackedLogprobs(pack([(1, [(5, -0.5)])])).to_list()
        assert position == {5: Logprob(-0.5, 1, None)}

    def test_a_logprob_needs_no_rank_or_text(self):
        assert Logprob(-0.1) == Logprob(-0.1, rank=None, decoded_token=None)

    def test_lists_are_made_once_when_they_are_first_read(self):
        """Guards a dict and a text for each of a million tokens that nobody looks at."""
        decoded = []

        def decode(before: Sequence[int], token_ids: Sequence[int]) -> list[str]:
            decoded.extend(token_ids)
            return texts_of(before, token_ids)

        rows, expected = random_case(10, 3)
        completion = CompletionOutput(0, "", [], logprobs=PackedLogprobs(rows, decode))
        assert repr(completion) and decoded == []
        assert completion.logprobs == expected
        assert type(completion.logprobs) is list and completion.logprobs is completion.logprobs
        assert len(decoded) == 40

    def test_a_pickle_holds_a_plain_list(self):
        """Guards a tokenizer, with its lock or its file handles, in each result that is sent."""

        def unpicklable(before: Sequence[int], token_ids: Sequence[int]) -> list[str]:
            return texts_of(before, token_ids)

        rows, expected = random_case(3, 2)
        packed = PackedLogprobs(rows, unpicklable, starts_with_none=True)
        copy = pickle.loads(pickle.dumps(RequestOutput("0", None, [1], packed)))
        assert type(copy.prompt_logprobs) is list
        assert copy.prompt_logprobs == [None, *expected]


def test_times_have_vllms_names_too():
    new, done = RequestMetrics(10.0), RequestMetrics(10.0, 11.0, 12.5)
    assert (new.queued_ts, new.first_token_ts, new.last_token_ts) == (10.0, 0.0, 0.0)
    assert (done.queued_ts, done.first_token_ts, done.last_token_ts) == (10.0, 11.0, 12.5)
    assert (new.first_token_latency, done.first_token_latency) == (0.0, 1.0)


def make_output(**changes: Any) -> RequestOutput:
    rows, _ = random_case(3, 1)
    logprobs = PackedLogprobs(rows, texts_of)
    completions = [
        CompletionOutput(0, "one", [4, 5, 2], -3.5, logprobs, finish_reason="stop"),
        CompletionOutput(1, "two", [7], finish_reason="length"),
    ]
    metrics = RequestMetrics(10.0, 11.0, 12.0)
    values = {"prompt_logprobs": logprobs, "num_cached_tokens": 16, "metrics": metrics, **changes}
    return RequestOutput("7", "hello", [1, 3], outputs=completions, **values)


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
        out = RequestOutput("7", None, list(range(5000)), outputs=make_output().outputs)
        assert len(repr(out)) < 500
        for part in ("request_id='7'", "text='one'", "token_ids=[7]", "finish_reason='stop'"):
            assert part in repr(out)
        assert "logprobs=" not in repr(make_output())

    def test_what_was_not_asked_for_is_none(self):
        completion = CompletionOutput(0, "", [])
        assert completion.logprobs is completion.cumulative_logprob is None
        assert completion.finish_reason is completion.stop_reason is None
        out = RequestOutput("0", None, [1], outputs=[completion])
        assert out.prompt_logprobs is out.metrics is None
        assert (out.finished, out.num_cached_tokens) == (True, None)

    def test_attributes_can_be_set(self):
        out = make_output()
        out.outputs[0].text, out.finished, out.outputs[0].logprobs = "cut", False, None
        assert (out["text"], out.finished, out.outputs[0].logprobs) == ("cut", False, None)

    def test_a_completion_becomes_json(self):
        """Harnesses write ``json.dumps(asdict(...))``."""
        read = json.loads(json.dumps(asdict(make_output().outputs[0])))
        assert read["text"] == "one" and len(read["logprobs"]) == 3

    def test_vllms_attributes_are_there(self):
        out = make_output()
        assert out.lora_request is out.encoder_prompt is out.encoder_prompt_token_ids is None
        assert out.kv_transfer_params is None
        assert out.outputs[0].lora_request is None

    def test_results_survive_the_trip_to_another_process(self):
        out = make_output()
        assert pickle.loads(pickle.dumps(out)) == out
