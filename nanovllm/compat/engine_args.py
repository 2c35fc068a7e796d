"""vLLM's ``EngineArgs`` and its command-line flags."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import field, fields, make_dataclass
from functools import partial
from typing import Any

from nanovllm.vllm_arguments import load_table
from nanovllm.vllm_flags import add_flags, with_dashes


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
        own = self._option_string_actions
        args = [arg if arg.partition("=")[0] in own else with_dashes(arg) for arg in given]
        return super().parse_known_args(args, namespace)


def _engine_arguments() -> dict[str, dict[str, Any]]:
    """Returns the entries of vLLM's current engine arguments, without those of earlier versions."""
    return {name: entry for name, entry in load_table()["LLM"].items() if "former" not in entry}


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
                add_flags(parser, name, entry, default=deepcopy(entry["default"]))
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> "EngineArgs":
        """Creates an object from parsed command-line arguments, and ignores unrelated ones."""
        names = [f.name for f in fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})
