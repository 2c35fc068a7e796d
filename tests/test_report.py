"""The README's figures are those that bench.py recorded."""

from benchmarks.report import ROOT, load_records, updated_readme


def test_readme_shows_the_recorded_results():
    records = [record for record in load_records() if "share_of_floor" in record]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert updated_readme(text, records) == text
