"""Every sampling parameter: its default, which is vLLM's, what it becomes when it is set, and what
it refuses, by its name."""

import math
import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import SamplingParams, StructuredOutputsParams
from nanovllm.compat.names import GuidedDecodingParams
from nanovllm.sampling_params import VALIDATORS, RequestOutputKind
from nanovllm.vllm_fields import HINTS, NEUTRAL_VALUES, VLLM_VALIDATORS
from tests.tables import each

VLLM_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "bad_words": [],
    "allowed_token_ids": None,
    "logit_bias": None,
    "structured_outputs": None,
}
JSON_OBJECT = StructuredOutputsParams(json_object=True)
NAN, INF = math.nan, math.inf
NO_INT = [1.0, "1", True, [1]]
NO_NUMBER = ["1", None, True, [1.0], 1j]
NO_BOOL = [0, 1, "yes", None]
# For each field: good values, values of a wrong type, values out of range.
VALUES: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
    "n": ([1, 2, 1000], [*NO_INT, None], [0, -1]),
    "presence_penalty": ([-2, -0.5, 0, 2.0], NO_NUMBER, [-2.1, 2.1, NAN, INF]),
    "frequency_penalty": ([-2, -0.5, 0, 2.0], NO_NUMBER, [-2.1, 2.1, NAN, -INF]),
    "repetition_penalty": ([1e-3, 1, 2.0, 100], NO_NUMBER, [0, 0.0, -1, NAN, INF]),
    "temperature": ([0, 0.0, 1e-9, 1, 2.5, 1e30], NO_NUMBER, [-1e-9, -1, NAN, INF, 10**400]),
    "top_p": ([1e-6, 0.5, 1, 1.0], NO_NUMBER, [0, 0.0, -0.1, 1.0001, NAN, INF]),
    "top_k": ([-1, 0, 1, 10**9], [*NO_INT, None], [-2, -100]),
    "min_p": ([0, 0.0, 0.5, 1], NO_NUMBER, [-0.1, 1.1, NAN, INF]),
    "seed": ([None, 0, -2, -(2**63), 2**64 - 1], NO_INT, [2**64, -(2**63) - 1]),
    "stop": (
        [[], ["a", "b"]],
        [5, 0, [1], {"a": 1}, b"a"],
        ["", ["", "a"]],
    ),
    "stop_token_ids": ([[], [0, 7]], ["7", 7, [0.5], [True], [None]], [[-1], [3, -7]]),
    "ignore_eos": ([True, False], NO_BOOL, []),
    "max_tokens": ([None, 1, 10**9], NO_INT, [0, -1]),
    "min_tokens": ([0, 1, 16], [*NO_INT, None], [-1, -16]),
    "logprobs": ([None, -1, 0, 5], [1.0, "1", [1]], [-2]),
    "prompt_logprobs": ([None, -1, 0, 5], [1.0, "1", [1]], [-2]),
    "detokenize": ([True, False], NO_BOOL, []),
    "skip_special_tokens": ([True, False], NO_BOOL, []),
    "spaces_between_special_tokens": ([True, False], NO_BOOL, []),
    "include_stop_str_in_output": ([True, False], NO_BOOL, []),
    "bad_words": ([[], ["a", "two words"]], ["word", 5, [1], [None]], [[""], ["a", ""]]),
    "allowed_token_ids": ([None, [0], [5, 3]], ["5", 5, [0.5], [False]], [[], [-1]]),
    "logit_bias": (
        [None, {}, {5: 1.5, 7: -100.0}],
        [5, [5], "x", {"5": 1.0}, {5: "1"}, {5: True}, {5: None}, {5.0: 1.0}],
        [{-1: 0.5}, {5: NAN}, {5: INF}, {5: -INF}],
    ),
    "structured_outputs": ([None, JSON_OBJECT], [{"json_object": True}, "{}", True], []),
}


def cases(kind: int) -> list[tuple[str, Any]]:
    """Field and value of every good (0), mistyped (1) or out-of-range (2) value."""
    return [(name, value) for name, values in VALUES.items() for value in values[kind]]


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    own = {f.name for f in fields(SamplingParams)} - VLLM_VALIDATORS.keys()
    assert {name: getattr(params, name) for name in own} == VLLM_DEFAULTS


def test_every_field_has_its_values_here():
    assert set(VALUES) == set(VLLM_DEFAULTS)
    assert set(VALIDATORS) == {f.name for f in fields(SamplingParams)}


