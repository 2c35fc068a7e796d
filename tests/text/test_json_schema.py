"""Objects have no undeclared keys: tables of schemas, and compositions at random, whose texts
jsonschema judges with ``unevaluatedProperties``."""

import copy
import json
from collections.abc import Callable
from itertools import combinations, permutations
from string import ascii_lowercase
from time import perf_counter, process_time
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams
from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.text.json_schema import close_objects
from nanovllm.text.structured import Grammar, GrammarCompiler

EOS = 0
CHARACTERS = '{}[]":, 0123' + ascii_lowercase
INT = {"type": "integer"}


@pytest.fixture(scope="module")
def start() -> Callable[[Any], Grammar]:
    """Compiles a schema for a vocabulary of single characters."""
    vocab = {"<eos>": EOS} | {c.replace(" ", "Ġ"): i for i, c in enumerate(CHARACTERS, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    compiler = GrammarCompiler(wrapped, len(vocab), {EOS})
    return lambda schema: compiler.start(compiler.find(StructuredOutputsParams(json=schema)))[0]


def accepts(grammar: Grammar, value: Any) -> bool:
    """Whether the value can be written, its keys in the order that they have."""
    grammar = copy.copy(grammar)
    grammar._matcher = grammar._matcher.deep_copy()
    ids = [1 + CHARACTERS.index(character) for character in json.dumps(value)]
    return all(grammar.accept(token_id) for token_id in [*ids, EOS])


def obj(*names: str, required: tuple[str, ...] = (), **keywords: Any) -> dict[str, Any]:
    properties = dict.fromkeys(names, INT)
    return {"type": "object", "properties": properties, "required": [*required], **keywords}


def has(name: str, schema: Any, **keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}, "required": [name], **keywords}


NODE = has("a", INT)
NODE["properties"]["x"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
TREE = {"$defs": {"node": NODE}}
TAGGED = [has("k", {"const": tag}) for tag in ("a", "b")]
TAGGED[1]["properties"]["a"] = INT

# A schema, values that match it, and values that do not because of a key that is not declared.
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "plain": (obj("a", "b"), [{}, {"a": 1}, {"a": 1, "b": 2}], [{"c": 1}, {"a": 1, "c": 1}]),
    "empty": (obj(), [{}], [{"a": 1}]),
    "nested": (has("a", obj("b")), [{"a": {"b": 1}}], [{"a": {"c": 1}}, {"a": {}, "b": 1}]),
    "items": (
        {"type": "array", "items": obj("a"), "minItems": 1},
        [[{"a": 1}, {}]],
        [[{"b": 1}]],
    ),
    "prefix-items": (
        {"type": "array", "prefixItems": [obj("a")], "items": obj("b")},
        [[{"a": 1}, {"b": 1}]],
        [[{"b": 1}], [{"a": 1}, {"a": 1}]],
    ),
    "old-items": (
        {
            "$schema": "http://json-schema.org/draft-07/schema",
            "type": "array",
            "items": [obj("a")],
            "additionalItems": obj("b"),
        },
        [[{"a": 1}, {"b": 1}]],
        [[{"b": 1}], [{"a": 1}, {"a": 1}]],
    ),
    "no-properties": ({"type": "object"}, [{"a": {"b": [1]}}], []),
    "additional-true": (obj("a", additionalProperties=True), [{"a": 1, "b": {}}], []),
    "additional-schema": (
        obj("a", additionalProperties=obj("b")),
        [{"a": 1, "c": {"b": 1}}],
        [{"c": {"d": 1}}],
    ),
    "patterns": (
        {"type": "object", "patternProperties": {"^k": obj("a")}, "properties": {"b": INT}},
        [{"b": 1, "k1": {"a": 1}}],
        [{"l": 1}, {"k1": {"b": 1}}],
    ),
    "required": (
        obj("a", required=("a", "b")),
        [{"a": 1, "b": [2]}],
        [{"a": 1, "b": 1, "c": 1}],
    ),
    "property-named-properties": (
        has("properties", {"type": "object"}),
        [{"properties": {"a": {"b": 1}}}],
        [{"properties": {}, "a": 1}],
    ),
    "const": ({"const": {"properties": {"a": 1}}}, [{"properties": {"a": 1}}], []),
    "enum": ({"enum": [{"properties": {"a": {}}}, 1]}, [{"properties": {"a": {}}}, 1], []),
    "data": (
        obj("a", default={"properties": {}}, examples=[{"properties": {}}]),
        [{"a": 1}],
        [{"b": 1}],
    ),
    "all-of": (
        {"allOf": [obj("a", required=("a",)), obj("b", required=("b",))]},
        [{"a": 1, "b": 2}],
        [{"a": 1, "b": 2, "c": 3}],
    ),
    "all-of-one-reference": (
        {"allOf": [{"$ref": "#/$defs/node"}], "default": None, **TREE},
        [{"a": 1, "x": {"a": 2}}],
        [{"a": 1, "b": 1}, {"a": 1, "x": {"a": 2, "b": 1}}],
    ),
    "all-of-open": ({"allOf": [obj("a"), {"additionalProperties": True}]}, [{"b": 1}], []),
    "any-of": (
        {"anyOf": [obj("a", required=("a",)), obj("b", required=("b",)), {"type": "null"}]},
        [{"a": 1}, {"b": 1}, None],
        [{"a": 1, "c": 1}, {}],
    ),
    "any-of-beside-properties": (
        {**obj("c"), "anyOf": [obj("a", required=("a",)), obj("b", required=("b",))]},
        [{"c": 1, "a": 1}, {"b": 1}],
        [{"c": 1}, {"a": 1, "k": 1}],
    ),
    "any-of-required": (
        {**obj("a", "b"), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"a": 1, "b": 1}],
        [{}, {"a": 1, "c": 1}],
    ),
    "any-of-with-a-free-object": (
        {"anyOf": [obj("a", required=("a",)), {"type": "object"}]},
        [{"a": 1}, {"b": 1}],
        [],
    ),
    "two-any-ofs": (
        {
            "allOf": [
                {"anyOf": [obj("a", required=("a",)), obj("b", required=("b",))]},
                {"anyOf": [obj("c", required=("c",)), obj("b", required=("b",))]},
            ]
        },
        [{"a": 1, "c": 1}, {"a": 1, "b": 1}, {"b": 1}],
        [{"a": 1}, {"a": 1, "c": 1, "b": 1}],
    ),
    "one-of": (
        {"oneOf": TAGGED},
        [{"k": "a"}, {"k": "b", "a": 1}],
        [{"k": "a", "a": 1}, {"k": "b", "b": 1}],
    ),
    "reference-beside-properties": (
        {"$ref": "#/$defs/n", "properties": {"b": INT}, "$defs": {"n": obj("a")}},
        [{"a": 1, "b": 2}, {"b": 2}],
        [{"a": 1, "c": 1}],
    ),
    "recursion": (
        {"$ref": "#/$defs/node", **TREE},
        [{"a": 1, "x": {"a": 2, "x": None}}],
        [{"a": 1, "b": 1}, {"a": 1, "x": {"a": 2, "b": 1}}],
    ),
    "recursion-by-the-root": (
        {"properties": {"a": INT, "x": {"$ref": "#"}}, "type": "object"},
        [{"a": 1, "x": {"a": 2, "x": {}}}],
        [{"b": 1}, {"x": {"b": 2}}],
    ),
    "reference-to-a-property": (
        {"type": "object", "properties": {"a": obj("b"), "c": {"$ref": "#/properties/a"}}},
        [{"a": {"b": 1}, "c": {"b": 1}}],
        [{"c": {"c": 1}}],
    ),
    "definitions": (
        has("a", {"$ref": "#/definitions/x~1y%20z"}, definitions={"x/y z": obj("b")}),
        [{"a": {"b": 1}}],
        [{"a": {"c": 1}}],
    ),
    "one-reference-closed-and-not": (
        {
            "type": "object",
            "properties": {
                "a": {"$ref": "#/$defs/n"},
                "b": {"allOf": [{"$ref": "#/$defs/n"}, obj("c")]},
            },
            "$defs": {"n": obj("a")},
        },
        [{"a": {"a": 1}, "b": {"a": 1, "c": 1}}],
        [{"a": {"c": 1}}, {"b": {"b": 1}}],
    ),
    "property-with-two-schemas": (
        {"allOf": [has("a", obj("b", required=("b",))), has("a", obj("c", required=("c",)))]},
        [{"a": {"b": 1, "c": 1}}],
        [{"a": {"b": 1, "c": 1, "d": 1}}, {"a": {"b": 1, "c": 1}, "d": 1}],
    ),
    "property-of-two-branches": (
        {"anyOf": [has("a", obj("b", required=("b",))), has("a", obj("c", required=("c",)))]},
        [{"a": {"b": 1}}, {"a": {"c": 1}}],
        [{"a": {"b": 1, "d": 1}}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_undeclared_keys_are_not_allowed(start, name):
    """Guards objects that gain keys of which their schema says nothing."""
    schema, allowed, refused = CASES[name]
    before = copy.deepcopy(schema)
    grammar = start(schema)
    assert schema == before
    for value in allowed:
        jsonschema.validate(value, schema)
        assert accepts(grammar, value), value
    for value in refused:
        assert not accepts(grammar, value), value


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("#/$defs/missing", "'/.defs/missing' does not exist"),
        ("#/allOf/7", "'/allOf/7' does not exist"),
        ("#anchor", "'#anchor' is not supported"),
        ("http://example.com/schema", "is not supported: use"),
    ],
)
def test_a_reference_that_cannot_be_followed_is_refused(start, reference, message):
    with pytest.raises(ValueError, match=message):
        start(has("a", {"$ref": reference}, allOf=[{}]))


def test_a_circle_of_references_compiles_where_another_branch_ends_it(start):
    """jsonschema would recurse without end; the circle adds no values to those of the branch."""
    node = {**obj("b"), "anyOf": [{"$ref": "#/$defs/node"}, obj("a", required=("a",))]}
    grammar = start({"$ref": "#/$defs/node", "properties": {"c": INT}, "$defs": {"node": node}})
    for value in ({"a": 1}, {"b": 1, "a": 1}, {"b": 1, "a": 1, "c": 1}):
        assert accepts(grammar, value), value
    for value in ({}, {"b": 1}, {"a": 1, "d": 1}):
        assert not accepts(grammar, value), value


def test_branches_of_one_of_must_exclude_each_other_without_being_closed(start):
    """The second object matches both, for whoever reads the schema as it is."""
    schema = {"oneOf": [obj("a", "b", required=("a", "b")), obj("b", required=("b",))]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"a": 1, "b": 1}, schema)
    with pytest.raises(ValueError, match="oneOf constraints are not supported"):
        start(schema)


