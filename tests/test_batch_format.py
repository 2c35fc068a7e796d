"""The format of batch files, without an engine: lines to requests, results to records, and the
output file that they are added to."""

import errno
import fcntl
import json
import os
import random
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from nanovllm.engine.logprobs import PackedLogprobs
from nanovllm.run_batch import lines, writer
from nanovllm.run_batch.lines import Line, read_lines
from nanovllm.run_batch.records import (
    RequestError,
    encode_record,
    error_record,
    key_for,
    success_record,
)
from nanovllm.run_batch.request import (
    CHAT_URL,
    COMPLETIONS_URL,
    FIELDS,
    IGNORED_FIELDS,
    MAX_CHOICES,
    NEUTRAL_VALUES,
    BatchRequest,
    Generation,
    parse_line,
    read_body,
)
from nanovllm.run_batch.response import make_body
from nanovllm.run_batch.writer import Writer
from tests.tables import each

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, max_tokens=99, seed=5)
NAMES = ("model", "alias")
MESSAGES = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
REQUIRED = {CHAT_URL: {"messages": MESSAGES}, COMPLETIONS_URL: {"prompt": "Hello"}}
URLS = pytest.mark.parametrize("url", FIELDS)


def make_line(content: Any, number: int = 7) -> Line:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Line(number, "d" * 32, text)


def make_request(url: str, **body: Any) -> BatchRequest:
    content = {"custom_id": "a", "method": "POST", "url": url, "body": {**REQUIRED[url], **body}}
    request = parse_line(make_line(content))
    assert isinstance(request, BatchRequest), request
    return request


def read(url: str, **body: Any) -> Generation:
    return read_body(make_request(url, **body), DEFAULTS, NAMES)


def refuse(url: str, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as info:
        read(url, **body)
    return info.value


# Lines.


def test_lines_have_their_number_and_no_white_space_around_them(tmp_path: Path):
    path = tmp_path / "in"
    path.write_bytes(b'{"a"}\n\n  \t\r\n {b}\r\n\xff\x00\nlast')
    assert [(line.number, line.text) for line in read_lines(path)] == [
        (1, b'{"a"}'),
        (4, b"{b}"),
        (5, b"\xff\x00"),
        (6, b"last"),
    ]


def test_a_digest_is_of_the_text(tmp_path: Path):
    path = tmp_path / "in"
    path.write_bytes(b"a\n a \nb\n")
    digests = [line.digest for line in read_lines(path)]
    assert digests[0] == digests[1] != digests[2]
    assert all(len(digest) == 32 and int(digest, 16) for digest in digests)
    path.write_bytes(b" a\r\na\nc\n")
    others = [line.digest for line in read_lines(path)]
    assert [a == b for a, b in zip(digests, others, strict=True)] == [True, True, False]


def test_a_line_that_is_too_long_is_passed_over_and_noticed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 7)
    path = tmp_path / "in"
    path.write_bytes(
        b"a\n" + b"b" * 300 + b"\n" + b"c" * 98 + b"\n" + b"d" * 99 + b"\n" + b"e" * 150
    )
    found = list(read_lines(path))
    assert [(line.number, line.text) for line in found] == [
        (1, b"a"),
        (2, None),
        (3, b"c" * 98),
        (4, b"d" * 99),
        (5, None),
    ]
    record = parse_line(found[1])
    assert isinstance(record, dict)
    assert record["error"]["code"] == "line_too_long"
    path.write_bytes(b"a\n" + b"b" * 299 + b"B\n")
    assert list(read_lines(path))[1].digest != found[1].digest


# Requests.


def test_a_request_has_what_its_line_says():
    body = {"messages": MESSAGES, "temperature": 0.5}
    content = {"custom_id": "ä\ud800", "method": "POST", "url": CHAT_URL, "body": body, "more": 1}
    assert parse_line(make_line(content)) == BatchRequest(7, "d" * 32, "ä\ud800", CHAT_URL, body)
    with_mark = b"\xef\xbb\xbf" + json.dumps(content).encode()
    assert parse_line(make_line(with_mark)) == parse_line(make_line(content))


