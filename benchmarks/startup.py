"""Measures start-up time and its parts: ``python -m benchmarks.startup MODEL [--tp N]``.

Each start runs in a new process. It is timed from the creation of the process to the text of the
first token. MODEL is a checkpoint with weights and a tokenizer;
``benchmarks/write_checkpoint.py`` writes one. Prints a table, the import time of nanovllm and of
PyTorch, and the modules with the longest imports. ``--fresh-kernels`` starts without compiled
kernels, as on a new machine. The operating system may still have the checkpoint in its page cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, time
from typing import Any

ROOT = Path(__file__).parents[1]
TOP = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--repeat", type=int, default=3, help="number of starts")
    parser.add_argument("--max-num-seqs", type=int, help="default: chosen by the engine")
    parser.add_argument("--fresh-kernels", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        start(args)
        return
    records = [measure(args) for _ in range(args.repeat)]
    print_table(records)
    imports = {"import torch": [], "from nanovllm import LLM": []}
    for _ in range(args.repeat):
        for code, seconds in imports.items():
            begin = perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
            seconds.append(perf_counter() - begin)
    ours, theirs = (statistics.median(imports[code]) for code in reversed(imports))
    print(f"\n`from nanovllm import LLM` {ours:.2f} s, `import torch` {theirs:.2f} s: ", end="")
    print(f"{ours / theirs:.2f} times")
    print_imports(args)


def start(args: argparse.Namespace) -> None:
    """Starts an engine, in the new process. Prints a JSON line with timestamps and the seconds of
    the engine's start-up parts."""
    timestamps = {"interpreter": time()}
    import torch

    timestamps["import torch"] = time()
    from nanovllm import LLM, SamplingParams

    timestamps["import nanovllm"] = time()
    llm = LLM(args.model, tensor_parallel_size=args.tp, max_num_seqs=args.max_num_seqs)
    timestamps["engine"] = time()
    output = llm.generate(["Hello"], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    timestamps["first token"] = time()
    assert output[0].outputs[0].text is not None
    parts = llm.model_runner.startup_seconds
    on_gpu = llm.model_runner.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(json.dumps({"timestamps": timestamps, "parts": parts, "device": device}), flush=True)
    llm.close()


def measure(args: argparse.Namespace, *options: str) -> dict[str, Any]:
    """Runs one start in a new process.

    Args:
        options: command-line options of the Python interpreter.

    Returns:
        The seconds of each part, in order, the device, and the process's stderr.
    """
    command = [sys.executable, *options, "-m", "benchmarks.startup", args.model, "--child"]
    command += ["--tp", str(args.tp)]
    if args.max_num_seqs is not None:
        command += ["--max-num-seqs", str(args.max_num_seqs)]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": f"{folder}/cache"}
        environment = {**os.environ, **(caches if args.fresh_kernels else {})}
        begin = time()
        result = subprocess.run(
            command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT
        )
    if result.returncode:
        sys.exit(f"the start failed:\n{result.stderr}")
    record = json.loads(result.stdout.splitlines()[-1])
    seconds, before = {}, begin
    for name, timestamp in record["timestamps"].items():
        seconds[name] = timestamp - before
        if name == "engine":
            parts = record["parts"]
            rest = seconds.pop(name) - sum(parts.values())
            seconds |= {"config": rest, **parts}
        before = timestamp
    seconds["all, to the first token"] = before - begin
    return {"seconds": seconds, "device": record["device"], "stderr": result.stderr}


def print_table(records: list[dict[str, Any]]) -> None:
    print(f"Seconds of {len(records)} starts on {records[0]['device']}\n")
    for name in records[0]["seconds"]:
        numbers = " ".join(f"{record['seconds'][name]:8.2f}" for record in records)
        print(f"{name:28}{numbers}")


def print_imports(args: argparse.Namespace) -> None:
    """Prints the modules with the longest imports, with and without the modules that they import.

    If several threads import at the same time, the time of an import includes that of the other
    threads.
    """
    times: dict[str, tuple[int, int]] = {}
    for line in measure(args, "-X", "importtime")["stderr"].splitlines():
        fields = line.removeprefix("import time:").split("|")
        if line.startswith("import time:") and len(fields) == 3 and fields[0].strip().isdigit():
            times[fields[2].strip()] = int(fields[1]), int(fields[0])
    for what, index in (("including nested imports", 0), ("without nested imports", 1)):
        print(f"\nLongest of {len(times)} imports in ms, {what} (the measurement slows them):")
        for name in sorted(times, key=lambda name: -times[name][index])[:TOP]:
            print(f"{times[name][index] / 1000:8.0f}  {name}")
    packages: dict[str, int] = {}
    for name, (_, own) in times.items():
        package = name.partition(".")[0]
        packages[package] = packages.get(package, 0) + own
    print("\nImports by package in ms, without nested imports:")
    for name in sorted(packages, key=lambda name: -packages[name])[:TOP]:
        print(f"{packages[name] / 1000:8.0f}  {name}")


if __name__ == "__main__":
    main()
