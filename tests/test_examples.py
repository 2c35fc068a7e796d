"""The page of examples runs as it stands."""

import re

from benchmarks.report import ROOT


def test_every_block_of_the_page_runs(capsys):
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    assert len(blocks) > 10
    namespace: dict[str, object] = {"__name__": "examples"}
    for block in blocks:
        # Line numbers of a traceback are those of the page.
        padding = "\n" * (page[: block.start()].count("\n") + 1)
        exec(compile(padding + block[1], "docs/examples.md", "exec"), namespace)
    assert "->" in capsys.readouterr().out