GOOD = {"custom_id": "a", "method": "POST", "url": CHAT_URL, "body": {}}
NO_REQUESTS = {
    "no-json": (b"{'a': 1}", None, "invalid_json", "not JSON"),
    "cut": (b'{"custom_id": "a"', None, "invalid_json", "not JSON"),
    "two": (b"{} {}", None, "invalid_json", "not JSON"),
    "nan": (b'{"custom_id": NaN}', None, "invalid_json", "NaN is not allowed"),
    "latin-1": ('{"custom_id": "ä"}'.encode("latin-1"), None, "invalid_json", "not UTF-8"),
    "utf-16": (json.dumps(GOOD).encode("utf-16"), None, "invalid_json", "not UTF-8"),
    "deep": (b"[" * 100_000, None, "invalid_json", "too deep"),
    "deep-value": (b"[" * 900 + b"]" * 900, None, "invalid_json", "not a JSON object"),
    "digits": (b'{"custom_id": ' + b"1" * 5000 + b"}", None, "invalid_json", "not JSON"),
    "list": (b"[1]", None, "invalid_json", "not a JSON object"),
    "string": (b'"a"', None, "invalid_json", "not a JSON object"),
    "no-id": ({**GOOD, "custom_id": None}, None, "invalid_custom_id", "must be a string, got null"),
    "int-id": ({**GOOD, "custom_id": 5}, None, "invalid_custom_id", "must be a string, got 5"),
    "no-method": ({"custom_id": "a", "url": CHAT_URL}, "a", "invalid_request", "method must be"),
    "get": ({**GOOD, "method": "GET"}, "a", "invalid_request", 'method must be POST, got "GET"'),
    "url": ({**GOOD, "url": "/v1/embeddings"}, "a", "invalid_request", "url must be .* or .*, got"),
    "url-type": ({**GOOD, "url": ["/v1"]}, "a", "invalid_request", "url must be"),
    "no-body": ({**GOOD, "body": None}, "a", "invalid_request", "body must be an object"),
    "body-type": ({**GOOD, "body": "{}"}, "a", "invalid_request", "body must be an object"),
}


@each("name", NO_REQUESTS)
def test_a_line_that_is_no_request_gives_a_record(name: str):
    content, custom_id, code, message = NO_REQUESTS[name]
    record = parse_line(make_line(content))
    assert isinstance(record, dict)
    assert (record["id"], record["custom_id"]) == ("batch_req_7", custom_id)
    assert record["response"]["status_code"] == 400
    assert record["error"]["code"] == record["response"]["body"]["error"]["code"] == code
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(record["error"]["message"])


# Bodies.

SAMPLING = {
    "n": 3,
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.125,
    "seed": 11,
    "presence_penalty": -1,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "stop": ["a", "b"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "min_tokens": 2,
    "max_tokens": 5,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "bad_words": ["x"],
    "allowed_token_ids": [1, 2],
}


@URLS
@each("name", SAMPLING)
def test_a_field_of_sampling_params_is_taken_over(url: str, name: str):
    params = read(url, **{name: SAMPLING[name]}).params
    assert getattr(params, name) == SAMPLING[name]
    assert params != read(url).params


@URLS
def test_unset_fields_and_nulls_are_the_models_defaults(url: str):
    params = read(url).params
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 20)
    assert params.max_tokens == (None if url == CHAT_URL else 16)
    with_default = read_body(make_request(url), DEFAULTS, NAMES, max_tokens=7)
    assert with_default.params.max_tokens == (7 if url == CHAT_URL else 16)
    nothing = dict.fromkeys([*FIELDS[url], *IGNORED_FIELDS, *NEUTRAL_VALUES, "what"])
    assert read(url, **(nothing | REQUIRED[url])) == read(url)
    assert read(url, temperature=0).params.temperature == 0
    assert read(url, top_k=0).params.top_k == 0


def test_requests_without_a_seed_have_one_of_their_own():
    """It depends on the job's seed and on the line; each prompt has another."""

    def seeds(number: int, digest: str, base: int, **body: Any) -> list[int | None]:
        content = BatchRequest(number, digest, "a", COMPLETIONS_URL, {"prompt": ["a", "a"], **body})
        generation = read_body(content, SamplingParams(seed=base), NAMES)
        assert generation.params == generation.params_of(0)
        return [generation.params_of(i).seed for i in range(2)]

    one, two = seeds(1, "d", 5), seeds(1, "e", 5)
    assert one == seeds(2, "d", 5, seed=-1)
    assert len({*one, *two, *seeds(1, "d", 6)}) == 6
    assert seeds(1, "d", 5, seed=0) == [0, 0]


def test_a_chat_may_call_its_limit_by_either_name():
    assert read(CHAT_URL, max_tokens=5).params.max_tokens == 5
    assert read(CHAT_URL, max_completion_tokens=6).params.max_tokens == 6
    assert read(CHAT_URL, max_tokens=5, max_completion_tokens=6).params.max_tokens == 6
    assert refuse(COMPLETIONS_URL, max_completion_tokens=6).param == "max_completion_tokens"


