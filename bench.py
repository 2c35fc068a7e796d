"""Measures the throughput of a workload: ``python bench.py [--workload NAME] [--model MODEL]``.

Prints a JSON line, and appends it to ``--output``. A model is a checkpoint, or the name of a folder
in benchmarks/shapes/. A shape runs on random weights and downloads nothing. It uses a stand-in
tokenizer with a text for each token, so that detokenization is measured too; ``--tokenizer`` uses
another one. ``--sampling`` sets sampling parameters, and repeats each run without them.
``--profile`` reports where the time of a step goes, and writes a trace.
``--compare transformers`` also runs 32 chats with transformers' batched ``generate``, on the same
weights, dtype and threads.
"""

from time import perf_counter

START = perf_counter()  # before the imports, which are part of start-up time

# ruff: noqa: E402
import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.experts import count_experts
from benchmarks.profile import profile_steps
from benchmarks.roofline import measure_peaks, num_experts_read, roofline_seconds
from benchmarks.workloads import (
    CHATS,
    SHAPES,
    SHARED,
    Workload,
    chat_workload,
    random_workload,
    shared_workload,
)
from nanovllm import LLM, SamplingParams, __version__

OPTIONAL_PACKAGES = ["flash-attn"]
SHAPE_FOLDER = Path(__file__).parent / "benchmarks" / "shapes"


def main() -> None:
    args = parse_args()
    imported = perf_counter()
    with LLM(args.model, **args.engine) as llm:
        loaded = perf_counter()
        if args.workload in CHATS:
            workload = chat_workload(args.workload, llm.tokenizer, args.num_prompts)
        elif args.workload in SHARED:
            workload = shared_workload(args.workload, args.num_prompts)
        else:
            workload = random_workload(
                args.workload, args.num_prompts, args.input_len, args.output_len
            )
        ready = perf_counter()
        llm.generate([[0] * 8], SamplingParams(max_tokens=1), use_tqdm=False)
        first_token = perf_counter()
        llm.generate([[0] * 8], SamplingParams(max_tokens=4), use_tqdm=False)  # warm-up
        parts = llm.model_runner.startup_seconds
        record = describe(args, llm, workload)
        record["start_to_first_token_seconds"] = round(first_token - ready + loaded - START, 2)
        record["startup_parts_seconds"] = {
            "imports": round(imported - START, 2),
            "config and tokenizer": round(loaded - imported - sum(parts.values()), 2),
            **{name: round(seconds, 2) for name, seconds in parts.items()},
            "first token": round(first_token - ready, 2),
        }
        plain_seconds, seconds = [], []
        for _ in range(args.repeat):
            if args.sampling:
                plain_seconds.append(run(llm, workload, args.temperature, {})[0])
            run_seconds, done = run(llm, workload, args.temperature, args.sampling)
            seconds.append(run_seconds)
        record |= rates(done, seconds)
        metrics = llm.metrics()  # of all runs
        record["num_preemptions"] = metrics.num_preemptions
        record["num_shared_prefix_steps"] = metrics.num_shared_prefix_steps
        mlp = llm.model_runner.model_config.layers[-1].mlp
        num_seqs = min(len(workload.prompts), llm.scheduler.max_num_seqs)
        if mlp.num_experts > 1 and args.tp == 1:  # other ranks' routers cannot be observed
            record["experts_read"] = count_experts(llm, num_seqs)
            record["experts_read_if_even"] = round(num_experts_read(mlp, num_seqs), 1)
        if args.profile:
            try:
                record["profile"] = profile_steps(llm, workload, args.temperature, args.profile)
            except ValueError as error:  # the throughput is valid nevertheless
                print(f"no profile: {error}", file=sys.stderr)
        if args.sampling:
            plain = statistics.median(plain_seconds)
            record |= {
                "plain_seconds": round(plain, 3),
                "all_plain_seconds": [round(s, 3) for s in plain_seconds],
                # Compares times per token, because stop strings may have shortened outputs.
                "cost_over_plain": round(
                    record["seconds"] / done.num_output_tokens * workload.num_output_tokens / plain
                    - 1,
                    4,
                ),
            }
        # The roofline counts the keys and values of each sequence, whether shared or not.
        if llm.model_runner.device.type == "cuda" and args.workload not in SHARED:
            bandwidth, rate = measure_peaks(llm.model_runner.device)
            model = llm.model_runner.model_config
            bound = roofline_seconds(
                model,
                done,
                bandwidth * args.tp,
                rate * args.tp,
                quantizes_kv=llm.config.quantizes_kv,
                has_fp8=bool(args.quantization or model.quantization),
            )
            record |= {
                "copy_tb_per_s": round(bandwidth / 1e12, 2),
                "matmul_tflop_per_s": round(rate / 1e12),
                "roofline_seconds": round(bound, 3),
                "roofline_fraction": round(bound / record["seconds"], 3),
            }
        tokenizer = llm.tokenizer
    if args.compare:
        record |= compare_with_transformers(args.model, workload, tokenizer, record)
    line = json.dumps(record)
    print(line)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def run(
    llm: LLM, workload: Workload, temperature: float, sampling: dict[str, Any]
) -> tuple[float, Workload]:
    """Runs the workload with an empty prefix cache.

    Returns:
        The seconds, and the workload with the actual output lengths, which stop strings may have
        shortened.
    """
    basic = {"temperature": temperature, "ignore_eos": True, "n": workload.n}
    params = [
        SamplingParams(**{**basic, **sampling, "max_tokens": n}) for n in workload.output_lens
    ]
    llm.reset_prefix_cache()
    start = perf_counter()
    outputs = llm.generate(workload.prompts, params, use_tqdm=sys.stderr.isatty())
    seconds = perf_counter() - start
    produced = [len(output["token_ids"]) for output in outputs]
    if produced != workload.output_lens and not sampling.get("stop"):
        raise RuntimeError("the engine did not generate the tokens that the workload asks for")
    return seconds, replace(workload, output_lens=produced)