@each("name, value", cases(0))
def test_a_good_value_is_kept(name: str, value: Any):
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == value
    assert kept is None or type(kept) is type(VLLM_DEFAULTS[name]) or VLLM_DEFAULTS[name] is None


@each(
    "name, value, kept",
    [
        ("seed", np.int64(7), 7),
        ("seed", -1, None),
        ("n", np.uint8(3), 3),
        ("max_tokens", np.int32(5), 5),
        ("top_p", np.float32(0.5), 0.5),
        ("temperature", np.float64(0.25), 0.25),
        ("temperature", 1, 1.0),
        ("stop", "ab", ["ab"]),
        ("stop", None, []),
        ("stop", ("a", "b", "a"), ["a", "b", "a"]),
        ("stop_token_ids", {3}, [3]),
        ("stop_token_ids", (np.int64(7), 7), [7]),
        ("stop_token_ids", None, []),
        ("allowed_token_ids", (5, np.int16(3)), [5, 3]),
        ("allowed_token_ids", range(3), [0, 1, 2]),
        ("allowed_token_ids", np.array([5, 3]), [5, 3]),
        ("bad_words", None, []),
        ("bad_words", ("a", "a"), ["a"]),
        ("ignore_eos", np.bool_(True), True),
        ("logprobs", np.bool_(True), 1),
        ("logprobs", True, 1),
        ("logprobs", False, None),
        ("prompt_logprobs", True, 1),
        ("logit_bias", {np.int64(5): np.float32(1)}, {5: 1.0}),
    ],
)
def test_a_value_becomes_pythons_own_when_it_is_set(name: str, value: Any, kept: Any):
    """Guards numpy's numbers: a seed of theirs overflowed, and all requests were lost."""
    assigned = SamplingParams()
    setattr(assigned, name, value)
    for params in (SamplingParams(**{name: value}), assigned):
        read = getattr(params, name)
        assert read == kept and type(read) is type(kept)
        inside = list(read) if isinstance(read, (list, dict)) else []
        assert all(type(item) in (int, str) for item in inside)


@each("name, value", cases(1))
def test_a_wrong_type_is_a_type_error_that_names_the_field(name: str, value: Any):
    with pytest.raises(TypeError, match=rf"\b{name}\b"):
        SamplingParams(**{name: value})


@each("name, value", cases(2))
def test_a_value_out_of_range_is_a_value_error_that_names_the_field(name: str, value: Any):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        SamplingParams(**{name: value})


@each("name", VALUES)
def test_fields_are_checked_when_they_are_assigned(name: str):
    """Scripts take the default parameters and change one."""
    good, mistyped, out_of_range = VALUES[name]
    params = SamplingParams()
    for value in good:
        setattr(params, name, value)
        assert getattr(params, name) == value
    for value in mistyped:
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            setattr(params, name, value)
    for value in out_of_range:
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            setattr(params, name, value)
    assert getattr(params, name) == good[-1]


def test_an_unknown_field_cannot_be_assigned():
    with pytest.raises(AttributeError, match="max_new_tokens"):
        SamplingParams().max_new_tokens = 5


def test_what_contradicts_after_an_assignment_is_refused_when_it_is_checked():
    params = SamplingParams(stop="x")
    params.detokenize = False
    with pytest.raises(ValueError, match="detokenize"):
        params.check()


def test_a_clone_shares_nothing_that_can_change():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, structured_outputs=JSON_OBJECT)
    copy = params.clone()
    assert copy == params
    copy.stop.append("b")
    copy.logit_bias[2] = 1.0
    copy.structured_outputs.json_object = None
    assert (params.stop, params.logit_bias) == (["a"], {1: 2.0})
    assert params.structured_outputs.json_object is True


def test_what_a_caller_does_to_a_list_later_changes_nothing():
    stop, ids = ["a"], [3]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b"), ids.append(4)
    assert (params.stop, params.stop_token_ids) == (["a"], [3])


def test_from_optional_takes_none_for_the_defaults_of_numbers():
    made = SamplingParams.from_optional(
        n=None, temperature=None, top_p=None, presence_penalty=None, logit_bias={"5": 150, 7: -1}
    )
    assert made == SamplingParams(logit_bias={5: 100.0, 7: -1.0})
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias={"five": 1})


