"""vLLM's command-line flags, of the arguments in ``vllm_arguments.json``."""

import json
import re
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
SUFFIXES |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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
