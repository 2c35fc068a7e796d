"""A hostile line of a batch file: its bytes, and what its record must be."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

ERROR, RESULT, EITHER = "error", "result", "either"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DEFAULTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    COMPLETIONS: {"prompt": "x", "max_tokens": 4},
}
# A string "@json:..." in a body stands for JSON that json.dumps does not write, such as 1e999.
VERBATIM = re.compile(r'"@json:([^"]*)"')


@dataclass(frozen=True)
class Case:
    """One line.

    Attributes:
        name: the case's, unique; the line's ``custom_id`` unless the case is about that.
        group: the table that the case comes from.
        expected: ERROR, RESULT, or EITHER where both are right.
        make_line: makes the line, without its newline.
        is_heavy: takes over half a second or 50 MB: for the slow tests.
    """

    name: str
    group: str
    expected: str
    make_line: Callable[[], bytes]
    is_heavy: bool = False

    def body(self) -> dict[str, Any] | None:
        """The request's body if the line has one, for calls of ``LLM``."""
        try:
            body = json.loads(self.make_line())["body"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return body if isinstance(body, dict) else None


Row = tuple[str, Any]  # what is expected, and a value or a function that makes it


def raw_cases(group: str, table: dict[str, Row], heavy: Iterable[str] = ()) -> list[Case]:
    """A table of whole lines as bytes."""
    return _cases(group, table, heavy, lambda _, line: line)


def envelope_cases(group: str, table: dict[str, Row], heavy: Iterable[str] = ()) -> list[Case]:
    """A table of what to change outside of the body: None leaves a field out."""

    def line(name: str, changes: dict[str, Any]) -> bytes:
        return encode({**_request(name, COMPLETIONS, {}), **changes})

    return _cases(group, table, heavy, line)


def body_cases(
    group: str, table: dict[str, Row], url: str = COMPLETIONS, heavy: Iterable[str] = ()
) -> list[Case]:
    """A table of fields of the body, beside or instead of those in ``DEFAULTS``."""

    def line(name: str, fields: dict[str, Any]) -> bytes:
        return encode(_request(name, url, fields))

    return _cases(group, table, heavy, line)


def encode(request: dict[str, Any]) -> bytes:
    return VERBATIM.sub(r"\1", json.dumps(request)).encode()


def _request(name: str, url: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": DEFAULTS[url] | fields}


def _cases(
    group: str, table: dict[str, Row], heavy: Iterable[str], line: Callable[[str, Any], bytes]
) -> list[Case]:
    def maker(name: str, made: Any) -> Callable[[], bytes]:
        return lambda: line(name, made() if callable(made) else made)

    heavy = frozenset(heavy)
    assert heavy <= table.keys()
    return [
        Case(f"{group}: {name}", group, expected, maker(f"{group}: {name}", made), name in heavy)
        for name, (expected, made) in table.items()
    ]