@URLS
def test_biases_have_token_ids_for_keys(url: str):
    assert read(url, logit_bias={"5": -100, "06": 1.5}).params.logit_bias == {5: -100, 6: 1.5}
    for key in ("x", "-1", "1.0", "", " 1", "1_0", "٣", "9" * 50):
        assert refuse(url, logit_bias={key: 1}).param == "logit_bias"


def test_log_probabilities_are_asked_for_in_each_urls_own_way():
    assert read(COMPLETIONS_URL).params.logprobs is None
    assert read(COMPLETIONS_URL, logprobs=0).params.logprobs == 0
    assert read(COMPLETIONS_URL, logprobs=5).params.logprobs == 5
    assert read(CHAT_URL, logprobs=False).params.logprobs is None
    assert read(CHAT_URL, logprobs=True).params.logprobs == 0
    assert read(CHAT_URL, logprobs=True, top_logprobs=4).params.logprobs == 4


@URLS
def test_structured_outputs_come_by_either_name(url: str):
    def structured(**body: Any) -> StructuredOutputsParams | None:
        return read(url, **body).params.structured_outputs

    described = {"name": "x", "strict": True, "description": "y", "schema": SCHEMA}
    assert structured(response_format={"type": "text"}) is None
    json_object = StructuredOutputsParams(json_object=True)
    assert structured(response_format={"type": "json_object"}) == json_object
    schema = StructuredOutputsParams(json=SCHEMA)
    assert structured(response_format={"type": "json_schema", "json_schema": described}) == schema
    for name, value in {"json": SCHEMA, "regex": "a+", "choice": ["a"], "grammar": "g"}.items():
        expected = StructuredOutputsParams(**{name: value})  # type: ignore[arg-type]
        assert structured(structured_outputs={name: value, "structural_tag": None}) == expected
    both = {"response_format": {"type": "text"}, "structured_outputs": {"json_object": True}}
    assert structured(**both) == json_object


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        (["a"] * MAX_CHOICES, ["a"] * MAX_CHOICES),
    ],
)
def test_a_completion_has_one_prompt_or_several(prompt: Any, prompts: list[Any]):
    assert read(COMPLETIONS_URL, prompt=prompt).prompts == prompts


def test_a_chat_tells_its_template_what_the_body_says():
    template = read(CHAT_URL).template
    assert template == {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "tools": None,
    }
    given = {
        "chat_template": "{{ x }}",
        "chat_template_kwargs": {"x": 1},
        "add_generation_prompt": False,
    }
    assert read(CHAT_URL, **given).template == template | given
    assert read(CHAT_URL, continue_final_message=True).template == template | {
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert read(CHAT_URL, tools=TOOLS).template["tools"] == TOOLS
    assert read(CHAT_URL, tools=TOOLS, tool_choice="auto").template["tools"] == TOOLS
    assert read(CHAT_URL, tools=TOOLS, tool_choice="none").template["tools"] is None


def test_a_model_has_several_names_and_no_others():
    assert read(CHAT_URL).model == "model"
    assert read(CHAT_URL, model="alias").model == "alias"
    for name in ("other", "", 5, ["model"], {}):
        error = refuse(CHAT_URL, model=name)
        assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


@URLS
@each("name", sorted(IGNORED_FIELDS))
def test_fields_that_change_nothing_may_have_any_value(url: str, name: str):
    for value in ("x", True, {"a": [1]}):
        assert read(url, **{name: value}) == read(url)


@URLS
@each("name", sorted(NEUTRAL_VALUES))
def test_fields_that_are_not_served_may_ask_for_nothing(url: str, name: str):
    for value in NEUTRAL_VALUES[name]:
        assert read(url, **{name: value}) == read(url)
    error = refuse(url, **{name: {"what": "else"}})
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
    assert name in str(error)


NOT_SERVED = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "best_of": 2,
    "echo": True,
    "prompt_logprobs": 1,
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "reasoning_effort": "high",
    "truncate_prompt_tokens": 5,
    "use_beam_search": True,
    "guided_json": SCHEMA,
    "temprature": 0,
    "": 1,
}


@URLS
@each("name", NOT_SERVED)
def test_what_is_not_served_is_refused_by_name(url: str, name: str):
    error = refuse(url, **{name: NOT_SERVED[name]})
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
    assert f'"{name}"' in str(error)


def test_a_refusal_says_what_to_do_instead():
    assert "did you mean temperature?" in str(refuse(CHAT_URL, temprature=0))
    assert "did you mean tool_choice?" in str(refuse(CHAT_URL, tool_chioce="none"))
    assert "use structured_outputs" in str(refuse(CHAT_URL, guided_regex="a"))
    assert '; use "none" or "auto"' in str(refuse(CHAT_URL, tool_choice="required"))
    assert "; use false" in str(refuse(COMPLETIONS_URL, stream=True))