NAMES = ("a", "b", "c")
SOME = st.lists(st.sampled_from(NAMES), unique=True)
OBJECTS = SOME.flatmap(
    lambda names: (
        st.lists(st.sampled_from(names), unique=True).map(
            lambda required: obj(*names, required=tuple(required))
        )
        if names
        else st.just(obj())
    )
)
DEFINED = {name: obj(name, required=(name,)) for name in NAMES}
REFERENCES = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in NAMES])


def compose(inner: st.SearchStrategy) -> st.SearchStrategy:
    """Schemas of one object, put together from others."""
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        several.map(lambda schemas: {"allOf": schemas}),
        several.map(lambda schemas: {"anyOf": schemas}),
        st.tuples(OBJECTS, several).map(lambda pair: {**pair[0], "allOf": pair[1]}),
        st.tuples(OBJECTS, several).map(lambda pair: {**pair[0], "anyOf": pair[1]}),
        st.tuples(several, several).map(lambda pair: {"allOf": pair[0], "anyOf": pair[1]}),
        st.tuples(OBJECTS, REFERENCES).map(lambda pair: {**pair[0], **pair[1]}),
        st.tuples(OBJECTS, st.sampled_from([True, INT])).map(
            lambda pair: {**pair[0], "additionalProperties": pair[1]}
        ),
    )


