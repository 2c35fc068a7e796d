"""Counts the distinct experts that decode steps of a mixture of experts read.

Run it as ``python -m benchmarks.experts qwen3-30b-a3b 1 8 256``: a shape in benchmarks/shapes/,
which gets random weights, and numbers of sequences. It prints a JSON record for each number. Steps
run eagerly, because a CUDA graph cannot be observed; they route as captured ones do.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.roofline import num_experts_read
from nanovllm import LLM, SamplingParams
from nanovllm.layers import moe

SHAPE_FOLDER = Path(__file__).parent / "shapes"
INPUT_LEN, OUTPUT_LEN = 100, 20


@contextmanager
def observe_routes(num_tokens: int) -> Iterator[list[int]]:
    """Observes the router inside a ``with`` block. Yields a list, to which each layer of each step
    with ``num_tokens`` tokens appends its number of distinct experts."""
    counts: list[int] = []
    route = moe.route

    def observed(logits: torch.Tensor, *args: Any) -> Any:
        routing = route(logits, *args)
        if len(logits) == num_tokens:
            counts.append(len(routing.experts.unique()))
        return routing

    moe.route = observed
    try:
        yield counts
    finally:
        moe.route = route


def count_experts(llm: LLM, num_seqs: int) -> float:
    """Returns the mean number of distinct experts per layer and decode step, for random prompts."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 500, (num_seqs, INPUT_LEN), generator=generator).tolist()
    params = SamplingParams(temperature=0.6, max_tokens=OUTPUT_LEN, ignore_eos=True)
    with observe_routes(num_seqs) as counts:
        llm.generate(prompts, params, use_tqdm=False)
    return sum(counts) / len(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", help="a folder in benchmarks/shapes/, or any with a config.json")
    parser.add_argument("num_seqs", type=int, nargs="+")
    args = parser.parse_args()
    folder = SHAPE_FOLDER / args.shape
    path = folder if folder.is_dir() else Path(args.shape)
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    with LLM(path, enforce_eager=True, max_model_len=256, **settings) as llm:
        mlp = llm.model_runner.model_config.layers[-1].mlp
        for num_seqs in args.num_seqs:
            record = {
                "model": path.name,
                "num_seqs": num_seqs,
                "num_experts": mlp.num_experts,
                "experts_read": round(count_experts(llm, num_seqs), 1),
                "experts_read_if_even": round(num_experts_read(mlp, num_seqs), 1),
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
