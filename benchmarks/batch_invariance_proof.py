"""Shows that ``batch_invariant=True`` gives requests the same bits in batches of any composition.

    python -m benchmarks.batch_invariance_proof qwen3-0.6b --output results.jsonl
    python -m benchmarks.batch_invariance_proof qwen3-0.6b --plant --num-requests 300

Runs the same requests in several compositions of batches: all at once, as they arrive, in a full
KV cache, in small chunks and, for some of them, one at a time. Compares a hash of each request's
tokens and of the bits of its log-probabilities. Prints a table, and exits with status 1 if a
request differs. ``--plant`` replaces a matmul by one that sums rows of small batches in another
order, which must be noticed: then the status is 1 if no request differs.
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.quantization import batch_invariant

SHAPES = Path(__file__).parent / "shapes"
Request = tuple[list[int], SamplingParams]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.8, "logprobs": 5},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.0, "top_p": 0.95, "logprobs": 1},
    {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 1.0, "min_p": 0.02, "logprobs": 1},
    {"temperature": 1.0, "n": 4, "logprobs": 1},
    {"temperature": 1.0},
)
MAX_MODEL_LEN = 4096
LONG_PROMPTS = 700, 3000  # the lengths of one prompt in 50
PREFIX = 100  # tokens that prompts share


def make_requests(num: int, vocab_size: int) -> list[Request]:
    """Makes requests of all kinds, with up to 64 tokens to generate."""
    rng = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    prefixes = [tokens(PREFIX) for _ in range(4)]
    requests = []
    for seed in range(num):
        lengths = LONG_PROMPTS if rng.random() < 0.02 else rng.choice([(1, 30), (1, 200)])
        prompt = rng.choice([[], [], [], [], *prefixes]) + tokens(rng.randint(*lengths))
        options = {"seed": seed, "max_tokens": rng.choice([1, rng.randint(2, 64)])}
        if rng.random() < 0.01:
            options["prompt_logprobs"] = 1
        kind = rng.choice(KINDS)
        requests.append((prompt, SamplingParams(**options, **kind, ignore_eos=True)))
    return requests


def digest(output: RequestOutput) -> bytes:
    """Returns a hash of the tokens and of the bits of all log-probabilities of a result."""
    assert all(completion.finish_reason == "length" for completion in output.outputs), output
    found = hashlib.sha256()
    for values in (output, *output.outputs):
        if isinstance(values, RequestOutput):
            packed = vars(values)["_prompt_logprobs"]
        else:
            packed = vars(values)["_logprobs"]
            found.update(json.dumps(values.token_ids).encode())
        if packed is not None:
            found.update(packed.rows.tobytes())
    return found.digest()


def at_once(llm: LLM, requests: list[Request]) -> list[bytes]:
    prompts, params = zip(*requests, strict=True)
    return [*map(digest, llm.generate([*prompts], [*params], use_tqdm=False))]


def one_by_one(llm: LLM, requests: list[Request]) -> list[bytes]:
    return [at_once(llm, [request])[0] for request in requests]


def as_they_arrive(llm: LLM, requests: list[Request]) -> list[bytes]:
    """Adds requests in a shuffled order, some of them every few steps."""
    rng = random.Random(1)
    order = [*range(len(requests))]
    rng.shuffle(order)
    index_of: dict[str, int] = {}
    digests = [b""] * len(requests)
    while order or not llm.is_finished():
        if order and (rng.random() < 0.5 or len(index_of) < 300):
            for _ in range(rng.randint(1, 24)):
                if order:
                    index = order.pop()
                    index_of[llm.add_request(*requests[index])] = index
        for output in llm.step():
            digests[index_of.pop(output.request_id)] = digest(output)
    return digests


def split_by_rows(linear: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a matmul that sums batches of few rows in another order, as libraries do."""

    def split(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if len(x) > 4:
            return linear(x, weight, bias)
        middle, weight = x.size(1) // 2, weight.to_dense() if weight.is_mkldnn else weight
        parts = [
            linear(x[:, k].contiguous(), weight[:, k].contiguous(), None).float()
            for k in (slice(middle), slice(middle, None))
        ]
        total = parts[0] + parts[1]
        return (total if bias is None else total + bias).to(x.dtype)

    return split


@contextmanager
def started(arguments: argparse.Namespace, **settings: Any) -> Iterator[LLM]:
    llm = LLM(
        arguments.model,
        load_format=arguments.load_format,
        skip_tokenizer_init=True,
        batch_invariant=True,
        max_model_len=MAX_MODEL_LEN,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        tensor_parallel_size=arguments.tensor_parallel_size,
        **settings,
    )
    try:
        yield llm
    finally:
        llm.close()


class Proof:
    """Compares the results of each composition with those of the first one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.expected: list[bytes] = []
        self.num_different = 0

    def compare(
        self,
        name: str,
        llm: LLM,
        requests: list[Request],
        stride: int = 1,
        run: Callable[[LLM, list[Request]], list[bytes]] = at_once,
    ) -> None:
        """Runs every ``stride``-th request. Prints and writes a row of the results."""
        scheduler = llm.scheduler
        before = scheduler.num_preemptions, scheduler.num_cached_prompt_tokens
        start = time.perf_counter()
        found = run(llm, requests[::stride])
        seconds = time.perf_counter() - start
        self.expected = self.expected or found
        pairs = zip(found, self.expected[::stride], strict=True)
        different = sum(digest != expected for digest, expected in pairs)
        self.num_different += different
        row = {
            "model": Path(self.arguments.model).name,
            "dtype": self.arguments.dtype,
            "kv_cache_dtype": self.arguments.kv_cache_dtype,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "num_devices": self.arguments.tensor_parallel_size,
            "planted": self.arguments.plant,
            "composition": name,
            "requests": len(found),
            "different": different,
            "preemptions": scheduler.num_preemptions - before[0],
            "cached": scheduler.num_cached_prompt_tokens - before[1],
            "seconds": round(seconds, 1),
        }
        print(f"{name:32} {str([*row.values()][-5:])[1:-1]}", flush=True)
        if self.arguments.output:
            with open(self.arguments.output, "a") as file:
                file.write(json.dumps(row) + "\n")


def prove(arguments: argparse.Namespace) -> int:
    """Returns the number of requests that differ, over all compositions."""
    proof, start = Proof(arguments), time.perf_counter()
    print(f"{'composition':32} requests, different, preemptions, cached tokens, seconds")
    roomy = {"max_num_seqs": 256, "enable_prefix_caching": False}
    with started(arguments, **roomy) as llm:
        vocab_size = llm.model_runner.model_config.vocab_size
        requests = make_requests(arguments.num_requests, vocab_size)
        stride = max(1, len(requests) // max(arguments.num_alone, 1))
        proof.compare("all at once", llm, requests)
        proof.compare("arrivals", llm, requests, 2, as_they_arrive)
        if arguments.num_alone:
            proof.compare("one by one", llm, requests, stride, one_by_one)
    full = {"kvcache_block_size": 16, "num_kvcache_blocks": arguments.num_blocks}
    with started(arguments, **full, max_num_seqs=192, max_num_batched_tokens=1024) as llm:
        proof.compare("full KV cache, cached prefixes", llm, requests)
        proof.compare("full KV cache, arrivals", llm, requests, 4, as_they_arrive)
    with started(arguments, **full, max_num_seqs=24, max_num_batched_tokens=128) as llm:
        proof.compare("chunks of 128 tokens", llm, requests, 5)
    print(f"{proof.num_different} results differ ({time.perf_counter() - start:.0f} s)")
    return proof.num_different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint, or a name in benchmarks/shapes")
    parser.add_argument("--num-requests", type=int, default=10_000)
    parser.add_argument("--num-alone", type=int, default=50, help="about this many run one by one")
    parser.add_argument("--num-blocks", type=int, default=300, help="in the full KV cache")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--plant", action="store_true", help="plant a matmul that must be noticed")
    parser.add_argument("--output", help="file to append JSON lines to")
    arguments = parser.parse_args()
    arguments.load_format = "auto"
    if (SHAPES / arguments.model).exists():
        arguments.model, arguments.load_format = str(SHAPES / arguments.model), "dummy"
    if not arguments.plant:
        return int(prove(arguments) > 0)
    planted = split_by_rows(batch_invariant.batch_invariant_linear)
    batch_invariant.batch_invariant_linear = planted  # type: ignore[assignment]
    return int(prove(arguments) == 0)


if __name__ == "__main__":
    raise SystemExit(main())
