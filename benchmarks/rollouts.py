"""Measures the calls of a training loop: ``load_weights``, ``sleep`` and ``wake_up``.

``python -m benchmarks.rollouts --model PATH`` prints one JSON line. The tensors are the
checkpoint's, on the engine's device. All times are the fastest of several runs, in ms, and include
the work that the GPU still has to do when a call returns.

With ``--cycles N``, the engine then sleeps, wakes, loads one of two sets of weights and generates,
N times. Tokens and log-probabilities must be those of the same weights before, bit for bit, and the
memory that is in use must not grow.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a directory with safetensors")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--repeat", type=int, default=5, help="number of runs")
    parser.add_argument("--cycles", type=int, default=0, help="number of times to sleep and wake")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.zeros(1, device="cuda")
        context = used_bytes(torch.device("cuda", 0))  # with nothing else on the GPU
    llm = LLM(
        args.model,
        enable_sleep_mode=True,
        gpu_memory_utilization=0.7,  # the rest is for the checkpoint's tensors
        max_num_seqs=args.max_num_seqs,
        batch_invariant=args.batch_invariant,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    device = llm.model_runner.device

    def fastest(call: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> float:
        seconds = []
        for _ in range(args.repeat):
            prepare()
            synchronize(device)
            start = perf_counter()
            call()
            synchronize(device)
            seconds.append(perf_counter() - start)
        return round(1000 * min(seconds), 1)

    def load_each() -> None:
        for pair in tensors.items():
            llm.load_weights([pair])

    def generate() -> list[Any]:
        params = [
            SamplingParams(temperature=i % 2, seed=i, max_tokens=32, ignore_eos=True, logprobs=0)
            for i in range(64)
        ]
        outputs = llm.generate([[5, 6, 7 + i] for i in range(64)], params, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        return [(completion.token_ids, completion.logprobs) for completion in completions]

    before, awake = generate(), used_bytes(device)
    result: dict[str, Any] = {"model": Path(args.model).name, "device": device_name(device)}
    llm.sleep(level=1)
    result["GiB used awake, by the whole GPU"] = round(awake / 2**30, 2)
    result["GiB used asleep, by the whole GPU"] = round(used_bytes(device) / 2**30, 2)
    if on_gpu:
        result["GiB used by a CUDA context alone"] = round(context / 2**30, 2)
        result["GiB of PyTorch asleep"] = round(torch.cuda.memory_reserved(device) / 2**30, 2)
    llm.wake_up()
    for level in (1, 2):
        sleep, wake_up = partial(llm.sleep, level), lambda: llm.is_sleeping() and llm.wake_up()
        result[f"sleep, level {level}"] = fastest(sleep, wake_up)
        wake_up()
        result[f"wake_up, level {level}"] = fastest(wake_up, sleep)
    tensors = {}
    for path in sorted(Path(args.model).glob("*.safetensors")):
        tensors |= load_file(path, str(device))
    result["tensors"] = len(tensors)
    result["load_weights, one call"] = fastest(lambda: llm.load_weights(tensors.items()))
    result["load_weights, one tensor a call"] = fastest(load_each)
    result["same tokens"] = generate() == before
    if args.cycles:

        def load(index: int) -> None:
            llm.load_weights((name, x.roll(index, 0)) for name, x in tensors.items())

        load(1)
        result |= run_cycles(llm, args.cycles, load, [before, generate()], generate)
    print(json.dumps(result))


def run_cycles(
    llm: LLM,
    num_cycles: int,
    load: Callable[[int], None],
    expected: list[Any],
    generate: Callable[[], Any],
) -> dict[str, Any]:
    """Sleeps, wakes, loads and generates again and again. ``load(i)`` loads weights with which
    ``expected[i]`` is generated."""
    device, used, num_wrong = llm.model_runner.device, [], 0
    for i in range(num_cycles):
        llm.sleep(level=1 + i % 3 % 2)
        llm.wake_up(["weights"])
        load(i % len(expected))
        llm.wake_up(["kv_cache"])
        num_wrong += generate() != expected[i % len(expected)]
        synchronize(device)
        used.append(used_bytes(device))
    return {
        "batch_invariant": llm.config.batch_invariant,
        "cycles": num_cycles,
        "cycles with other results": num_wrong,
        "results of the two sets of weights differ": expected[0] != expected[1],
        "MiB grown from the second cycle to the last": round((used[-1] - used[:2][-1]) / 2**20, 1),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def used_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    main()
