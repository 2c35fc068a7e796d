"""Renders chat templates in the process that ``chat_renderer.py`` starts. Imports only jinja2.

The Jinja environment has the same filters, functions and extensions as that of transformers.
"""

import json
import pickle
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
CACHE_SIZE = 16  # compiled templates
MAX_CACHED_CHARS = 1 << 16  # longer templates are not cached, to save memory


class GenerationBlock(Extension):
    """The tag ``{% generation %}``, which marks the assistant's text. It renders as its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class MakeDict:
    """A replacement for ``dict`` that does not expose the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class PublicNamespace(Namespace):
    """A Jinja namespace that refuses attribute names with a leading underscore."""

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
    """Serializes to JSON without escaping HTML, unlike Jinja's own filter."""
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
_compile_cached = lru_cache(CACHE_SIZE)(environment.from_string)


def handle(request: tuple[bytes, bytes]) -> bytes:
    """Renders one conversation.

    Args:
        request: two pickles. The first holds the template and the variables that all conversations
            share, the second the messages of this conversation.

    Returns:
        bytes: "T" and the text, or "E" and the error's class and message.
    """
    try:
        shared, messages = request
        template, variables = _read_shared(shared)
        text = template.render(variables, messages=pickle.loads(messages))
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > MAX_TEXT_BYTES:
            raise ValueError(f"the text is longer than {MAX_TEXT_BYTES >> 20} MiB")
        return b"T" + data
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        message = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        return b"E" + message.encode("utf-8", "surrogatepass")


@lru_cache(1)
def _read_shared(shared: bytes) -> tuple[Template, dict[str, Any]]:
    source, variables = pickle.loads(shared)
    is_cached = len(source) <= MAX_CACHED_CHARS
    compile_template = _compile_cached if is_cached else environment.from_string
    return compile_template(source), variables
