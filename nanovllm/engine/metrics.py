"""Collects and logs the engine's metrics."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanovllm.engine.scheduler import Scheduler
from nanovllm.utils.memory import held_bytes
from nanovllm.utils.throughput import Throughput

if TYPE_CHECKING:
    from nanovllm.engine.shared_prefixes import PrefixFinder

logger = logging.getLogger("nanovllm")


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """A snapshot of the engine's state and counters. Counters start with the engine.

    Attributes:
        num_running: the number of running sequences, which hold KV blocks.
        num_waiting: the number of waiting or preempted sequences. The completions of a prompt count
            as one until it has started.
        kv_cache_usage: the fraction of KV blocks in use, 0 to 1.
        num_prompt_tokens: the number of tokens of all prompts that have started.
        num_generated_tokens: the number of sampled tokens.
        prefix_cache_hit_rate: the fraction of prompt tokens found in the prefix cache, 0 to 1.
        num_preemptions: how many times a sequence was preempted.
        num_grouped: how many sequences that may be reordered overtook an earlier one because they
            share a prefix with a recently admitted sequence. Sequences of ``generate``,
            ``run_batch`` and ``add_request(may_reorder=True)`` may be reordered.
        num_longest_first: how many of these sequences overtook an earlier one because they, or
            sequences with the same prefix, may generate more tokens.
        num_shared_prefix_steps: the number of decode steps that read prefixes once for several
            sequences, which share their KV blocks.
        prompt_tokens_per_second: the prefill throughput in the last full window of at least 5
            seconds; before the first window ends, that so far.
        generated_tokens_per_second: the decode throughput in the same window.
        gpu_memory_bytes: the memory that PyTorch and engines with ``enable_sleep_mode`` hold on
            rank 0's GPU; None on a CPU.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_prompt_tokens: int
    num_generated_tokens: int
    prefix_cache_hit_rate: float
    num_preemptions: int
    num_grouped: int
    num_longest_first: int
    num_shared_prefix_steps: int
    prompt_tokens_per_second: float
    generated_tokens_per_second: float
    gpu_memory_bytes: int | None = None


def read_metrics(
    scheduler: Scheduler,
    throughput: Throughput,
    prefix_finder: "PrefixFinder | None",
    device: torch.device,
) -> EngineMetrics:
    """Returns a snapshot of the metrics."""
    blocks = scheduler.block_manager
    prompt_rate, generated_rate = throughput.rates()
    return EngineMetrics(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        kv_cache_usage=len(blocks.used_block_ids) / blocks.num_blocks,
        num_prompt_tokens=scheduler.num_prompt_tokens,
        num_generated_tokens=throughput.num_generated_tokens,
        prefix_cache_hit_rate=scheduler.num_cached_prompt_tokens
        / max(1, scheduler.num_prompt_tokens),
        num_preemptions=scheduler.num_preemptions,
        num_grouped=scheduler.waiting.num_grouped,
        num_longest_first=scheduler.waiting.num_longest_first,
        num_shared_prefix_steps=prefix_finder.num_steps if prefix_finder else 0,
        prompt_tokens_per_second=prompt_rate,
        generated_tokens_per_second=generated_rate,
        gpu_memory_bytes=held_bytes(device),
    )


def log_metrics(metrics: EngineMetrics) -> None:
    logger.info(
        "running %d, waiting %d, KV cache %.0f%%, prefix hits %.0f%%, preemptions %d, "
        "prefill %.0f tok/s, decode %.0f tok/s",
        metrics.num_running,
        metrics.num_waiting,
        100 * metrics.kv_cache_usage,
        100 * metrics.prefix_cache_hit_rate,
        metrics.num_preemptions,
        metrics.prompt_tokens_per_second,
        metrics.generated_tokens_per_second,
    )