def test_vllms_other_fields_are_accepted_where_they_ask_for_nothing():
    for name, neutral in NEUTRAL_VALUES.items():
        for value in neutral:
            assert getattr(SamplingParams(**{name: value}), name) == value
        error = TypeError if name in HINTS else ValueError
        with pytest.raises(error, match=f"{name} is not supported here.*{HINTS.get(name, '')}"):
            SamplingParams(**{name: RequestOutputKind.DELTA})
    SamplingParams(extra_args={"x": 1}, skip_clone=True, skip_reading_prefix_cache=True)


def test_former_parameters_say_what_to_use_instead():
    values = {"best_of": 2, "truncate_prompt_tokens": 1, "use_beam_search": True}
    values |= {"length_penalty": 0.5, "early_stopping": "never"}
    assert values.keys() == HINTS.keys()
    for name, value in values.items():
        with pytest.raises(TypeError, match=f"{name} is not supported here.*{HINTS[name]}"):
            SamplingParams(**{name: value})


def test_guided_decoding_is_the_former_name_of_structured_outputs():
    one, other = StructuredOutputsParams(regex="a"), GuidedDecodingParams(regex="b", backend="x")
    params = SamplingParams(guided_decoding=other)
    assert params.structured_outputs is other and params.edits_logits
    assert params.clone().structured_outputs == other
    params = SamplingParams(guided_decoding=None, structured_outputs=one)
    assert params.structured_outputs is one
    params.structured_outputs = None
    params.guided_decoding = one
    assert params.structured_outputs is one
    SamplingParams(guided_decoding=one, structured_outputs=one)
    with pytest.raises(ValueError, match="set only one of them"):
        SamplingParams(guided_decoding=other, structured_outputs=one)
    with pytest.raises(TypeError, match="must be StructuredOutputsParams, got 'a'"):
        SamplingParams(guided_decoding="a")
    assert GuidedDecodingParams(choice=["a"], disable_fallback=True).choice == ["a"]


def test_unknown_names_and_positions_are_refused():
    with pytest.raises(
        TypeError, match="unknown argument 'temprature'; did you mean 'temperature'"
    ):
        SamplingParams(temprature=1)
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)

    class Own(SamplingParams):
        def __init__(self, flavour: str, **values: Any) -> None:
            super().__init__(**values)
            self.flavour = flavour

    assert Own("sweet", n=2).n == 2 and Own(flavour="sour").flavour == "sour"


@each(
    "values, names",
    [
        ({"min_tokens": 17}, ("min_tokens", "max_tokens")),
        ({"min_tokens": 5, "max_tokens": 4}, ("min_tokens", "max_tokens")),
        ({"stop": "x", "detokenize": False}, ("stop", "detokenize")),
        ({"stop": ["x", "y"], "detokenize": False}, ("stop", "detokenize")),
        ({"n": 2, "temperature": 0}, ("n=2", "temperature")),
        ({"n": 2, "temperature": 1e-9}, ("n=2", "temperature")),
    ],
)
def test_a_contradiction_is_refused_with_both_names(values: dict[str, Any], names: tuple[str, ...]):
    with pytest.raises(ValueError) as error:
        SamplingParams(**values)
    assert all(name in str(error.value) for name in names)


@each(
    "values",
    [
        {"min_tokens": 16},
        {"min_tokens": 10**6, "max_tokens": None},
        {"stop": [], "detokenize": False},
        {"stop_token_ids": [5], "detokenize": False},
        {"n": 1, "temperature": 0},
        {"n": 2, "temperature": 0.01},
        {"n": 2, "top_k": 1},
    ],
)
def test_what_only_looks_like_a_contradiction_is_served(values: dict[str, Any]):
    SamplingParams(**values)


@given(
    temperature=st.sampled_from([0.0, 1e-9, 9e-6, 1e-5, 0.5, 2.0]),
    top_p=st.sampled_from([1.0, 1, 0.999, 0.1]),
    top_k=st.sampled_from([-1, 0, 1, 50]),
    min_p=st.sampled_from([0.0, 0, 0.1, 1.0]),
)
def test_truncation_counts_only_where_something_is_drawn(temperature, top_p, top_k, min_p):
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    assert params.is_greedy == (temperature < 1e-5)
    assert params.truncates == (
        temperature >= 1e-5 and not (top_p == 1 and top_k <= 0 and min_p == 0)
    )
    # Also if the temperature is set later. Otherwise another request in the batch that truncates
    # would change the processed log-probabilities of this one.
    params.temperature = 0
    params.check()
    assert (params.top_p, params.top_k, params.min_p) == (1, 0, 0)