VALUES = [
    dict.fromkeys(names, 1)
    for count in range(len(NAMES) + 2)
    for names in combinations((*NAMES, "d"), count)
]


@settings(max_examples=150, deadline=None, database=None)
@given(schema=st.recursive(st.one_of(OBJECTS, REFERENCES), compose, max_leaves=6))
def test_compositions_allow_what_unevaluated_properties_allows(start, schema):
    """Every object over four keys. One with the keys of several branches of ``anyOf`` may be left
    out, though it matches each."""
    whole = {**schema, "$defs": DEFINED}
    oracle = jsonschema.Draft202012Validator({**whole, "unevaluatedProperties": False})
    expected = [value for value in VALUES if oracle.is_valid(value)]
    try:
        grammar = start(whole)
    except ValueError as error:
        assert "nsatisfiable" in str(error), error
        assert not expected
        return
    found = [
        value
        for value in VALUES
        if any(accepts(grammar, dict(pairs)) for pairs in permutations(value.items()))
    ]
    for value in found:
        assert value in expected
    if "anyOf" not in json.dumps(schema):
        assert found == expected


class Address(BaseModel):
    street: str = Field(max_length=3)
    number: int = Field(ge=0, lt=100)


class Person(BaseModel):
    name: str = Field(max_length=3)
    kind: Literal["a", "b"]
    home: Address
    others: list[Address] = Field(max_length=1)


