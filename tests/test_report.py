"""The figures of README.md and docs/benchmarks.md are those that were recorded."""

from benchmarks.report import (
    BENCHMARKS,
    README,
    README_WORKLOADS,
    comparison_table,
    load_peers,
    updated_benchmarks,
    updated_readme,
)


def test_pages_show_the_recorded_results():
    for path, updated in ((README, updated_readme), (BENCHMARKS, updated_benchmarks)):
        text = path.read_text(encoding="utf-8")
        assert updated(text) == text, f"{path}: run python -m benchmarks.report"


def test_the_comparison_is_of_one_host_and_one_model():
    """Throughput differs by a third from host to host, so rows of several compare nothing."""
    peers = load_peers()
    assert {record["host"] for record in peers} == {"A"}
    runs = [record for record in peers if "workload" in record]
    assert {(r["gpu"], r["num_gpus"], r["model"]) for r in runs} == {("H200", 1, "qwen3-0.6b")}
    assert all(record["detokenize"] for record in runs)


def test_a_workload_that_an_engine_did_not_run_has_an_empty_cell():
    rows = [line.split("|")[1:-1] for line in comparison_table(load_peers()).splitlines()]
    columns = [cell.strip().split()[0] for cell in rows[0]]
    assert columns[1:] == ["nano-vLLM", "vLLM", "nanovllm"]
    cells = {row[0].strip(" `").split("`")[0]: [cell.strip() for cell in row[1:]] for row in rows}
    assert all(cells["mixed256"]) and cells["prefill"][0] == "" and all(cells["prefill"][1:])
    assert len(comparison_table(load_peers(), README_WORKLOADS).splitlines()) == 2 + 5