def rates(workload: Workload, seconds: list[float]) -> dict[str, Any]:
    """Returns the median time and its throughput, with the workload's token counts."""
    median = statistics.median(seconds)
    return {
        "seconds": round(median, 3),
        "all_seconds": [round(s, 3) for s in seconds],
        "num_output_tokens": workload.num_output_tokens,
        "output_tokens_per_second": round(workload.num_output_tokens / median, 1),
        "input_tokens_per_second": round(workload.num_input_tokens / median, 1),
    }


def compare_with_transformers(
    model: str, workload: Workload, tokenizer: Any, ours: dict[str, Any]
) -> dict[str, Any]:
    """Runs transformers' ``generate`` greedily on the same chats, as one left-padded batch.

    It decodes all rows up to the longest output length. The throughput includes only the tokens
    within each row's own output length.
    """
    from transformers import AutoModelForCausalLM

    path = Path(model)
    source = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = str(path.parent) if source else model
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source).eval()
    tokenizer.padding_side = "left"
    batch = tokenizer.pad({"input_ids": workload.prompts}, return_tensors="pt")
    longest = max(workload.output_lens)
    # The first call is a short warm-up.
    for num_tokens in (4, longest):
        start = perf_counter()
        with torch.inference_mode():
            reference.generate(
                **batch, do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens
            )
        seconds = perf_counter() - start
    theirs = workload.num_output_tokens / seconds
    return {
        "compared_with": f"transformers {version('transformers')}",
        "compared_seconds": round(seconds, 3),
        "compared_output_tokens_per_second": round(theirs, 1),
        "ratio": round(ours["output_tokens_per_second"] / theirs, 2),
    }


