"""Updates the tables and charts of README.md and docs/benchmarks.md.

Run it with ``python -m benchmarks.report``.

README.md compares engines, from ``benchmarks/results/peers.jsonl``. docs/benchmarks.md shows the
whole of that file, and the latest record of each ``bench.py`` configuration in the other files of
the folder. Fractions of the roofline are computed anew, by the current ``roofline.py``, from the
bandwidth and matmul rate that each run measured.
"""

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.roofline import roofline_seconds
from benchmarks.workloads import Workload, random_workload
from nanovllm.checkpoints.checkpoint import open_checkpoint

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PEERS = RESULTS / "peers.jsonl"
COMPARISON = ROOT / "docs" / "comparison.png"
ROOFLINES = ROOT / "docs" / "throughput.png"
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
README_WORKLOADS = ("mixed256", "decode256", "prefill", "batch8", "single")
ENGINES = ("nano-vLLM", "vLLM", "nanovllm")  # a record's engine is one of these and a version
COLORS = ("#bbbbbb", "#ddaa33", "#4477aa")

Record = dict[str, Any]


def load_records() -> list[Record]:
    """Returns the last ``bench.py`` record of each configuration: device, model, engine options,
    workload, backend, sampling parameters, with or without text."""
    latest = {}
    for path in sorted(set(RESULTS.glob("*.jsonl")) - {PEERS}):
        for record in read_lines(path):
            keys = ("device", "num_devices", "model", "workload", "attention_backend")
            sampling = json.dumps(record.get("sampling") or {}, sort_keys=True)
            detokenize = record.setdefault("detokenize", False)  # earlier runs had no tokenizer
            record["options"] = engine_options(record)
            options = (record["options"], detokenize, sampling)
            latest[(*(record[key] for key in keys), *options)] = record
    records = [record for record in latest.values() if "copy_tb_per_s" in record]
    for record in split_by_sampling(records)[0]:  # the report has no roofline for the others
        record["roofline_fraction"] = roofline_fraction(record)
    return sorted(
        records,
        key=lambda r: (*(r[k] for k in ("device", "num_devices", "model", "options", "workload")),),
    )


def engine_options(record: Record) -> str:
    """Returns the engine options of a run that change its kernels, such as ``quantization=fp8``."""
    options = [] if record.get("quantization") is None else ["quantization=fp8"]
    options += ["kv_cache_dtype=fp8"] * (record.get("kv_cache_dtype", "auto") != "auto")
    options += ["batch_invariant"] * record.get("batch_invariant", False)
    return "".join(f", {option}" for option in options)


def load_peers() -> list[Record]:
    """Returns the records of all engines, measured on one host, in the order of the file."""
    return read_lines(PEERS)


def read_lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def roofline_fraction(record: Record) -> float:
    """Returns the fraction of the roofline: the least time divided by the measured time. That of a
    real model, which is not here, was computed by the run."""
    shape = ROOT / "benchmarks" / "shapes" / record["model"]
    if not shape.is_dir():
        return record["roofline_fraction"]
    model = open_checkpoint(str(shape)).config
    bandwidth, rate = record["copy_tb_per_s"] * 1e12, record["matmul_tflop_per_s"] * 1e12
    count = record["num_devices"]
    least = roofline_seconds(
        model,
        _workload(record["workload"]),
        bandwidth * count,
        rate * count,
        quantizes_kv=record.get("kv_cache_dtype", "auto") != "auto",
        has_fp8=bool(record.get("quantization") or model.quantization),
    )
    return least / record["seconds"]


@cache
def _workload(name: str) -> Workload:
    return random_workload(name)


def throughput(record: Record) -> tuple[float, str]:
    """Returns the tokens/s of a record, and which tokens they count: "input" for the workload
    prefill, otherwise "output"."""
    if record["workload"] == "prefill":
        return record["input_tokens_per_second"], "input"
    return record["output_tokens_per_second"], "output"


def engines_in(peers: list[Record]) -> list[str]:
    """Returns the engines' names with versions, in the order of ENGINES."""
    found = {record["engine"] for record in peers}
    return sorted(found, key=lambda engine: ENGINES.index(engine.split()[0]))


def comparison_table(peers: list[Record], workloads: tuple[str, ...] | None = None) -> str:
    """Makes a Markdown table with a row per workload (all by default) and a column per engine. A
    cell without a measurement is empty."""
    engines = engines_in(peers)
    cells = {(r["workload"], r["engine"]): throughput(r) for r in peers if "workload" in r}
    rows = [
        f"| tokens/s | {' | '.join(engines)} |",
        f"|---|{'--:|' * len(engines)}",
    ]
    for workload in workloads or dict.fromkeys(name for name, _ in cells):
        found = [cells.get((workload, engine)) for engine in engines]
        kind = next(rate[1] for rate in found if rate)
        rates = [f"{rate[0]:,.0f}" if rate else "" for rate in found]
        rows.append(f"| `{workload}`, {kind} | {' | '.join(rates)} |")
    if workloads is None:
        starts = {r["engine"]: r["start_seconds"] for r in peers if "start_seconds" in r}
        seconds = [f"{starts[engine]:.0f}" if engine in starts else "" for engine in engines]
        rows.append(f"| start-up, seconds | {' | '.join(seconds)} |")
    return "\n".join(rows)


