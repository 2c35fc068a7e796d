"""The shape that the design promises: imports point down, and the core stays small."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanovllm"
LEAVES = ("config", "sampling_params", "outputs")
LAYERS = (
    "utils",
    "structured_outputs",
    "vllm_fields",
    "leaves",
    "kernels",
    "quantization",
    "layers",
    "models",
    "checkpoints",
    "text",
    "engine",
    "llm",
)  # lowest first
CORE = ("llm", "engine", "layers", "models")
FILES = sorted(PACKAGE.rglob("*.py"))
NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rank(part: str) -> int:
    """A part not named here is built on top; only the package's own __init__ is above it."""
    if part in LEAVES:
        part = "leaves"
    return LAYERS.index(part) if part in LAYERS else len(LAYERS) + (part == "__init__")


def imported_parts(path: Path) -> list[str]:
    """The parts that a file imports from, also within functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    paths = [name.split(".") for name in names]
    return [(*path, "__init__")[1] for path in paths if path[0] == "nanovllm"]


def test_imports_point_down():
    for path in FILES:
        own = part_of(path)
        for other in imported_parts(path):
            inside = own == other and (PACKAGE / own).is_dir()
            assert inside or rank(other) < rank(own), f"{path} imports {other}"


def code_lines(path: Path) -> int:
    """Lines of a file without blanks, comments and docstrings."""
    source = path.read_text("utf-8")
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def core_lines() -> int:
    return sum(code_lines(path) for path in FILES if part_of(path) in CORE)


def test_code_lines_are_counted_without_blanks_comments_and_docstrings(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Doc\n\nstring."""\n\n# comment\nx = 1  # comment\n\n\ndef f(\n    a,\n):\n'
        '    """Doc."""\n    # comment\n    return """two\n\nlines"""\n'
    )
    assert code_lines(path) == 1 + 3 + 3


def test_core_is_small():
    assert 1000 < core_lines() < 3600


def test_readme_states_the_size_of_the_core():
    """Guards a claim that drifts: it must hold, and by no more than a few hundred lines."""
    claim = re.search(
        r"under ([\d,]+)\s+lines\s+of\s+code", (ROOT / "README.md").read_text("utf-8")
    )
    assert claim is not None
    claimed = int(claim[1].replace(",", ""))
    assert 0 <= claimed - core_lines() <= 300


def test_the_reading_order_names_files_as_long_as_they_are():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", page, re.MULTILINE)
    assert len(rows) > 15
    for name, stated in rows:
        num_lines = len((PACKAGE / name).read_text("utf-8").splitlines())
        assert abs(num_lines - int(stated)) <= num_lines / 10, name
