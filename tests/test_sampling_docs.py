"""docs/sampling.md has every field of SamplingParams, with its default."""

import re
from dataclasses import fields
from enum import Enum
from pathlib import Path

from nanovllm import SamplingParams, StructuredOutputsParams

PAGE = Path(__file__).parents[1] / "docs" / "sampling.md"


def test_each_field_has_a_row_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    described = dict(rows)
    assert len(described) == len(rows), "a field has two rows"
    assert described == {
        field.name: field.default.name if isinstance(field.default, Enum) else repr(field.default)
        for field in fields(SamplingParams)
    }


def test_each_kind_of_structured_output_has_a_row():
    """The fields of StructuredOutputsParams that are of vLLM alone are in docs/vllm.md."""
    page = PAGE.read_text("utf-8").partition("## Structured outputs")[2].partition("\n## ")[0]
    described = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert described == {"json", "json_object", "regex", "choice", "grammar"}
    assert described <= {field.name for field in fields(StructuredOutputsParams)}
