"""The constraints of structured outputs, as a user states them. ``text/structured.py`` applies
them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.validation import boolean, optional, strings

MAX_CHOICES = 100_000
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass
class StructuredOutputsParams:
    """The constraint that the text of a completion must satisfy. Exactly one of the first five
    attributes must be set.

    Attributes:
        json: a JSON schema as a dict or a string, or a pydantic model class.
        regex: a regular expression that matches the whole text. ``\\d`` is a digit from 0 to 9, and
            ``\\w`` and ``\\s`` are those of Unicode.
        choice: a list of allowed texts.
        grammar: a context-free grammar in Lark's syntax, or in EBNF with a ``root`` rule.
        json_object: True for any JSON object.
        disable_any_whitespace, disable_additional_properties: accepted and ignored. JSON always
            has at most one space between symbols, and only the keys that the schema allows.
        whitespace_pattern, structural_tag: exist for vLLM; not supported.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: none or several of the first five are set, or an unsupported field is set.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        for name in ("whitespace_pattern", "structural_tag"):
            if getattr(self, name) is not None:
                raise ValueError(f"vLLM's structured_outputs.{name} is not supported here")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}, "
                f"got {', '.join(given) or 'none'}"
            )
        is_schema = isinstance(self.json, (str, Mapping, type(None)))
        if not is_schema and not hasattr(self.json, "model_json_schema"):
            raise TypeError(
                f"json must be a schema (dict or string) or a pydantic model class, "
                f"got {self.json!r:.80}"
            )
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise TypeError(f"{name} must be a string, got {getattr(self, name)!r:.80}")
        self.choice = optional(strings(MAX_CHOICES, may_be_empty=True))("choice", self.choice)
        if self.choice == []:
            raise ValueError("choice needs at least one text to choose")
        self.json_object = optional(boolean)("json_object", self.json_object)
