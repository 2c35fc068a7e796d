"""What the parts of a layer add to a decode step: ``python -m benchmarks.decode_step [OPTIONS]``.

Options are those of ``bench.py``. With programmatic dependent launch, kernels start early and wait.
So a profiler's time of a kernel says little about what the step would take without it. Here the
step's CUDA graph is captured again without a part, and replayed. The results are of course wrong.
A part that overlaps with another one may add less than its own time.
"""

import json
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from bench import parse_args
from nanovllm import LLM, SamplingParams
from nanovllm.engine.cuda_graphs import GraphSize, uses_graphs
from nanovllm.kernels.gemm.cublas import small_cublas_workspace
from nanovllm.kernels.moe.route import Routing
from nanovllm.layers import moe
from nanovllm.layers.attention import Attention
from nanovllm.models.decoder import DecoderMLP

CONTEXT_LEN = 428
NUM_REPLAYS, NUM_REPEATS = 25, 3


def _in_decodes(replacement: Callable[..., Any], original: Callable[..., Any]) -> Any:
    """Returns a method that calls ``replacement`` for one token, and ``original`` otherwise."""

    def method(self: Any, x: Any, *args: Any) -> Any:
        return replacement(x, *args) if len(x) == 1 else original(self, x, *args)

    return method


def _route_to_first(
    logits: torch.Tensor, top_k: int, norm_topk_prob: bool, always_sorts: bool = False
) -> Routing:
    weights = logits.new_ones(len(logits), top_k, dtype=torch.float32)
    experts = torch.arange(top_k, dtype=torch.int32, device=logits.device)
    return Routing(weights / top_k, experts.expand(len(logits), top_k).contiguous())


def without(part: str) -> AbstractContextManager[Any]:
    """Makes steps with one token run without a part of each layer, in a ``with`` block.

    Args:
        part: "attention" (which includes RoPE and the store of keys and values), "MLP", "mixture"
            (norm, router and experts) or "routing" (softmax and top-k).
    """
    if part == "routing":
        return patch.object(moe, "route", _route_to_first)
    if part == "attention":
        owner, replacement = Attention, lambda q, *_: q
    else:
        owner = DecoderMLP if part == "MLP" else moe.MoE
        replacement = lambda x, residual, *_: (x, residual)  # noqa: E731
    return patch.object(owner, "forward", _in_decodes(replacement, owner.forward))


def parts_of(llm: LLM) -> list[str]:
    layers = llm.model_runner.model.model.layers
    has_experts = any(isinstance(layer.mlp, moe.MoE) for layer in layers)
    has_mlp = any(isinstance(layer.mlp, DecoderMLP) for layer in layers)
    return ["attention", *["MLP"] * has_mlp, *["mixture", "routing"] * has_experts]


def step_microseconds(llm: LLM, inputs: torch.Tensor, size: GraphSize) -> float:
    """Captures a decode, and returns the least mean time of its replays.

    Args:
        inputs: from ``decode_inputs``.
    """
    graphs: Any = llm.model_runner.graphs
    with torch.inference_mode(), small_cublas_workspace():
        graphs.capture([size])
        graphs.buffer.copy_(inputs)
    return replay_microseconds(graphs.graphs[size].graph.replay)


def replay_microseconds(replay: Callable[[], Any]) -> float:
    seconds = []
    replay()
    for _ in range(NUM_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(NUM_REPLAYS):
            replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / NUM_REPLAYS)
    return min(seconds) * 1e6


def decode_inputs(llm: LLM, input_lens: Iterable[int] = (CONTEXT_LEN,)) -> torch.Tensor:
    """Decodes sequences of these lengths and a few tokens more. Returns the contents of the graphs'
    input buffer after the last step, which all of them are in.

    Raises:
        SystemExit: steps have no CUDA graphs.
    """
    if not uses_graphs(llm.model_runner):
        raise SystemExit("a step without CUDA graphs cannot be measured: use a GPU")
    ids, vocab_size = random.Random(0), llm.model_runner.model_config.vocab_size
    prompts = [[ids.randrange(vocab_size) for _ in range(length)] for length in input_lens]
    params = SamplingParams(max_tokens=4, temperature=0.6, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)
    graphs: Any = llm.model_runner.graphs
    return graphs.buffer.clone()


def decode_size(llm: LLM, num_seqs: int = 1) -> GraphSize:
    """Returns the size of the graph of a decode."""
    graphs: Any = llm.model_runner.graphs
    sizes = (s for s in graphs.graphs if not s.is_prefill and not s.shares_prefixes)
    return min(size for size in sizes if size.num_seqs >= num_seqs)


def main() -> None:
    args = parse_args()
    args.engine |= {"max_num_seqs": 1}
    with LLM(args.model, **args.engine) as llm:
        inputs, size = decode_inputs(llm), decode_size(llm)
        num_layers = len(llm.model_runner.model.model.layers)
        step = step_microseconds(llm, inputs, size)
        record = {"model": args.model_name, "device": torch.cuda.get_device_name()}
        record |= {"context": CONTEXT_LEN, "num_layers": num_layers}
        record |= {"step_us": round(step, 1), "layer_us": {}}
        for part in parts_of(llm):
            with without(part):
                added = (step - step_microseconds(llm, inputs, size)) / num_layers
            record["layer_us"][part] = round(added, 1)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
