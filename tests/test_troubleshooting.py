"""docs/troubleshooting.md quotes messages that the program still has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDER = re.compile(r"%[ds]|%\.\d+f")  # of logging


def texts_of(source: str) -> Iterator[str]:
    """The strings of a module, without docstrings; "..." stands for what is filled in."""
    nodes = list(ast.walk(ast.parse(source)))
    skipped: set[ast.AST] = {node.value for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values
            )
        elif isinstance(node, ast.Constant) and node not in skipped and type(node.value) is str:
            yield PLACEHOLDER.sub("...", node.value)


def is_quoted(message: str, texts: list[str]) -> bool:
    """Whether one text has all parts of a message, in order."""
    parts = [part.strip() for part in message.split("...")]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_each_quoted_message_is_in_the_code():
    paths = (ROOT / "nanovllm").rglob("*.py")
    texts = [text for path in paths for text in texts_of(path.read_text("utf-8"))]
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    messages = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(messages) > 30
    gone = [message for message in messages if not is_quoted(message, texts)]
    assert not gone


def test_a_message_that_changed_is_found():
    (text,) = texts_of('"""Doc with 7 blocks free."""\nf"only {n} blocks {why}"')
    assert text == "only ... blocks ..."
    assert is_quoted("only ... blocks", [text])
    assert not is_quoted("only ... pages", [text])
    assert not is_quoted("blocks ... only", [text])


def test_each_message_has_its_cause_and_its_fix():
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    for section in re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]:
        if section.startswith("`"):
            assert "**Cause.**" in section and "**Fix.**" in section, section
