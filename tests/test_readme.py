"""What the README says of faults is tested, line by line."""

import ast
import re
from pathlib import Path

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
    readme = (ROOT / "README.md").read_text("utf-8")
    section = readme.partition("## What happens when")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        tests = re.findall(r"`(test_\w+\.py)::([\w:]+)`", row)
        assert tests, row
        for file, name in tests:
            (path,) = (ROOT / "tests").rglob(file)
            assert name in names_in(path), f"{row} names no test"
