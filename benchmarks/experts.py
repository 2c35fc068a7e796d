"""Counts the distinct experts that a decode step of a mixture of experts reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.model_runner import CapturedSteps
from nanovllm.layers import moe

INPUT_LEN, OUTPUT_LEN = 100, 20


@contextmanager
def observe_routes(llm: LLM, num_tokens: int) -> Iterator[list[int]]:
    """Observes the router inside a ``with`` block. Yields a list, to which each layer of each step
    with ``num_tokens`` tokens appends its number of distinct experts. Steps run eagerly, because a
    CUDA graph cannot be observed; they route as captured ones do."""
    counts: list[int] = []
    runner, route = llm.model_runner, moe.route
    graphs, runner.graphs = runner.graphs, CapturedSteps()

    def observed(logits: torch.Tensor, *args: Any) -> Any:
        routing = route(logits, *args)
        if len(logits) == num_tokens:
            counts.append(len(routing.topk_ids.unique()))
        return routing

    moe.route = observed
    try:
        yield counts
    finally:
        moe.route, runner.graphs = route, graphs


def count_experts(llm: LLM, num_seqs: int) -> float | None:
    """Returns the mean number of distinct experts per layer and decode step, for random prompts.
    None if ``num_seqs`` sequences never run at once, because the KV cache is too small."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 500, (num_seqs, INPUT_LEN), generator=generator).tolist()
    params = SamplingParams(temperature=0.6, max_tokens=OUTPUT_LEN, ignore_eos=True)
    with observe_routes(llm, num_seqs) as counts:
        llm.generate(prompts, params, use_tqdm=False)
    return round(sum(counts) / len(counts), 1) if counts else None