@each(
    "values, penalises",
    [
        ({}, False),
        ({"repetition_penalty": 1}, False),
        ({"presence_penalty": 0, "frequency_penalty": -0.0}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 0.9}, True),
    ],
)
def test_only_a_penalty_that_does_something_counts(values: dict[str, Any], penalises: bool):
    assert SamplingParams(**values).penalises == penalises


def test_params_survive_the_trip_to_another_process():
    params = SamplingParams(n=3, stop=["a"], logit_bias={5: 1.0}, structured_outputs=JSON_OBJECT)
    assert pickle.loads(pickle.dumps(params)) == params


class Schema:
    """Stands for a pydantic model class, which has just this method."""

    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return {"type": "object"}


class TestStructuredOutputsParams:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("json", {"type": "object"}),
            ("json", '{"type": "object"}'),
            ("json", Schema),
            ("regex", "a+"),
            ("choice", ["yes", "no"]),
            ("choice", ("yes",)),
            ("grammar", 'start: "a"'),
            ("json_object", True),
        ],
    )
    def test_one_kind_is_kept_and_the_others_are_none(self, name: str, value: Any):
        params = StructuredOutputsParams(**{name: value})
        assert getattr(params, name) == (list(value) if name == "choice" else value)
        others = {"json", "regex", "choice", "grammar", "json_object"} - {name}
        assert [getattr(params, other) for other in others] == [None] * 4

    def test_vllms_whitespace_pattern_and_tags_are_refused_by_name(self):
        for name in ("whitespace_pattern", "structural_tag"):
            with pytest.raises(ValueError, match=name):
                StructuredOutputsParams(json_object=True, **{name: "x"})

    def test_the_schema_may_come_by_position(self):
        assert StructuredOutputsParams({"type": "object"}).json == {"type": "object"}

    @pytest.mark.parametrize(
        ("values", "match"),
        [
            ({}, "got none"),
            ({"json_object": False}, "got none"),
            ({"json": "{}", "regex": "a"}, "got json, regex"),
            ({"choice": ["a"], "grammar": "x", "json_object": True}, "choice, grammar, json_obj"),
        ],
        ids=str,
    )
    def test_none_or_several_kinds_are_refused(self, values: dict[str, Any], match: str):
        with pytest.raises(ValueError, match=match):
            StructuredOutputsParams(**values)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("json", 5),
            ("json", ["type"]),
            ("json", dict),
            ("regex", b"a"),
            ("regex", ["a"]),
            ("choice", "yes"),
            ("choice", [1, 2]),
            ("choice", {"yes": 1}),
            ("grammar", 5),
            ("json_object", 1),
            ("json_object", "yes"),
        ],
    )
    def test_a_wrong_type_is_a_type_error_that_names_the_field(self, name: str, value: Any):
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            StructuredOutputsParams(**{name: value})

    def test_no_choice_is_refused(self):
        with pytest.raises(ValueError, match="choice"):
            StructuredOutputsParams(choice=[])


def test_a_subclass_may_have_more_attributes():
    class Mine(SamplingParams):
        pass

    params = Mine(max_tokens=3)
    params.tag = "x"
    copy = params.clone()
    assert type(copy) is Mine and (copy.tag, copy.max_tokens) == ("x", 3)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings_that_each_token_is_compared_with_have_a_limit(name):
    assert len(getattr(SamplingParams(**{name: [f"{i}" for i in range(4096)]}), name)) == 4096
    with pytest.raises(ValueError, match=f"{name} has 1000000 strings, but the limit is 4096"):
        SamplingParams(**{name: ["x"] * 1_000_000})


def test_choices_have_a_limit():
    with pytest.raises(ValueError, match="choice has 100001 strings"):
        StructuredOutputsParams(choice=["x"] * 100_001)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings_that_each_token_is_compared_with_are_short(name):
    with pytest.raises(ValueError, match=f"{name} has 100001 characters, but the limit is 100000"):
        SamplingParams(**{name: ["x" * 100_001]})


def test_a_bias_of_any_size_is_compared():
    with pytest.raises(ValueError, match=r"logit_bias\[5\] must be between"):
        SamplingParams(logit_bias={5: 10**400})


def test_a_copy_of_what_is_nested_too_deeply_is_refused():
    schema: dict[str, Any] = {}
    for _ in range(2000):
        schema = {"anyOf": [schema]}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    with pytest.raises(ValueError, match="nested too deeply"):
        params.clone()