class StrictAddress(Address):
    model_config = ConfigDict(extra="forbid")


class StrictPerson(Person):
    model_config = ConfigDict(extra="forbid")
    home: StrictAddress
    others: list[StrictAddress] = Field(max_length=1)


def test_completions_of_a_plain_class_are_valid_where_extra_keys_are_forbidden(model_path):
    """Guards keys that a model makes up: it was 20 of 20 completions."""
    params = SamplingParams(
        temperature=1.5,
        max_tokens=250,
        structured_outputs=StructuredOutputsParams(json=Person.model_json_schema()),
    )
    with LLM(model_path, device="cpu", max_model_len=300, seed=3) as llm:
        outputs = llm.generate(["A person: "] * 20, params)
    texts = [output.outputs[0].text for output in outputs]
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop"] * 20
    for text in texts:
        StrictPerson.model_validate_json(text)
    assert len(set(texts)) > 10


def test_definitions_that_all_refer_to_each_other_are_refused_in_time():
    """Guards a minute on the engine's thread for a schema of seven definitions."""
    names = [f"D{i}" for i in range(8)]
    definitions = {
        name: {
            "type": "object",
            "properties": {name: {"type": "string"}},
            "anyOf": [{"$ref": f"#/$defs/{other}"} for other in names if other != name],
        }
        for name in names
    }
    start = perf_counter()
    with pytest.raises(ValueError, match="too many paths"):
        close_objects({"$ref": "#/$defs/D0", "$defs": definitions})
    assert perf_counter() - start < 10


BRANCHES = {"anyOf": [{"properties": {f"a{i}": {}}} for i in range(5000)]}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {}, "description": "x" * 500_000},
        {"properties": {}, "enum": [*range(50_000)]},
        {"properties": {"x" * 500_000: True}},
        {"properties": {f"b{i}": True for i in range(50_000)}},
    ],
    ids=["description", "enum", "name", "names"],
)
def test_branches_beside_long_contents_are_refused_in_time(schema):
    """Guards gigabytes: each branch has a copy of the contents beside it."""
    start = process_time()
    with pytest.raises(ValueError, match="too many paths"):
        close_objects({**schema, **BRANCHES})
    assert process_time() - start < 10


@pytest.mark.parametrize("schema", [{"properties": None}, {"properties": {}, "required": True}])
def test_what_is_no_schema_is_left_for_the_grammar_compiler_to_refuse(schema):
    assert close_objects(schema)["properties"] == schema["properties"]
