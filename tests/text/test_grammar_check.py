"""What a grammar's compilation does to its process, it does to one that nobody misses."""

import json
from typing import Any

import pytest

from nanovllm.text import grammar_check
from nanovllm.text.grammar_check import GrammarChecker


def chain(length: int) -> str:
    """A grammar of so many rules, each of which refers to the next."""
    rules = [f'r{i}: r{i + 1} | "a"' for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "b"'])


def nested(length: int, reference: Any) -> str:
    """A JSON schema of so many definitions, each of which refers to the next."""
    definitions = {f"d{i}": reference({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "null"}}}
    return f"start: %json {json.dumps(schema)}"


CRASHES = {
    "rules": chain(3000),
    "ref": nested(10_000, lambda ref: ref),
    "anyOf": nested(5000, lambda ref: {"anyOf": [{"type": "null"}, ref]}),
    "allOf": nested(5000, lambda ref: {"allOf": [{"minimum": 0}, ref]}),
    "items": nested(3000, lambda ref: {"type": "array", "items": ref}),
    "properties": nested(1500, lambda ref: {"type": "object", "properties": {"a": ref}}),
}


@pytest.fixture(scope="module")
def checker() -> GrammarChecker:
    return GrammarChecker()


@pytest.mark.parametrize("name", CRASHES)
def test_a_grammar_that_ends_a_process_is_refused(checker, name):
    with pytest.raises(ValueError, match="nested too deeply, or too large"):
        checker.check(CRASHES[name])
    checker.check(chain(200))


def test_a_compilation_without_end_is_given_up(monkeypatch):
    slow = {"type": "integer", "multipleOf": 9_999_991}
    monkeypatch.setattr(grammar_check, "CHECK_SECONDS", 0.5)
    checker = GrammarChecker()
    with pytest.raises(ValueError, match=r"compiling it takes over 0.5 s"):
        checker.check(f"start: %json {json.dumps(slow)}")
    checker.check(chain(200))


def test_wrong_grammars_are_for_others_to_refuse(checker):
    checker.check("start: nowhere" + ' "a"' * 1000)
    checker.check("start: %json {" + " " * 3000)
    checker.check("\0" * 3000)
