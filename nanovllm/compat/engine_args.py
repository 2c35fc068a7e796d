"""vLLM's ``EngineArgs`` and its command-line flags."""

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import field, fields, make_dataclass
from decimal import Decimal
from functools import partial
from json import JSONDecodeError, loads
from typing import Any

from nanovllm.compat.alias import load_table

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
SUFFIXES |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class FlexibleArgumentParser(ArgumentParser):
    """An ArgumentParser that accepts ``--max_tokens`` for ``--max-tokens``."""

    def __init__(self, *args: Any, add_json_tip: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        given = sys.argv[1:] if args is None else args
        is_own = "--config" in self._option_string_actions
        if not is_own and any(arg.partition("=")[0] == "--config" for arg in given):
            self.error("--config is not supported: give the file's options on the command line")
        return super().parse_known_args([self._use_dashes(arg) for arg in given], namespace)

    def _use_dashes(self, arg: str) -> str:
        name, equals, value = arg.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return arg
        return name.replace("_", "-") + equals + value


def _engine_arguments() -> dict[str, dict[str, Any]]:
    """Returns the entries of vLLM's current engine arguments, without those of earlier versions."""
    return {name: entry for name, entry in load_table()["LLM"].items() if "former" not in entry}


def _add_flags(
    parser: ArgumentParser, flags: list[str], type: str, choices: Any = None, **options: Any
) -> None:
    """Adds the flags of one argument. A bool with a ``--no-`` flag gets both forms."""
    if type == "bool":
        positive = [flag for flag in flags if not flag.startswith("--no-")]
        action = "store_true" if positive == flags else BooleanOptionalAction
        parser.add_argument(*positive, action=action, **options)
        return
    optional = options["default"] is None or None in (choices or ())
    options["type"] = partial(_parse_optional, PARSERS[type], optional)
    parser.add_argument(*flags, choices=choices, **options)


def _parse_optional(parse: Callable[[str], Any], optional: bool, text: str) -> Any:
    return None if optional and text in ("", "None") else parse(text)


def _parse_int(text: str) -> int:
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
        return loads(text)
    except JSONDecodeError:
        return text


PARSERS: dict[str, Callable[[str], Any]] = {
    "int": _parse_int,
    "float": float,
    "str": str,
    "json": _parse_json,
}

_Fields = make_dataclass(
    "_Fields",
    [
        (name, Any, field(default_factory=partial(deepcopy, entry["default"])))
        for name, entry in _engine_arguments().items()
    ],
)


class EngineArgs(_Fields):  # type: ignore[valid-type, misc]
    """vLLM's engine arguments with vLLM's defaults. Use it as ``LLM(**vars(args))``."""

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        """Adds vLLM's flags, and returns the parser."""
        for name, entry in _engine_arguments().items():
            if "cli" in entry:
                default = deepcopy(entry["default"])
                _add_flags(parser, dest=name, default=default, **entry["cli"])
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> "EngineArgs":
        """Creates an object from parsed command-line arguments, and ignores unrelated ones."""
        names = [f.name for f in fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})
