"""Structured outputs: schemas, expressions and grammars that explode, recurse or match nothing."""

# ruff: noqa: E501 (a case is a line)

from collections.abc import Callable
from typing import Any

from tests.data.hostile.case import EITHER, ERROR, RESULT, Row, body_cases


def schema(value: Any) -> dict[str, Any]:
    described = {"name": "x", "schema": value}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def structured(**values: Any) -> dict[str, Any]:
    return {"structured_outputs": values}


def chain(length: int, link: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A schema of so many definitions, each of which refers to the next."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return schema({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "null"}}})


def nested(depth: int, wrap: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        value = wrap(value)
    return schema(value)


def rules(length: int, rule: str, end: str = '"a"') -> dict[str, Any]:
    """A Lark grammar of so many rules; ``{i}`` and ``{j}`` in them are their number and the next."""
    lines = [rule.format(i=i, j=i + 1) for i in range(length)]
    name = rule.partition("{i}")[0]
    return structured(grammar="\n".join([f"start: {name}0", *lines, f"{name}{length}: {end}"]))


def an_object(value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": value}, "required": ["a"]}


def an_array(value: Any) -> dict[str, Any]:
    return {"type": "array", "items": value, "minItems": 1, "maxItems": 2}


LINKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "$ref": lambda ref: ref,
    "anyOf": lambda ref: {"anyOf": [{"type": "null"}, ref]},
    "oneOf": lambda ref: {"oneOf": [{"type": "string"}, ref]},
    "allOf": lambda ref: {"allOf": [{"minimum": 0}, ref]},
    "items": an_array,
    "prefixItems": lambda ref: {"type": "array", "prefixItems": [ref], "items": False},
    "properties": an_object,
    "additionalProperties": lambda ref: {"type": "object", "additionalProperties": ref},
    "patternProperties": lambda ref: {"type": "object", "patternProperties": {"^a$": ref}},
}
SCHEMAS: dict[str, Row] = {
    "loop of one": (EITHER, schema({"$ref": "#"})),
    "loop of a definition": (ERROR, schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})),
    "loop of two": (
        ERROR,
        schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    ),
    "loop through allOf": (EITHER, schema({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"})),
    "loop through anyOf": (EITHER, schema({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"})),
    "an endless object": (EITHER, schema({**an_object({"$ref": "#"})})),
    "an endless array": (EITHER, schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1})),
    "a reference to a file": (ERROR, schema({"$ref": "file:///etc/passwd"})),
    "a reference to a host": (ERROR, schema({"$ref": "http://127.0.0.1/x"})),
    "a reference to nothing": (ERROR, schema({"$ref": "#/$defs/x"})),
    "a reference to a number": (ERROR, schema({"$ref": "#/title", "title": 5})),
    "a reference of 1 MB": (ERROR, lambda: schema({"$ref": "#/" + "a/" * 500_000})),
    "branches 300 deep": (EITHER, nested(300, lambda v: {"anyOf": [v, {"const": 1}]})),
    "exponential allOf": (
        EITHER,
        schema({"$ref": "#/$defs/d0", "$defs": {
            **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)},
            "d30": {"type": "integer"}}}),
    ),
    "exponential anyOf": (
        EITHER,
        schema({"$ref": "#/$defs/d0", "$defs": {
            **{f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)},
            "d30": an_object({"type": "integer"})}}),
    ),
    "allOf of many anyOf": (
        EITHER,
        schema({"allOf": [{"anyOf": [an_object({"const": f"{i}{j}"}) for j in range(8)]} for i in range(12)]}),
    ),
    "an integer of multiples": (EITHER, schema({"type": "integer", "multipleOf": 1000003})),
    "multiples of a large prime": (EITHER, schema({"type": "integer", "multipleOf": 100000007})),
    "multiples of two primes": (
        EITHER, schema({"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967)]})
    ),
    "multiples of 10**30": (EITHER, schema({"type": "integer", "multipleOf": 10**30})),
    "multiples of 1e-300": (EITHER, schema({"type": "number", "multipleOf": 1e-300})),
    "multiples of 0": (ERROR, schema({"type": "number", "multipleOf": 0})),
    "multiples of many primes": (
        EITHER, schema({"allOf": [{"type": "integer", "multipleOf": p} for p in (997, 991, 983, 977)]})
    ),
    "an enum of a million": (ERROR, lambda: schema({"enum": [f"v{i}" for i in range(10**6)]})),
    "an enum of a million numbers": (EITHER, lambda: schema({"enum": [*range(10**6)]})),
    "an enum of 100,000": (EITHER, lambda: schema({"enum": [f"value {i}" for i in range(100_000)]})),
    "an enum of nothing": (ERROR, schema({"enum": []})),
    "an enum of a word of 5 MB": (EITHER, lambda: schema({"enum": ["word " * 1_000_000]})),
    "a const of 1 MB": (EITHER, lambda: schema({"const": "x" * 10**6})),
    "a const 900 deep": (EITHER, schema({"const": "@json:" + "[" * 900 + "]" * 900})),
    "an enum of surrogates": (EITHER, schema({"enum": ["\ud800"]})),
    "minLength of 10**9": (EITHER, schema({"type": "string", "minLength": 10**9})),
    "maxLength of 10**9": (EITHER, schema({"type": "string", "maxLength": 10**9})),
    "minLength of 10**6": (EITHER, schema({"type": "string", "minLength": 10**6})),
    "minLength over maxLength": (ERROR, schema({"type": "string", "minLength": 5, "maxLength": 4})),
    "minItems of 10**9": (EITHER, schema({"type": "array", "minItems": 10**9})),
    "minItems of 10**5": (EITHER, schema({"type": "array", "items": {"type": "null"}, "minItems": 10**5})),
    "maxItems of 10**6": (EITHER, schema({"type": "array", "items": {"type": "null"}, "maxItems": 10**6})),
    "minProperties of 10**6": (EITHER, schema({"type": "object", "minProperties": 10**6})),
    "minimum over maximum": (ERROR, schema({"type": "integer", "minimum": 5, "maximum": 4})),
    "minimum of 10**300": (EITHER, schema({"type": "integer", "minimum": 10**300})),
    "minimum of 1e999": (ERROR, schema({"type": "number", "minimum": "@json:1e999"})),
    "a thin range": (EITHER, schema({"type": "number", "exclusiveMinimum": 1, "maximum": 1.0000000000000002})),
    "a pattern that explodes": (EITHER, schema({"type": "string", "pattern": "^(a|a)*$"})),
    "a pattern with repetitions": (EITHER, schema({"type": "string", "pattern": "^(.{1,1000}){1,1000}$"})),
    "a pattern with look-ahead": (ERROR, schema({"type": "string", "pattern": "^(?=a)b$"})),
    "a pattern and lengths": (
        EITHER, schema({"type": "string", "pattern": "^(a|b)*$", "minLength": 5000, "maxLength": 5001})
    ),
    "patterns of many keys": (
        EITHER,
        schema({"type": "object", "patternProperties": {f"^.*{i}.*$": {"const": i} for i in range(60)}}),
    ),
    "patterns that overlap": (
        EITHER,
        schema({"type": "object", "patternProperties": {f"(a|b)*a(a|b){{{i}}}$": {} for i in range(15)}}),
    ),
    "a pattern of keys of 1 MB": (
        EITHER, lambda: schema({"type": "object", "patternProperties": {"a" * 10**6: {}}})
    ),
    "every format": (
        EITHER,
        schema({"type": "array", "prefixItems": [{"type": "string", "format": f} for f in (
            "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")]}),
    ),
    "an unknown format": (EITHER, schema({"type": "string", "format": "x" * 5000})),
    "100,000 properties": (
        EITHER, lambda: schema({"type": "object", "properties": {f"p{i}": {} for i in range(100_000)}})
    ),
    "3,000 properties": (
        EITHER,
        schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}),
    ),
    "a required key of 1 MB": (EITHER, lambda: schema({"type": "object", "required": ["k" * 10**6]})),
    "required keys that are none": (EITHER, schema({"type": "object", "required": [1, None]})),
    "keys of surrogates": (EITHER, schema({"type": "object", "properties": {"\ud800": {"const": 1}}})),
    "types of another kind": (ERROR, schema({"type": 5})),
    "properties of another kind": (ERROR, schema({"type": "object", "properties": [1]})),
    "items of another kind": (ERROR, schema({"type": "array", "items": "x"})),
    "false": (ERROR, schema(False)),
    "a list": (ERROR, schema([])),
    "nothing": (RESULT, schema({})),
    "not": (ERROR, schema({"not": {}})),
    "uniqueItems": (ERROR, schema({"type": "array", "uniqueItems": True})),
    "if and then": (ERROR, schema({"if": {"type": "string"}, "then": {"const": "a"}})),
    "llguidance's own options": (
        EITHER,
        schema({"type": "object", "x-guidance": {"whitespace_pattern": "(a|a)*", "lenient": True}}),
    ),
    "llguidance's options of other kinds": (ERROR, schema({"type": "object", "x-guidance": 5})),
    "unicode classes": (EITHER, schema({"type": "string", "pattern": r"^[\p{L}\p{Han}]{1,500}$"})),
    "both ways to ask": (ERROR, {**schema({"type": "object"}), **structured(json_object=True)}),
    "a kind of its own": (ERROR, {"response_format": {"type": "yaml"}}),
    "a format that is a string": (ERROR, {"response_format": "json"}),
    "no schema": (ERROR, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    "a schema that is a string": (ERROR, {"response_format": {"type": "json_schema", "json_schema": "x"}}),
    "arrays 400 deep": (EITHER, nested(400, an_array)),
}  # fmt: skip
for _name, _link in LINKS.items():
    SCHEMAS[f"1,000 definitions by {_name}"] = (EITHER, chain(1000, _link))
    SCHEMAS[f"5,000 definitions by {_name}"] = (EITHER, lambda link=_link: chain(5000, link))
GRAMMARS: dict[str, Row] = {
    "3,000 rules": (EITHER, rules(3000, 'r{i}: r{j} | "a"')),
    "3,000 terminals": (EITHER, rules(3000, 'T{i}: T{j} | "a"')),
    "3,000 rules in a row": (EITHER, rules(3000, 'r{i}: "a" r{j}')),
    "60,000 rules": (EITHER, lambda: rules(60_000, 'r{i}: r{j} | "a"')),
    "rules that double": (EITHER, rules(40, "r{i}: r{j} r{j}")),
    "terminals that double": (EITHER, rules(40, "T{i}: T{j} T{j}")),
    "rules that hold each other": (ERROR, structured(grammar="start: a\na: b\nb: a")),
    "terminals that hold each other": (ERROR, structured(grammar='start: A\nA: B "x"\nB: A "y"')),
    "left recursion": (EITHER, structured(grammar='start: start "a" | "a"')),
    "nothing but nothing": (EITHER, structured(grammar='start: start start | ""')),
    "ambiguous": (EITHER, structured(grammar='start: start start | start start start | "a"')),
    "ambiguous, of many tokens": (
        EITHER,
        {**structured(grammar="start: start start | start start start | /[a-z]/"), "max_tokens": 120, "n": 20},
    ),
    "an intersection": (
        EITHER,
        structured(grammar="start: A\nA: " + " & ".join(f"/(.|\\n)*{c}(.|\\n){{20}}{c}(.|\\n)*/" for c in "abcdefgh")),
    ),
    "10,000 parentheses": (EITHER, structured(grammar="start: " + "(" * 10_000 + '"a"' + ")" * 10_000)),
    "500 parentheses": (EITHER, structured(grammar="start: " + "(" * 500 + '"a"' + ")" * 500)),
    "repetitions": (EITHER, structured(grammar='start: (("a"~1..1000)~1..1000)~1..1000')),
    "a terminal's repetitions": (EITHER, structured(grammar="start: A\nA: /((a{1,1000}){1,1000}){1,1000}/")),
    "1 MB of alternatives": (EITHER, lambda: structured(grammar="start: " + ' | "abc"' * 125_000 + ' | "a"')),
    "1 MB of different alternatives": (
        EITHER, lambda: structured(grammar='start: "x"' + "".join(f' | "a{i}"' for i in range(90_000)))
    ),
    "1 MB of one rule's items": (EITHER, lambda: structured(grammar="start: " + '"a" "b" ' * 125_000)),
    "1 MB of comments": (EITHER, lambda: structured(grammar='start: "a"\n' + "// x\n" * 200_000)),
    "1 MB that is none": (ERROR, lambda: structured(grammar="%" * 10**6)),
    "100,000 unused rules": (
        EITHER, lambda: structured(grammar='start: "a"\n' + "".join(f'u{i}: "b"\n' for i in range(100_000)))
    ),
    "10 MB of a literal": (EITHER, lambda: structured(grammar=f'start: "{"a" * 10_000_000}"')),
    "empty": (ERROR, structured(grammar="")),
    "a NUL": (ERROR, structured(grammar='start: "a\0"\0')),
    "surrogates": (ERROR, structured(grammar='start: "\ud800"')),
    "an import": (ERROR, structured(grammar="%import /etc/passwd\nstart: x")),
    "a schema in it": (EITHER, structured(grammar='start: %json {"$ref": "#"}')),
    "an unknown start": (ERROR, structured(grammar='begin: "a"')),
    "options of its own": (EITHER, structured(grammar='%llguidance {"no_forcing": 5}\nstart: "a"')),
    "special tokens": (EITHER, structured(grammar="start: <|im_end|> <[2]> <[0-600]>")),
    "token ids beyond": (EITHER, structured(grammar="start: <[4000000000]> <[99999999999999999999]>")),
    "EBNF of 3,000 rules": (
        EITHER,
        structured(grammar="\n".join(["root ::= r0", *(f'r{i} ::= r{i + 1} | "a"' for i in range(3000)),
                                      'r3000 ::= "a"'])),
    ),
    "EBNF of 20,000 parentheses": (EITHER, structured(grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000)),
    "EBNF that is none": (ERROR, structured(grammar="root ::= " + "]" * 5000)),
    "a regex that explodes": (EITHER, structured(regex="(a|a)*(a|a)*(a|a)*c")),
    "a regex like that, nested": (EITHER, structured(regex="((((a*)*)*)*)*b")),
    "a regex of 100,000 repetitions": (EITHER, structured(regex="(a{1,100000}b{1,100000}){1,100000}")),
    "a regex of one repetition": (EITHER, structured(regex="a{100000}")),
    "a regex of 10**9 repetitions": (EITHER, structured(regex="[a-z]{1000000000}")),
    "a regex with 2**n states": (EITHER, structured(regex="(a|b)*a(a|b){40}")),
    "a regex with an intersection": (EITHER, structured(regex="(a|b)*a(a|b){15}&(b|c)*b(a|c){15}")),
    "a regex of unicode classes": (EITHER, structured(regex=r"(\p{L}\p{N}\w\d\s[^\x00-\x7f]){1,200}")),
    "a regex of 1 MB": (EITHER, lambda: structured(regex="(ab|cd)" * 150_000)),
    "a regex of 10,000 groups": (EITHER, structured(regex="(" * 10_000 + "a" + ")" * 10_000)),
    "a regex of 10,000 options": (EITHER, structured(regex="|".join(f"w{i}" for i in range(10_000)))),
    "a regex of look-ahead": (ERROR, structured(regex="(?=a)a")),
    "a regex of back-references": (ERROR, structured(regex=r"(a)\1")),
    "a regex that is none": (ERROR, structured(regex="(((")),
    "a regex that matches nothing": (ERROR, structured(regex=r"[^\s\S]")),
    "an empty regex": (EITHER, structured(regex="")),
    "a regex of surrogates": (ERROR, structured(regex="\udfff")),
    "no choices": (ERROR, structured(choice=[])),
    "an empty choice": (EITHER, structured(choice=[""])),
    "a million choices": (ERROR, lambda: structured(choice=[f"c{i}" for i in range(10**6)])),
    "100,000 choices": (EITHER, lambda: structured(choice=[f"choice {i}" for i in range(100_000)])),
    "a choice of 5 MB": (EITHER, lambda: structured(choice=["ab" * 2_500_000])),
    "choices of surrogates": (ERROR, structured(choice=["\ud800"])),
    "choices that are numbers": (ERROR, structured(choice=[1, 2])),
    "a choice that is a string": (ERROR, structured(choice="abc")),
    "choices of quotes": (RESULT, structured(choice=['"\\', "\n\t", "\0", "'''", "/*"])),
    "two kinds": (ERROR, structured(regex="a", choice=["a"])),
    "no kind": (ERROR, structured()),
    "an unknown kind": (ERROR, structured(backend="outlines")),
    "a structural tag": (ERROR, structured(structural_tag="{}")),
    "a schema that is a string": (EITHER, structured(json='{"type": "object"}')),
    "a schema that is no JSON": (ERROR, structured(json="{")),
    "a schema that is 5,000 deep": (ERROR, structured(json='{"items":' * 5000 + "{}" + "}" * 5000)),
    "a schema that is a number": (ERROR, structured(json="5")),
    "a list": (ERROR, {"structured_outputs": ["regex"]}),
}  # fmt: skip
HEAVY_SCHEMAS = (
    "branches 300 deep",
    "a const 900 deep",
    "allOf of many anyOf",
    "an integer of multiples",
    "multiples of a large prime",
    "multiples of two primes",
    "an enum of a million",
    "an enum of a million numbers",
    "an enum of 100,000",
    "an enum of a word of 5 MB",
    "a pattern of keys of 1 MB",
    "100,000 properties",
    "3,000 properties",
)
HEAVY_GRAMMARS = (
    "ambiguous, of many tokens",
    "an intersection",
    "60,000 rules",
    "terminals that double",
    "1 MB of alternatives",
    "1 MB of different alternatives",
    "1 MB of one rule's items",
    "1 MB of comments",
    "100,000 unused rules",
    "10 MB of a literal",
    "EBNF of 3,000 rules",
    "a regex of 1 MB",
    "a million choices",
    "100,000 choices",
    "a choice of 5 MB",
)
CASES = [
    *body_cases("schema", SCHEMAS, heavy=HEAVY_SCHEMAS),
    *body_cases("grammar", GRAMMARS, heavy=HEAVY_GRAMMARS),
]