def results_table(records: list[Record]) -> str:
    """Makes a Markdown table of ``bench.py`` records."""
    rows = [
        "| GPU | model | workload | attention | text | tokens/s | of the roofline | measured on |",
        "|---|---|---|---|---|--:|--:|---|",
    ]
    for r in records:
        rate, kind = throughput(r)
        count = "" if r["num_devices"] == 1 else f"{r['num_devices']} x "
        text = "yes" if r["detokenize"] else "no"
        rows.append(
            f"| {count}{r['device']} | {r['model']}{r['options']} | {r['workload']} | "
            f"{r['attention_backend']} | {text} | {rate:,.0f} {kind} | "
            f"{r['roofline_fraction']:.0%} | {r['time'][:10]} |"
        )
    return "\n".join(rows)


def sampling_table(records: list[Record]) -> str:
    """Makes a Markdown table of the cost of sampling parameters."""
    rows = [
        "| GPU | model | workload | sampling | tokens/s | change of time | measured on |",
        "|---|---|---|---|--:|--:|---|",
    ]
    for r in records:
        options = ", ".join(f"{name}={value}" for name, value in r["sampling"].items())
        rate, kind = throughput(r)
        rows.append(
            f"| {r['device']} | {r['model']} | {r['workload']} | `{options}` | "
            f"{rate:,.0f} {kind} | {r['cost_over_plain']:+.1%} | {r['time'][:10]} |"
        )
    return "\n".join(rows)


def updated_readme(text: str) -> str:
    return _replaced(text, "comparison", comparison_table(load_peers(), README_WORKLOADS))


def updated_benchmarks(text: str) -> str:
    plain, sampling = split_by_sampling(load_records())
    text = _replaced(text, "comparison", comparison_table(load_peers()))
    text = _replaced(text, "results", results_table(plain))
    return _replaced(text, "sampling", sampling_table(sampling))


def _replaced(text: str, name: str, content: str) -> str:
    """Returns the text with new content between the two HTML comments ``name``."""
    begin, end = f"<!-- {name}: python -m benchmarks.report -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the page has no {begin} ... {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def split_by_sampling(records: list[Record]) -> tuple[list[Record], list[Record]]:
    """Splits records into those with only a temperature and those with more sampling parameters."""
    return (
        [r for r in records if not r.get("sampling")],
        [r for r in records if r.get("sampling")],
    )


def draw_comparison(peers: list[Record]) -> None:
    """Draws the throughput relative to vLLM, with a bar per engine and workload."""
    plt = _pyplot()
    rates = {(r["workload"], r["engine"]): throughput(r)[0] for r in peers if "workload" in r}
    engines = engines_in(peers)
    base = next(engine for engine in engines if engine.startswith("vLLM"))
    figure, axes = plt.subplots(figsize=(9, 3.2))
    width = 0.8 / len(engines)
    for i, (engine, color) in enumerate(zip(engines, COLORS, strict=True)):
        measured = [(x, w) for x, w in enumerate(README_WORKLOADS) if (w, engine) in rates]
        heights = [rates[w, engine] / rates[w, base] for _, w in measured]
        positions = [x + (i - (len(engines) - 1) / 2) * width for x, _ in measured]
        bars = axes.bar(positions, heights, width, label=engine, color=color)
        axes.bar_label(
            bars, [f"{rates[w, engine]:,.0f}" for _, w in measured], fontsize=6, padding=2
        )
    kinds = {r["workload"]: throughput(r)[1] for r in peers if "workload" in r}
    axes.set_xticks(
        range(len(README_WORKLOADS)), [f"{w}\n({kinds[w]} tokens/s)" for w in README_WORKLOADS]
    )
    axes.set_ylabel(f"throughput / {base}'s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.tight_layout()
    figure.savefig(COMPARISON, dpi=120, bbox_inches="tight")


def draw_rooflines(records: list[Record]) -> None:
    """Draws the fraction of the roofline, with a bar per record."""
    plt = _pyplot()
    counts = ["" if r["num_devices"] == 1 else f"{r['num_devices']} GPUs, " for r in records]
    labels = [
        f"{count}{r['model']}{r['options']}, {r['workload']}, {r['attention_backend']}"
        for count, r in zip(counts, records, strict=True)
    ]
    fractions = [100 * r["roofline_fraction"] for r in records]
    figure, axes = plt.subplots(figsize=(8, 0.3 * len(records) + 0.8))
    bars = axes.barh(labels, fractions, color=COLORS[-1])
    axes.bar_label(bars, [f" {throughput(r)[0]:,.0f} {throughput(r)[1]} tok/s" for r in records])
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"% of the roofline, {records[0]['device']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(ROOFLINES, dpi=120, bbox_inches="tight")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, update in ((README, updated_readme), (BENCHMARKS, updated_benchmarks)):
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
    draw_comparison(load_peers())
    draw_rooflines(split_by_sampling(load_records())[0])


if __name__ == "__main__":
    main()
