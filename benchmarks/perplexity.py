"""Perplexity of a text, with and without FP8 weights and an FP8 KV cache.

    python -m benchmarks.perplexity                            # SmolLM2-135M on a CPU, in fp32
    python -m benchmarks.perplexity --cases plain weights kv   # some of CASES
    python -m benchmarks.perplexity --model PATH --device cuda --dtype bfloat16

The text is cut into windows of the same number of tokens, each a prompt of its own. Prints the
perplexity of each case, its change relative to the first case, and the standard error of the
change, estimated from how much the change of the mean log-probability differs between windows.

The text is public domain: Jane Austen's Persuasion (1817) up to the start of chapter 13, without
the line breaks within paragraphs. It has 50,139 tokens of SmolLM2.
"""

import argparse
import math
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from example import fetch_smollm2
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.checkpoint import open_checkpoint
from nanovllm.kernels.fp8 import GROUP, dequantize, quantize
from nanovllm.quantization import fp8
from nanovllm.quantization.base import LinearWeight, Shard
from nanovllm.quantization.unquantized import UnquantizedWeight

TEXT = Path(__file__).parents[1] / "tests" / "data" / "persuasion.txt"
LOGPROBS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


class BlockWeight(UnquantizedWeight):
    """A weight that is rounded to FP8 with a scale for each block of GROUP rows and columns, as in
    many checkpoints. Inputs are not quantised."""

    def load(self, param: nn.Parameter, tensor: Tensor, shard: Shard) -> None:
        if tensor.dim() == 2:
            tensor = torch.cat([round_blocks(rows) for rows in tensor.split(GROUP)])
        super().load(param, tensor, shard)


def round_blocks(rows: Tensor) -> Tensor:
    """Rounds GROUP rows, or fewer, to FP8."""
    blocks = rows.split(GROUP, 1)
    return torch.cat([dequantize(quantize(x.flatten())).view_as(x) for x in blocks], 1)


class Case(NamedTuple):
    """Settings of an engine, and the class of its weights: on a CPU, Fp8Weight does what a GPU does
    with FP8 matmuls."""

    settings: dict[str, Any]
    weight_class: type[LinearWeight] = fp8.DequantizedFp8Weight


WEIGHTS, KV = {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}
CASES = {
    "plain": Case({}),
    "weights": Case(WEIGHTS),
    "weights-inputs": Case(WEIGHTS, fp8.Fp8Weight),
    "block-weights": Case(WEIGHTS, BlockWeight),
    "kv": Case(KV),
    "weights-inputs-kv": Case(WEIGHTS | KV, fp8.Fp8Weight),
}


def logprobs(
    model: Path, windows: list[list[int]], case: Case, device: str, dtype: str
) -> list[list[float]]:
    """Returns the log-probabilities of each window's tokens but the first."""
    settings = case.settings | {"max_model_len": max(map(len, windows)) + 1}
    with (
        patch.object(fp8, "new_fp8_weight", lambda layer, has_groups: case.weight_class(layer)),
        LLM(model, device=device, dtype=dtype, **settings) as llm,
    ):
        outputs = llm.generate(windows, LOGPROBS, use_tqdm=False)
    found = []
    for out in outputs:
        rows = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)
        found.append([row[token].logprob for token, row in rows])
    return found


def read_windows(model: Path, text: Path, size: int) -> list[list[int]]:
    """Returns the text's tokens in windows of ``size``. The last may be shorter."""
    tokenizer = open_checkpoint(str(model)).load_tokenizer()
    assert tokenizer is not None
    ids = tokenizer(text.read_text("utf-8"))["input_ids"]
    windows = [ids[i : i + size] for i in range(0, len(ids), size)]
    return [window for window in windows if len(window) > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=1024, help="tokens")
    parser.add_argument("--num-windows", type=int, help="default: the whole text")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    model = args.model or fetch_smollm2()
    windows = read_windows(model, args.text, args.window)[: args.num_windows]
    first: list[list[float]] = []
    print(f"{sum(map(len, windows))} tokens in {len(windows)} windows", flush=True)
    for name in args.cases:
        found = logprobs(model, windows, CASES[name], args.device, args.dtype)
        first = first or found
        mean, first_mean = (fmean(chain.from_iterable(x)) for x in (found, first))
        changes = [fmean(a) - fmean(b) for a, b in zip(first, found, strict=True)]
        error = stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan
        change = math.expm1(first_mean - mean)
        print(f"{name:20} {math.exp(-mean):8.3f}  {change:+7.2%} +- {error:.2%}", flush=True)


if __name__ == "__main__":
    main()
