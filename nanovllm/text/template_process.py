"""Renders chat templates, in a process of its own: see ``chat_renderer.py``. Needs jinja2 alone.

Templates get the environment that transformers gives them.
"""

import json
import pickle
import struct
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEXT_BYTES = 64 << 20
MAX_ERROR_CHARS = 10_000
NUM_CACHED = 16
CACHED_CHARS = 1 << 16  # longer templates are not kept, as they take memory
HEAD_SIZE = struct.Struct("<Q")


class GenerationBlock(Extension):
    """``{% generation %}``, which marks what an assistant writes. It renders as its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class MakeDict:
    """``dict`` as a function, without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class PublicNamespace(Namespace):
    """A namespace whose names do not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # any keyword may be a name, even "self"
        self, *values = args
        names = dict(*values, **kwargs)
        for name in names:
            _check_public(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        Namespace.__setitem__(self, name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template's namespace cannot have the name {name!r}")


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter escapes HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
)
environment.filters["tojson"] = tojson
environment.globals.update(
    raise_exception=raise_exception,
    strftime_now=strftime_now,
    dict=MakeDict(),
    namespace=PublicNamespace,
)
_from_cache = lru_cache(NUM_CACHED)(environment.from_string)


def answer(question: bytes) -> bytes:
    """Renders one conversation.

    Args:
        question: the length of what follows first; the pickled template and the variables that
            conversations share; the pickled messages.

    Returns:
        bytes: "T" and the text; or "E" and the error's class and message.
    """
    try:
        start = HEAD_SIZE.size + HEAD_SIZE.unpack_from(question)[0]
        template, variables = _read_head(question[HEAD_SIZE.size : start])
        messages = pickle.loads(memoryview(question)[start:])
        text = template.render(variables, messages=messages)
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > MAX_TEXT_BYTES:
            raise ValueError(f"it makes over {MAX_TEXT_BYTES >> 20} MiB of text")
        return b"T" + data
    except MemoryError:
        raise
    except Exception as error:  # templates raise whatever their authors thought of
        message = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        return b"E" + message.encode("utf-8", "surrogatepass")


@lru_cache(1)
def _read_head(head: bytes) -> tuple[Template, dict[str, Any]]:
    source, variables = pickle.loads(head)
    compile_template = _from_cache if len(source) <= CACHED_CHARS else environment.from_string
    return compile_template(source), variables
