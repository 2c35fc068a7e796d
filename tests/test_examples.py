"""The examples of the documentation run as they stand."""

import re

import pytest

from benchmarks.report import ROOT


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("examples.md", marks=pytest.mark.slow),
        pytest.param("rollouts.md", marks=pytest.mark.slow),
        pytest.param("sampling.md", marks=pytest.mark.slow),
        "adding-a-model.md",
    ],
)
def test_every_block_of_the_page_runs(page, capsys):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) >= 5
    namespace: dict[str, object] = {"__name__": "examples"}
    for block in blocks:
        # Line numbers of a traceback are those of the page.
        padding = "\n" * (text[: block.start()].count("\n") + 1)
        exec(compile(padding + block[1], f"docs/{page}", "exec"), namespace)
    assert capsys.readouterr().out


def test_the_family_on_the_page_is_the_one_that_is_served():
    page = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    assert (ROOT / "nanovllm" / "models" / "smollm3.py").read_text(encoding="utf-8") in page


def test_the_example_of_batch_invariance_holds(model_path):
    """It ends with an assertion."""
    page = (ROOT / "docs" / "batch-invariance.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert "assert " in block
    exec(block.replace("path/to/model", str(model_path)), {})
