"""Draws README.md's table and plot from benchmarks/results/*.jsonl: ``python -m
benchmarks.report``.

Of several runs of the same thing, the last counts. Shares of the floor are by ``floor.py`` as it is
now, with the ceilings of each record.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.floor import floor_seconds
from benchmarks.workloads import Workload, random_workload
from nanovllm.checkpoints.checkpoint import open_checkpoint

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "throughput.png"
BEGIN, END = "<!-- results: python -m benchmarks.report -->", "<!-- end of results -->"


def load_records() -> list[dict[str, Any]]:
    """The last record of each device, model, workload, backend and sampling."""
    latest = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            keys = ("device", "num_devices", "model", "workload", "attention_backend")
            sampling = json.dumps(record.get("sampling") or {}, sort_keys=True)
            latest[(*(record[key] for key in keys), sampling)] = record
    for record in latest.values():
        if "copy_tb_per_s" in record:
            record["share_of_floor"] = share_of_floor(record)
    return sorted(
        latest.values(),
        key=lambda r: (r["device"], r["num_devices"], r["model"], r["workload"]),
    )


def share_of_floor(record: dict[str, Any]) -> float:
    model = open_checkpoint(str(ROOT / "benchmarks" / "shapes" / record["model"])).config
    bandwidth, rate = record["copy_tb_per_s"] * 1e12, record["matmul_tflop_per_s"] * 1e12
    count = record["num_devices"]
    floor = floor_seconds(model, _workload(record["workload"]), bandwidth * count, rate * count)
    return floor / record["seconds"]


@cache
def _workload(name: str) -> Workload:
    return random_workload(name)


def headline(record: dict[str, Any]) -> tuple[float, str]:
    """What the workload is about: input tokens/s of a prefill, else output tokens/s."""
    if record["workload"] == "prefill":
        return record["input_tokens_per_second"], "input"
    return record["output_tokens_per_second"], "output"


def table(records: list[dict[str, Any]]) -> str:
    rows = [
        "| GPU | model | workload | attention | tokens/s | of the floor | on |",
        "|---|---|---|---|--:|--:|---|",
    ]
    for r in records:
        rate, kind = headline(r)
        count = "" if r["num_devices"] == 1 else f"{r['num_devices']} x "
        rows.append(
            f"| {count}{r['device']} | {r['model']} | {r['workload']} | "
            f"{r['attention_backend']} | {rate:,.0f} {kind} | {r['share_of_floor']:.0%} | "
            f"{r['time'][:10]} |"
        )
    return "\n".join(rows)


def sampling_table(records: list[dict[str, Any]]) -> str:
    rows = [
        "| GPU | model | workload | sampling | tokens/s | over plain temperature | on |",
        "|---|---|---|---|--:|--:|---|",
    ]
    for r in records:
        options = ", ".join(f"{name}={value}" for name, value in r["sampling"].items())
        rate, kind = headline(r)
        rows.append(
            f"| {r['device']} | {r['model']} | {r['workload']} | `{options}` | "
            f"{rate:,.0f} {kind} | {r['cost_over_plain']:+.1%} time | {r['time'][:10]} |"
        )
    return "\n".join(rows)


def updated_readme(text: str, records: list[dict[str, Any]]) -> str:
    plain, sampling = split(records)
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(plain)}\n\n{sampling_table(sampling)}\n{END}{after}"


def split(records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Plain ones, and those with further sampling parameters."""
    return (
        [r for r in records if not r.get("sampling")],
        [r for r in records if r.get("sampling")],
    )


def plot(records: list[dict[str, Any]]) -> None:
    """Share of the floor reached, a bar for each record."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    counts = ["" if r["num_devices"] == 1 else f"{r['num_devices']} GPUs, " for r in records]
    labels = [
        f"{count}{r['model']}, {r['workload']}, {r['attention_backend']}"
        for count, r in zip(counts, records, strict=True)
    ]
    shares = [100 * r["share_of_floor"] for r in records]
    figure, axes = plt.subplots(figsize=(8, 0.3 * len(records) + 0.8))
    bars = axes.barh(labels, shares, color="#4477aa")
    axes.bar_label(bars, [f" {headline(r)[0]:,.0f} {headline(r)[1]} tok/s" for r in records])
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"% of the hardware's floor, {records[0]['device']}, bf16")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=120, bbox_inches="tight")


def main() -> None:
    records = [r for r in load_records() if "share_of_floor" in r]
    readme = ROOT / "README.md"
    readme.write_text(updated_readme(readme.read_text(encoding="utf-8"), records), "utf-8")
    plain, sampling = split(records)
    plot(plain)
    print(table(plain), sampling_table(sampling), sep="\n\n")


if __name__ == "__main__":
    main()