def test_special_tokens_are_added_to_completions_only():
    assert read(CHAT_URL, add_special_tokens=False) == read(CHAT_URL)
    assert read(COMPLETIONS_URL, add_special_tokens=True) == read(COMPLETIONS_URL)
    assert refuse(CHAT_URL, add_special_tokens=True).param == "add_special_tokens"
    assert refuse(COMPLETIONS_URL, add_special_tokens=False).param == "add_special_tokens"


WRONG: dict[str, list[Any]] = {
    "n": [0, 1.5, "2", True, 5000, 10**30],
    "temperature": ["x", -1, True, [], 1e300],
    "top_p": [0, 1.5, "1"],
    "top_k": [-2, 1.5],
    "min_p": [-0.5, 2],
    "seed": ["x", 1.5, 2**64, -(2**70)],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
    "repetition_penalty": [0],
    "stop": [5, [""], ["a", 5], {}],
    "stop_token_ids": [5, ["a"], [-1], [True]],
    "ignore_eos": ["yes", 1],
    "min_tokens": [-1],
    "max_tokens": [0, -5, 1.5, "5"],
    "include_stop_str_in_output": [0],
    "skip_special_tokens": ["no"],
    "bad_words": ["x", [""], [5]],
    "allowed_token_ids": [[], "x", [-1]],
    "logit_bias": [[], "x", {"5": "x"}, {"5": 1e300}, {"5": True}],
    "response_format": [
        "json_object",
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": "x"}},
    ],
    "structured_outputs": ["x", {}, {"regex": "a", "choice": ["b"]}, {"structural_tag": "x"}],
}


@URLS
@each("name", WRONG)
def test_a_wrong_value_is_refused_with_the_fields_name(url: str, name: str):
    for value in WRONG[name]:
        error = refuse(url, **{name: value})
        assert (error.status, error.param) == (400, name), value


WRONG_CHAT: dict[str, list[Any]] = {
    "messages": [None, "Hello", [], ["Hello"], [MESSAGES], {"role": "user"}, [5]],
    "logprobs": [1, "true"],
    "top_logprobs": [-1, 21, 1, "x", True],
    "max_completion_tokens": [],
    "chat_template": [5],
    "chat_template_kwargs": [5, []],
    "add_generation_prompt": ["x", 1],
    "continue_final_message": ["x", 0],
    "tools": ["x", {}],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}, 5],
}
WRONG_COMPLETION: dict[str, list[Any]] = {
    "prompt": [None, "", [], [""], [[]], ["a", ""], [1, "a"], [1.5], [True], 5, {"prompt": "a"}],
    "logprobs": [-1, 21, True, "x", 1.5],
    "messages": [MESSAGES],
}


@each(
    "url, name",
    [(CHAT_URL, name) for name in WRONG_CHAT] + [(COMPLETIONS_URL, n) for n in WRONG_COMPLETION],
)
def test_a_wrong_value_of_one_url_is_refused_with_the_fields_name(url: str, name: str):
    for value in (WRONG_CHAT if url == CHAT_URL else WRONG_COMPLETION)[name]:
        error = refuse(url, **{name: value})
        assert (error.status, error.param) == (400, name), value


def test_fields_that_exclude_each_other_are_refused():
    assert refuse(CHAT_URL, continue_final_message=True, add_generation_prompt=True)
    structured = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    assert refuse(CHAT_URL, **structured).param == "structured_outputs"
    assert refuse(COMPLETIONS_URL, min_tokens=20).param == "min_tokens"
    assert "greedy" in str(refuse(COMPLETIONS_URL, n=2, temperature=0))
    assert refuse(COMPLETIONS_URL, prompt=["a"] * (MAX_CHOICES // 2), n=3).param == "n"


# Whatever a line holds, it gives a record.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
NAMES_OF_FIELDS = sorted({*FIELDS[CHAT_URL], *FIELDS[COMPLETIONS_URL], *NEUTRAL_VALUES, "what"})
FULL: dict[str, dict[str, Any]] = {
    CHAT_URL: {
        **SAMPLING,
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ],
        "logprobs": True,
        "top_logprobs": 2,
        "tools": TOOLS,
        "logit_bias": {"5": 1},
        "chat_template_kwargs": {"x": 1},
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    },
    COMPLETIONS_URL: {
        **SAMPLING,
        "prompt": ["a", [1, 2]],
        "logprobs": 1,
        "logit_bias": {"5": 1},
        "structured_outputs": {"choice": ["a"]},
    },
}


def outcome(line: Line) -> int:
    """The status of the record that a line gives, or 200 if it can run."""
    found = parse_line(line)
    if isinstance(found, BatchRequest):
        try:
            generation = read_body(found, DEFAULTS, NAMES)
        except RequestError as error:
            found = error_record(line, found.custom_id, error)
        else:
            assert generation.params.n <= MAX_CHOICES
            assert bool(generation.prompts) != bool(generation.messages)
            return 200
    data = encode_record(found)
    assert data.count(b"\n") == 1
    record = json.loads(data)
    assert (record["id"], record["response"]["request_id"]) == ("batch_req_7", line.digest)
    assert record["error"]["message"] and record["error"]["code"]
    return record["response"]["status_code"]


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.binary(max_size=50) | st.text(max_size=50).map(lambda s: s.encode("utf-8", "replace")))
def test_random_bytes_give_a_record(text: bytes):
    assert outcome(make_line(text)) == 400