def describe(args: argparse.Namespace, llm: LLM, workload: Workload) -> dict[str, Any]:
    """Returns the configuration of a run, with everything needed to repeat it."""
    runner = llm.model_runner
    on_gpu = runner.device.type == "cuda"
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU {platform.machine()}",
        "num_devices": args.tp,
        "threads": None if on_gpu else torch.get_num_threads(),
        "versions": {
            "nanovllm": __version__,
            "torch": torch.__version__,
            "triton": _version("triton"),
            "python": platform.python_version(),
            # Optional packages, if installed.
            **{name: found for name in OPTIONAL_PACKAGES if (found := _version(name))},
        },
        "command": args.command,
        "model": args.model_name,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "kvcache_block_size": llm.config.block_size,
        "batch_invariant": args.batch_invariant,
        "attention_backend": runner.backend.name,
        "enforce_eager": llm.config.enforce_eager,
        "workload": workload.name,
        "sampling": args.sampling,
        "tokenizer": args.tokenizer_name if llm.tokenizer is not None else None,
        "detokenize": llm.tokenizer is not None and args.sampling.get("detokenize", True),
        "num_prompts": len(workload.prompts),
        "num_input_tokens": workload.num_input_tokens,
        "num_output_tokens": workload.num_output_tokens,
    }


def parse_args() -> argparse.Namespace:
    shapes = sorted(path.name for path in SHAPE_FOLDER.iterdir())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        help=f"checkpoint, or one of {', '.join(shapes)}; default qwen3-0.6b on a GPU, "
        f"SmolLM2-135M-Instruct on a CPU, for chats and with --compare",
    )
    parser.add_argument("--workload", choices=[*SHAPES, *SHARED, *CHATS], default="mixed256")
    parser.add_argument("--num-prompts", type=int, help="overrides the number of prompts")
    parser.add_argument("--input-len", type=_bounds, metavar="MIN[:MAX]")
    parser.add_argument("--output-len", type=_bounds, metavar="MIN[:MAX]")
    parser.add_argument("--temperature", type=float, help="default 0.6; greedy with --compare")
    parser.add_argument(
        "--sampling",
        type=json.loads,
        default={},
        metavar="JSON",
        help="""further SamplingParams, such as '{"top_p": 0.9, "top_k": 50}'""",
    )
    parser.add_argument(
        "--repeat", type=int, default=1, help="number of runs; the median is reported"
    )
    parser.add_argument("--compare", choices=["transformers"])
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="TRACE",
        help="profile some steps on a GPU, and write a trace to this file",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("bench.jsonl"),
        help="file that the JSON line is appended to; default bench.jsonl",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--tokenizer", help="folder of another tokenizer than the model's own")
    engine.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    engine.add_argument("--attention-backend", default="auto")
    engine.add_argument("--enforce-eager", action="store_true")
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--kv-cache-dtype", default="auto")
    engine.add_argument("--quantization", choices=["fp8"])
    engine.add_argument("--batch-invariant", action="store_true")
    engine.add_argument("--max-model-len", type=int, help="default: the model's own")
    engine.add_argument("--max-num-seqs", type=int, help="default: chosen by the engine")
    args = parser.parse_args()
    # The recorded command does not include ``--output``.
    args.command = f"python {shlex.join(sys.argv)}".replace(f" --output {args.output}", "")
    if args.compare:
        args.workload = "chat32"
    if args.model is None:
        on_gpu = torch.cuda.is_available() and args.workload not in CHATS
        args.model = "qwen3-0.6b" if on_gpu else _smollm2()
    args.model_name = Path(args.model).name
    if args.temperature is None:
        args.temperature = 0.0 if args.compare else 0.6
    args.tokenizer_name = Path(args.tokenizer or args.model).name
    args.engine = {
        "tokenizer": args.tokenizer,
        "tensor_parallel_size": args.tp,
        "attention_backend": args.attention_backend,
        "enforce_eager": args.enforce_eager,
        "dtype": args.dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "quantization": args.quantization,
        "batch_invariant": args.batch_invariant,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
    }
    if args.model in shapes and not os.path.exists(args.model):
        args.model = str(SHAPE_FOLDER / args.model)
        args.engine["load_format"] = "dummy"
        if args.tokenizer is None:
            from benchmarks.stand_in_tokenizer import stand_in_tokenizer

            config = json.loads(Path(args.model, "config.json").read_text())
            folder = stand_in_tokenizer(config["vocab_size"])
            args.engine["tokenizer"], args.tokenizer_name = str(folder), folder.name
    if args.compare:
        args.engine |= {"dtype": "float32", "device": "cpu"}
    return args


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def _smollm2() -> str:
    from example import fetch_smollm2

    return str(fetch_smollm2())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
