"""The recorded table of vLLM's arguments is consistent; that it is complete, recording checks."""

import dataclasses
import inspect
import json
from typing import Any

from nanovllm import LLM
from nanovllm.config import Config
from tests.vllm_answers import record_arguments

TABLE = json.loads(record_arguments.TABLE.read_text())
TABLES = ("LLM", "generate", "chat", "SamplingParams")
ENTRIES = [(table, name, entry) for table in TABLES for name, entry in TABLE[table].items()]
KEYS = {
    "honoured": {"as", "values"},
    "hint": set(),
    "neutral": {"neutral", "why"},
}


def test_each_entry_has_what_its_class_needs() -> None:
    for table, name, entry in ENTRIES:
        extra = entry.keys() - {"class", "default", "former", "cli"}
        assert extra <= KEYS[entry["class"]], (table, name)
        if entry["class"] == "neutral":
            assert isinstance(entry["neutral"], list), (table, name)
            assert entry["why"], (table, name)


def test_honoured_arguments_of_llm_are_its_own_or_fields_of_config() -> None:
    """An argument that is honoured under a name that nothing has could never be given."""
    fields = {field.name for field in dataclasses.fields(Config)}
    fields |= inspect.signature(LLM.__init__).parameters.keys()
    for name, entry in TABLE["LLM"].items():
        if entry["class"] == "honoured":
            assert entry.get("as", name) in fields, name


def test_the_file_is_what_the_classification_says() -> None:
    """An entry was edited by hand in the JSON, or the classification changed without recording."""
    for table, name, entry in ENTRIES:
        if not entry.get("former"):
            expected: dict[str, Any] = record_arguments.classify(table, name)
            assert entry["class"] == expected["class"], (table, name)
            assert entry.get("why") == expected.get("why"), (table, name)
            assert entry.get("as") == expected.get("as"), (table, name)
