"""Translates vLLM's arguments to nanovllm's, and adds vLLM's flags to command lines, with the
recorded table ``vllm_arguments.json``. Imports only the standard library.

The table puts each argument into one of three classes. "honoured": supported, perhaps under another
name here. "hint": accepted and ignored, because it does not affect results. "neutral": not
supported, and accepted only at values that have no effect.
"""

import json
import logging
import re
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

logger = logging.getLogger("nanovllm.vllm_arguments")

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
SUFFIXES |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@cache
def load_table() -> dict[str, Any]:
    """Loads the recorded table of vLLM's arguments: function name -> argument name -> entry. The
    script ``tests/vllm_answers/record_arguments.py`` describes the entries. "vllm" is the version
    of vLLM whose API this package implements."""
    return json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def translate(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Translates vLLM's arguments to nanovllm's. Arguments that vLLM does not have are kept.

    Args:
        function: "LLM", "generate" or "chat".
        given: the keyword arguments; None always means the default.

    Raises:
        ValueError: an unsupported argument has a value other than its neutral ones.
        TypeError: an argument is given under both names.
    """
    entries = load_table()[function]
    translated = {name: value for name, value in given.items() if name not in entries}
    for name, value in given.items():
        entry = entries.get(name)
        if entry is None or value is None:
            continue
        if entry["class"] == "honoured":
            ours = entry.get("as", name)
            if ours in translated:
                raise TypeError(f"{name} and {ours} are the same argument: pass only one of them")
            values = entry.get("values", {})
            translated[ours] = values.get(value, value) if isinstance(value, str) else value
        elif _equals(value, entry["default"]):
            continue
        elif entry["class"] == "hint":
            _log_hint(name)
        elif not any(_equals(value, neutral) for neutral in entry["neutral"]):
            raise ValueError(f"vLLM's `{name}` is not supported here: {entry['why']}")
    return translated


def _equals(value: Any, recorded: Any) -> bool:
    """Returns whether an argument equals a value of the table, where sets and tuples are lists."""
    if isinstance(value, (list, tuple, set, frozenset)):
        # A list with None for each prompt is the same as an empty list.
        value = [item for item in value if item is not None]
    return bool(value == recorded)


@cache  # once for each name
def _log_hint(name: str) -> None:
    logger.info("vLLM's `%s` has no effect here", name)


def with_dashes(arg: str) -> str:
    """Returns ``--max-model-len`` for ``--max_model_len``, which vLLM takes too. Keeps the value
    after an equals sign, and arguments that are not options."""
    name, equals, value = arg.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name) + equals + value


def add_flags(parser: ArgumentParser, name: str, entry: Mapping[str, Any], **options: Any) -> None:
    """Adds the command-line flags of one argument to a parser. A bool with a ``--no-`` flag gets
    both forms.

    Args:
        entry: the argument's entry in the table. Without flags in the entry, the flag is the name.
        options: further arguments of ``parser.add_argument``.
    """
    kind = "bool" if isinstance(entry["default"], bool) else "json"
    cli = entry.get("cli", {"flags": [f"--{name.replace('_', '-')}"], "type": kind})
    options = {"dest": name, **cli, **options}
    flags, kind = options.pop("flags"), options.pop("type")
    if kind == "bool":
        positive = [flag for flag in flags if not flag.startswith("--no-")]
        action = "store_true" if positive == flags else BooleanOptionalAction
        parser.add_argument(*positive, action=action, **options)
        return
    optional = entry["default"] is None or None in options.get("choices", ())
    options["type"] = partial(_parse_optional, PARSERS[kind], optional)
    parser.add_argument(*flags, **options)


def parse_int(text: str) -> int:
    """Parses an int, which may have a suffix: 1k is 1000, 25.6k is 25600, 1K is 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT])", text)
    try:
        if match is None:
            return int(text)
        number, suffix = match[1] or match[3], match[2] or match[4]
        return int(Decimal(number) * SUFFIXES[suffix])
    except ValueError:
        raise ArgumentTypeError(f"not an int: {text!r}") from None


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _parse_optional(parse: Callable[[str], Any], optional: bool, text: str) -> Any:
    return None if optional and text in ("", "None") else parse(text)


PARSERS: dict[str, Callable[[str], Any]] = {
    "int": parse_int,
    "float": float,
    "str": str,
    "json": _parse_json,
}