@pytest.mark.parametrize("num_examples", [250, pytest.param(1_000, marks=pytest.mark.slow)])
def test_random_values_of_fields_give_a_record_or_run(num_examples: int):
    @settings(max_examples=num_examples, deadline=None, derandomize=True)
    @given(
        st.fixed_dictionaries(
            {"custom_id": st.text(), "method": st.just("POST"), "url": st.sampled_from([*FIELDS])},
            optional={"body": st.dictionaries(st.sampled_from(NAMES_OF_FIELDS), JSON, max_size=5)},
        )
    )
    def check(content: dict[str, Any]) -> None:
        content.setdefault("body", {}).setdefault("model", "model")
        assert outcome(make_line(content)) in (200, 400, 404)

    check()


@pytest.mark.parametrize("name", ["temperature", "prompt", "what", "structured_outputs"])
def test_values_nested_to_the_limit_give_a_record(name: str):
    """Where JSON can still be read, but what is told of it goes one level too deep."""
    statuses = set()
    for depth in range(800, 1000):
        value = "[" * depth + "]" * depth
        text = json.dumps({"custom_id": "a", "method": "POST", "url": COMPLETIONS_URL, "body": "?"})
        text = text.replace('"?"', f'{{"prompt": "x", "{name}": {value}}}')
        statuses.add(outcome(make_line(text.encode())))
    assert statuses == {400}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all values within a value."""
    if not isinstance(value, (dict, list)):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(p for key, inner in items for p in places(inner, (*path, key)))]


@pytest.mark.parametrize("num_examples", [300, pytest.param(1_500, marks=pytest.mark.exhaustive)])
def test_mutated_requests_give_a_record_or_run(num_examples: int):
    @settings(max_examples=num_examples, deadline=None, derandomize=True)
    @given(st.sampled_from([*FIELDS]), st.data())
    def check(url: str, data: st.DataObject) -> None:
        content: Any = {"custom_id": "a", "method": "POST", "url": url, "body": FULL[url]}
        assert outcome(make_line(content)) == 200
        content = json.loads(json.dumps(content))
        for _ in range(data.draw(st.integers(1, 2))):
            *path, last = data.draw(st.sampled_from(places(content)[1:]))
            owner = content
            for key in path:
                owner = owner[key]
            if data.draw(st.booleans()) or isinstance(owner, list):
                owner[last] = data.draw(JSON)
            else:
                owner[data.draw(st.text(max_size=9))] = owner.pop(last)
        assert outcome(make_line(content)) in (200, 400, 404)

    check()


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.sampled_from([*FIELDS]), st.randoms(use_true_random=False))
def test_requests_with_damaged_bytes_give_a_record_or_run(url: str, rng: random.Random):
    content = {"custom_id": "a", "method": "POST", "url": url, "body": FULL[url]}
    text = bytearray(json.dumps(content).encode())
    for _ in range(rng.randint(1, 4)):
        i = rng.randrange(len(text))
        kind = rng.choice("set del add cut")
        if kind == "set":
            text[i] = rng.randrange(256)
        elif kind == "del":
            del text[i : i + rng.randint(1, 5)]
        else:
            text.insert(i, rng.choice(b'{}[]",:0-.e\\\n\x00\xff'))
    assert outcome(make_line(bytes(text).replace(b"\n", b" "))) in (200, 400, 404)


# Records.

ENTRY = {
    "type": "object",
    "properties": {
        "token": {"type": "string"},
        "logprob": {"type": "number", "maximum": 0},
        "bytes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}},
    },
    "required": ["token", "logprob", "bytes"],
}
ENTRIES = {"type": "array", "items": ENTRY}
CHAT_ENTRY = {
    **ENTRY,
    "properties": {**ENTRY["properties"], "top_logprobs": ENTRIES},  # type: ignore[dict-item]
    "required": [*ENTRY["required"], "top_logprobs"],
}
CHAT_CHOICE = {
    "message": {
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "content": {"type": "string"},
            "refusal": {"type": "null"},
        },
        "required": ["role", "content", "refusal"],
    },
    "logprobs": {
        "type": ["object", "null"],
        "properties": {
            "content": {"type": "array", "items": CHAT_ENTRY},
            "refusal": {"type": "null"},
        },
        "required": ["content", "refusal"],
    },
}
NUMBERS = {"type": "array", "items": {"type": "number"}}
TEXT_CHOICE = {
    "text": {"type": "string"},
    "logprobs": {
        "type": ["object", "null"],
        "properties": {
            "tokens": {"type": "array", "items": {"type": "string"}},
            "token_logprobs": NUMBERS,
            "top_logprobs": {
                "type": "array",
                "items": {"type": "object", "additionalProperties": {"type": "number"}},
            },
            "text_offset": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["tokens", "token_logprobs", "top_logprobs", "text_offset"],
    },
}
COUNT = {"type": "integer", "minimum": 0}
USAGE = {
    "type": "object",
    "properties": {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": {
            "type": "object",
            "properties": {"cached_tokens": COUNT},
            "required": ["cached_tokens"],
        },
    },
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
}
RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^batch_req_"},
        "custom_id": {"type": ["string", "null"]},
        "response": {
            "type": "object",
            "properties": {
                "status_code": {"type": "integer"},
                "request_id": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
                "body": {"type": "object"},
            },
            "required": ["status_code", "request_id", "body"],
        },
        "error": {
            "type": ["object", "null"],
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
            "required": ["code", "message"],
        },
    },
    "required": ["id", "custom_id", "response", "error"],
    "additionalProperties": False,
}
ERROR_BODY = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}


def body_schema(kind: str, prefix: str, choice: dict[str, Any]) -> dict[str, Any]:
    properties = {
        "index": COUNT,
        "finish_reason": {"enum": ["stop", "length"]},
        "stop_reason": {"type": ["string", "integer", "null"]},
        **choice,
    }
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": f"^{prefix}-"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": properties,
                    "required": [*properties],
                    "additionalProperties": False,
                },
            },
            "usage": USAGE,
        },
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "additionalProperties": False,
    }


BODIES = {
    "chat.completion": body_schema("chat.completion", "chatcmpl", CHAT_CHOICE),
    "text_completion": body_schema("text_completion", "cmpl", TEXT_CHOICE),
}


# jsonschema.validate would check the schema itself each time, which takes ten times as long.
IS_RECORD, IS_ERROR_BODY = (
    jsonschema.Draft202012Validator(RECORD),
    jsonschema.Draft202012Validator(ERROR_BODY),
)
IS_BODY = {kind: jsonschema.Draft202012Validator(schema) for kind, schema in BODIES.items()}


def check_record(record: dict[str, Any]) -> None:
    """A record has the form that OpenAI's reference and vLLM's protocol describe."""
    IS_RECORD.validate(record)
    response = record["response"]
    if record["error"] is None:
        assert response["status_code"] == 200
        IS_BODY[response["body"]["object"]].validate(response["body"])
        usage = response["body"]["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        indices = [choice["index"] for choice in response["body"]["choices"]]
        assert indices == list(range(len(indices)))
    else:
        assert response["status_code"] in (400, 404, 500)
        IS_ERROR_BODY.validate(response["body"])
        assert response["body"]["error"] | record["error"] == response["body"]["error"]


def row(rank: int, *pairs: tuple[int, float]) -> list[int]:
    """As the engine keeps them: the drawn token's rank; it and the best ones with logprobs."""
    flat = [rank]
    for token_id, logprob in pairs:
        flat += [token_id, int(np.float32(logprob).view(np.int32))]
    return flat


