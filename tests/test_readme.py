"""README's quickstart prints what README shows. What docs/reliability.md says of faults is tested,
line by line."""

import ast
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def names_in(path: Path) -> set[str]:
    """Classes and functions of a test file, methods as Class::method."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return names


def test_each_row_of_what_happens_when_names_its_test():
    page = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| event |")]
    assert len(rows) > 30
    for row in rows:
        tests = re.findall(r"`(test_\w+\.py)::([\w:]+)`", row)
        assert tests, row
        for file, name in tests:
            (path,) = (ROOT / "tests").rglob(file)
            assert name in names_in(path), f"{row} names no test"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the output shown is that of a CPU")
def test_the_quickstart_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "README.md").read_text("utf-8")
    example = r"^```python\n(.*?)^```$.*?^```text\n(.*?)^```$"
    found = re.search(example, page, re.DOTALL | re.MULTILINE)
    assert found is not None
    exec(compile(found[1], "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == found[2]


def test_the_readme_is_short_and_names_every_page():
    page = (ROOT / "README.md").read_text("utf-8")
    assert len(page.splitlines()) <= 160
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages - {"docs/index.md"} <= set(re.findall(r"\((docs/\w[\w-]*\.md)\)", page))
