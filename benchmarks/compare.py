"""Runs the same workloads with vLLM, nano-vLLM or this project, whichever is installed.

``python benchmarks/compare.py --engine ENGINE --model PATH`` prints one JSON line per workload. It
uses only the common API of the three: ``LLM``, ``SamplingParams`` and ``generate``. Run it by its
path. With ``-m``, which works only in the root of this repository, Python would import this
project's package instead of nano-vLLM's, which has the same name.
"""

import argparse
import json
import random
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from workloads import SHAPES, Workload, random_workload

HERE = Path(__file__).resolve().parent
# This folder's profile.py would hide the standard library's from the engines.
sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != HERE]

# Engine -> package, distribution. nano-vLLM and this project have the same package name.
ENGINES = {
    "nanovllm": ("nanovllm", "nanovllm"),
    "vllm": ("vllm", "vllm"),
    "nano-vllm": ("nanovllm", "nano-vllm"),
}
PREFIX = "prefix"
DEFAULT_WORKLOADS = ["mixed256", "single", "batch8", "decode256", "prefill", PREFIX]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--model", required=True, help="a checkpoint directory with a tokenizer")
    parser.add_argument(
        "--workload", choices=[*SHAPES, PREFIX], nargs="+", default=DEFAULT_WORKLOADS
    )
    parser.add_argument("--num-prompts", type=int, help="overrides the number of prompts")
    parser.add_argument(
        "--repeat", type=int, default=2, help="number of runs; the fastest is reported"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--max-model-len", type=int, default=4096)
    args = parser.parse_args()
    start = perf_counter()
    engine, name_and_version = find_engine(args.engine)
    llm = engine.LLM(args.model, tensor_parallel_size=args.tp, max_model_len=args.max_model_len)
    start_seconds = perf_counter() - start
    run(engine, llm, random_workload("single", output_len=(4, 4)))  # warm-up
    for name in args.workload:
        seconds = []
        for seed in range(args.repeat):  # new prompts each time, which no prefix cache holds
            workload = make_workload(name, args.num_prompts, seed)
            seconds.append(run(engine, llm, workload))
        fastest = min(seconds)
        print(
            json.dumps(
                {
                    "engine": name_and_version,
                    "gpu": gpu_name(),
                    "model": Path(args.model).name,
                    "num_gpus": args.tp,
                    "workload": workload.name,
                    "detokenize": True,
                    "start_seconds": round(start_seconds, 2),
                    "seconds": [round(s, 3) for s in seconds],
                    "output_tokens_per_second": round(workload.num_output_tokens / fastest, 1),
                    "input_tokens_per_second": round(workload.num_input_tokens / fastest, 1),
                }
            ),
            flush=True,
        )


def find_engine(name: str) -> tuple[Any, str]:
    """Imports the engine. Returns its package, and its name with the version, or with the commit if
    it is installed from a clone."""
    package, distribution = ENGINES[name]
    try:
        found = version(distribution)
        engine = import_module(package)
    except ImportError as error:
        sys.exit(f"{name} is not installed here: {error}")
    is_ours = package == "nanovllm" and hasattr(engine, "__version__")
    if is_ours != (name == "nanovllm"):
        sys.exit(f"the installed package {package} is not {name}'s: {engine.__file__}")
    clone = Path(engine.__file__).parents[1]
    if (clone / ".git").exists():
        command = ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = done.stdout.strip() or found
    return engine, f"{distribution} {found}"


def gpu_name() -> str | None:
    """Returns the name of the first GPU; None without a GPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def make_workload(name: str, num_prompts: int | None, seed: int) -> Workload:
    """Makes one of SHAPES or the workload "prefix".

    In "prefix", 512 prompts of 128 tokens follow a common prefix of 2,048 tokens, and each has 64
    output tokens. Another seed gives other prompts of the same lengths.
    """
    rng = random.Random(seed)
    if name == PREFIX:
        prefix = [rng.randint(0, 10000) for _ in range(2048)]
        count = num_prompts or 512
        prompts = [prefix + [rng.randint(0, 10000) for _ in range(128)] for _ in range(count)]
        return Workload(name if count == 512 else f"{name} x {count}", prompts, [64] * count)
    workload = random_workload(name, num_prompts)
    prompts = [[rng.randint(0, 10000) for _ in prompt] for prompt in workload.prompts]
    return Workload(workload.name, prompts, workload.output_lens)


def run(engine: Any, llm: Any, workload: Workload) -> float:
    """Runs a workload, with detokenization. Returns the seconds."""
    params = [
        engine.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_tokens)
        for num_tokens in workload.output_lens
    ]
    prompts: list[Any] = workload.prompts
    if engine.__name__ == "vllm":
        prompts = [{"prompt_token_ids": token_ids} for token_ids in prompts]
    start = perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = perf_counter() - start
    produced = [
        len(out["token_ids"] if isinstance(out, dict) else out.outputs[0].token_ids)
        for out in outputs
    ]
    if produced != workload.output_lens:
        raise RuntimeError("the engine did not generate the tokens that the workload asks for")
    return seconds


if __name__ == "__main__":
    main()