def make_output(rows: list[list[int]] | None = None, **completion: Any) -> RequestOutput:
    logprobs = None
    if rows is not None:
        texts = "abcdé\ud800"
        logprobs = PackedLogprobs(
            np.array(rows, np.int32), lambda before, token_ids: [texts[i] for i in token_ids]
        )
    kwargs = {"index": 0, "text": "bcé", "token_ids": [1, 2, 4], "finish_reason": "stop"}
    first = CompletionOutput(**{**kwargs, "logprobs": logprobs, **completion})  # type: ignore[arg-type]
    return RequestOutput("0", "a", [1, 2, 3, 4, 5], outputs=[first], num_cached_tokens=4)


def respond(url: str, outputs: list[RequestOutput], **body: Any) -> dict[str, Any]:
    request = make_request(url, **body)
    made = make_body(request, read_body(request, DEFAULTS, NAMES), outputs, 1234)
    record = json.loads(encode_record(success_record(request, request.custom_id, made)))
    check_record(record)
    assert record["response"]["body"] == made
    return made


def test_a_chats_body():
    body = respond(CHAT_URL, [make_output(stop_reason="x")], model="alias")
    assert body == {
        "id": "chatcmpl-" + "d" * 32,
        "object": "chat.completion",
        "created": 1234,
        "model": "alias",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "bcé", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "x",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_a_completions_body_has_the_choices_of_all_prompts_in_order():
    outputs = [make_output(), make_output(text="2", token_ids=[1], finish_reason="length")]
    outputs[0].outputs.append(CompletionOutput(1, "1", [], finish_reason="stop"))
    outputs[1].outputs.append(CompletionOutput(1, "3", [], finish_reason="stop", stop_reason=5))
    body = respond(COMPLETIONS_URL, outputs, prompt=["a", "b"], n=2)
    assert body["choices"] == [
        {"index": i, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": stop}
        for i, (text, reason, stop) in enumerate(
            [("bcé", "stop", None), ("1", "stop", None), ("2", "length", None), ("3", "stop", 5)]
        )
    ]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, 4)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}


def entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def test_log_probabilities_of_a_chat():
    """The best tokens are those asked for, whatever was drawn."""
    rows = [
        row(1, (1, -0.5), (1, -0.5), (2, -1)),  # drawn: the best
        row(2, (2, -1), (1, -0.5), (2, -1)),  # the second best
        row(3, (4, -2), (1, -0.5), (2, -1)),  # none of the best
        row(9, (0, -float("inf")), (1, -0.5), (2, float("nan"))),
    ]
    body = respond(CHAT_URL, [make_output(rows)], logprobs=True, top_logprobs=2)
    best = [entry("b", -0.5), entry("c", -1)]
    assert body["choices"][0]["logprobs"] == {
        "content": [
            {**entry("b", -0.5), "top_logprobs": best},
            {**entry("c", -1), "top_logprobs": best},
            {**entry("é", -2), "top_logprobs": best},
            {**entry("a", -9999), "top_logprobs": [best[0], entry("c", -9999)]},
        ],
        "refusal": None,
    }
    body = respond(CHAT_URL, [make_output([row(1, (1, -0.5))])], logprobs=True)
    assert body["choices"][0]["logprobs"]["content"] == [{**entry("b", -0.5), "top_logprobs": []}]


def test_log_probabilities_of_a_completion():
    rows = [row(1, (1, -0.5), (1, -0.5)), row(2, (4, -1), (1, -0.5)), row(2, (2, -1), (1, -0.5))]
    body = respond(COMPLETIONS_URL, [make_output(rows)], logprobs=1)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["b", "é", "c"],
        "token_logprobs": [-0.5, -1, -1],
        "top_logprobs": [{"b": -0.5}, {"é": -1, "b": -0.5}, {"c": -1, "b": -0.5}],
        "text_offset": [0, 1, 2],
    }


def test_the_role_is_that_of_the_message_that_goes_on():
    messages = [{"role": "critic", "content": "I"}]
    request = make_request(CHAT_URL, messages=messages, continue_final_message=True)
    generation = read_body(request, DEFAULTS, NAMES)
    (choice,) = make_body(request, generation, [make_output()], 0)["choices"]
    assert choice["message"]["role"] == "critic"


def test_an_error_is_in_the_response_and_beside_it():
    error = RequestError("bad", status=404, code="c", param="p")
    record = error_record(make_line(b""), None, error)
    check_record(record)
    assert record["response"]["body"]["error"] == {
        "message": "bad",
        "type": "invalid_request_error",
        "param": "p",
        "code": "c",
    }
    record = error_record(make_line(b""), "a", RequestError("bad", status=500))
    check_record(record)
    assert record["response"]["body"]["error"]["type"] == "server_error"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text() | st.just("\ud800\u2028\x85\r\n"))
def test_a_record_is_one_line_for_every_reader(text: str):
    data = encode_record(success_record(make_line(b""), text, {"text": text}))
    assert data.isascii()
    assert len(data.decode().splitlines()) == 1
    assert json.loads(data)["custom_id"] == text


# The output file.


