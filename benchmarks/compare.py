"""Throughput of one engine on the workloads of docs/benchmarks.md, a JSON line each:
``python benchmarks/compare.py --engine nanovllm|vllm|nano-vllm --model PATH``.

It uses nothing of an engine but ``LLM``, ``SamplingParams`` and ``generate``, so it runs in an
environment that has one of the three. nano-vLLM's package has this project's name, ``nanovllm``.
So run this file by its path, not with ``-m`` from the root of a clone, where this project's
package would be imported.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":  # run by its path: this folder's profile.py would hide Python's own
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != HERE]

# Engine -> its package, and what a record calls it.
ENGINES = {
    "nanovllm": ("nanovllm", "nanovllm"),
    "vllm": ("vllm", "vLLM"),
    "nano-vllm": ("nanovllm", "nano-vLLM"),
}
# Name -> prompts, tokens of a common prefix, (shortest, longest) rest, (shortest, longest) output.
WORKLOADS = {
    "mixed256": (256, 0, (100, 1024), (100, 1024)),
    "single": (1, 0, (128, 128), (512, 512)),
    "batch8": (8, 0, (128, 128), (512, 512)),
    "decode256": (256, 0, (64, 64), (512, 512)),
    "prefill": (128, 0, (3900, 3900), (1, 1)),
    "prefix": (512, 2048, (128, 128), (64, 64)),
}
MAX_TOKEN_ID = 10_000
TEMPERATURE = 0.6


def main() -> None:
    args = parse_args()
    llm, sampling_params, name = start(args)
    run(llm, sampling_params, args.engine, [[1] * 8], [4])  # first-call costs
    for workload in args.workloads:
        prompts, output_lens = make_workload(workload)
        seconds = [
            run(llm, sampling_params, args.engine, fresh(prompts, i), output_lens)
            for i in range(args.repeat)
        ]
        record = {
            "engine": name,
            "gpu": gpu_name(),
            "num_gpus": args.tp,
            "model": Path(args.model).name,
            "workload": workload,
            "detokenize": True,
            "seconds": [round(s, 3) for s in seconds],
            "output_tokens_per_second": round(sum(output_lens) / min(seconds), 1),
            "input_tokens_per_second": round(sum(map(len, prompts)) / min(seconds), 1),
        }
        print(json.dumps(record), flush=True)


def start(args: argparse.Namespace) -> tuple[Any, Any, str]:
    """The engine, its class of sampling parameters, and its name with its version."""
    package, title = ENGINES[args.engine]
    try:
        name = version(args.engine)
        module = import_module(package)
    except ImportError as error:
        sys.exit(f"{args.engine} is not installed here ({error})")
    is_ours = hasattr(module, "__version__")
    if package == "nanovllm" and is_ours != (args.engine == "nanovllm"):
        found = "this project" if is_ours else "nano-vLLM"
        sys.exit(f"the package nanovllm is {found} here ({module.__file__}), not {args.engine}")
    settings = {"max_model_len": args.max_model_len, "tensor_parallel_size": args.tp}
    clone = Path(module.__file__).parents[1]
    if (clone / ".git").exists():  # an editable install: its commit says more
        command = ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        name = done.stdout.strip() or name
    return module.LLM(args.model, **settings), module.SamplingParams, f"{title} {name}"


def run(
    llm: Any, make_params: Any, engine: str, prompts: list[list[int]], output_lens: list[int]
) -> float:
    """Seconds to complete all prompts, texts included."""
    params = [
        make_params(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in output_lens
    ]
    given: list[Any] = prompts
    if engine == "vllm":  # which takes no bare lists of token ids in every version
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
    begin = perf_counter()
    outputs = llm.generate(given, params, use_tqdm=False)
    seconds = perf_counter() - begin
    produced = [
        output["token_ids"] if engine == "nano-vllm" else output.outputs[0].token_ids
        for output in outputs
    ]
    if [len(token_ids) for token_ids in produced] != output_lens:
        raise RuntimeError("the engine did not generate the tokens that the workload asks for")
    return seconds


def make_workload(name: str) -> tuple[list[list[int]], list[int]]:
    """Prompts of random token ids, and how many tokens to generate after each.

    Those without a common prefix are the workloads of ``workloads.py``, token for token.
    """
    count, prefix_len, inputs, outputs = WORKLOADS[name]
    rng = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [rng.randint(0, MAX_TOKEN_ID) for _ in range(length)]

    prefix = tokens(prefix_len)
    prompts = [prefix + tokens(rng.randint(*inputs)) for _ in range(count)]
    return prompts, [rng.randint(*outputs) for _ in range(count)]


def fresh(prompts: list[list[int]], number: int) -> list[list[int]]:
    """The prompts of one repetition: another first token, so that no prefix cache has them."""
    return [[(prompt[0] + number) % MAX_TOKEN_ID, *prompt[1:]] for prompt in prompts]


def gpu_name() -> str | None:
    """The first GPU; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--model", required=True, help="a checkpoint with a tokenizer")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=2, help="runs; the fastest counts")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--max-model-len", type=int, default=4096)
    args = parser.parse_args()
    if os.path.isdir(args.model):
        args.model = os.path.abspath(args.model)
    return args


if __name__ == "__main__":
    main()