def make_records() -> list[dict[str, Any]]:
    errors = {3: RequestError("bad"), 8: RequestError("worse")}
    records = []
    for number in (2, 3, 1, 8, 4):
        line = Line(number, f"{number:032x}", b"")
        custom_id = None if number == 8 else f"id {number} \ud800"
        if number in errors:
            records.append(error_record(line, custom_id, errors[number]))
        else:
            records.append(success_record(line, custom_id or "", {"text": "ä\n" * number}))
    return records


def write_all(path: Path) -> bytes:
    with closing(Writer(path)) as out:
        for record in make_records():
            out.write(record)
        assert (out.num_records, out.failed, out.done) == (0, set(), {})
    return path.read_bytes()


def test_records_are_added_and_known_again(tmp_path: Path):
    path = tmp_path / "out"
    data = write_all(path)
    assert [json.loads(line) for line in data.splitlines()] == make_records()
    with closing(Writer(path)) as out:
        assert (out.num_records, len(out.failed)) == (5, 1)
        assert out.done == {key_for(f"id {i} \ud800"): f"{i:032x}" for i in (1, 2, 3, 4)}
        assert out.done_lines == {f"{8:032x}": 1}
    assert path.read_bytes() == data


def test_each_record_is_on_disk_when_write_returns(tmp_path: Path):
    path = tmp_path / "out"
    with closing(Writer(path)) as out:
        for i, record in enumerate(make_records(), start=1):
            out.write(record)
            assert path.read_bytes().count(b"\n") == i


def test_a_record_that_is_cut_off_is_removed_wherever_it_is_cut(tmp_path: Path):
    path = tmp_path / "out"
    data = write_all(path)
    for end in range(len(data) + 1):
        path.write_bytes(data[:end])
        num_whole = data[:end].count(b"\n")
        with closing(Writer(path)) as out:
            assert out.num_records == len(out.done) + len(out.done_lines) == num_whole
            for record in make_records()[num_whole:]:
                out.write(record)
        assert path.read_bytes() == data


def test_zeros_that_a_power_cut_leaves_are_removed(tmp_path: Path):
    path = tmp_path / "out"
    data = write_all(path)
    for tail in (b"\0" * 500, data[:60] + b"\0" * 500, b'{"id"\0'):
        path.write_bytes(data + tail)
        Writer(path).close()
        assert path.read_bytes() == data


FOREIGN = {
    "text": b"my notes",
    "text-line": b"my notes\n",
    "json": b'{"id": 1}\n',
    "vllm": b'{"id": "vllm-1", "custom_id": "a", "response": {"request_id": "x"}, "error": null}\n',
    "requests": json.dumps(GOOD).encode() + b"\n",
    "requests-cut": json.dumps(GOOD).encode(),
    "list": b"[1]\n",
    "blank": b"\n",
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("with_records", [False, True])
def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path, name: str, with_records: bool):
    path = tmp_path / "out"
    data = (write_all(path) if with_records else b"") + FOREIGN[name]
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"line {6 if with_records else 1} of .* name another"):
        Writer(path)
    assert path.read_bytes() == data


def test_a_record_that_is_there_twice_is_noticed(tmp_path: Path):
    path = tmp_path / "out"
    data = write_all(path)
    path.write_bytes(data + data.splitlines(keepends=True)[2])
    with pytest.raises(ValueError, match=r"line 6 of .* or a duplicate"):
        Writer(path)


def test_a_file_has_one_writer_at_a_time(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(writer, "LOCK_SECONDS", 0.1)
    path = tmp_path / "out"
    with closing(Writer(path)), pytest.raises(ValueError, match="another job is writing"):
        Writer(path)
    Writer(path).close()
    with path.open("rb") as file, pytest.raises(ValueError, match="another job is writing"):
        fcntl.flock(file, fcntl.LOCK_EX)
        Writer(path)


def test_what_is_no_file_is_refused(tmp_path: Path):
    with pytest.raises(OSError, match="directory"):
        Writer(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        Writer(tmp_path / "no" / "out")
    with pytest.raises(ValueError, match="not a regular file"):
        Writer(Path("/dev/null"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        Writer(tmp_path / "pipe")


def test_a_full_disk_leaves_whole_records(tmp_path: Path, monkeypatch):
    path = tmp_path / "out"
    first, second, *_ = make_records()
    with closing(Writer(path)) as out:
        out.write(first)
        data = path.read_bytes()
        real, calls = os.write, count()

        def write(file: int, rest: memoryview) -> int:
            if next(calls) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(file, rest[:10])

        monkeypatch.setattr(writer.os, "write", write)
        with pytest.raises(OSError, match="No space"):
            out.write(second)
        assert path.read_bytes() == data
        out.write(second)  # ten bytes at a time, now that there is room
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [first, second]
