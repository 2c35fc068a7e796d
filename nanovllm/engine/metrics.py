"""Collects and logs the engine's metrics."""

import logging

from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.outputs import EngineMetrics
from nanovllm.utils.memory import held_bytes
from nanovllm.utils.throughput import Throughput

logger = logging.getLogger("nanovllm")


def read_metrics(
    scheduler: Scheduler, throughput: Throughput, runner: ModelRunner
) -> EngineMetrics:
    """Returns a snapshot of the metrics."""
    blocks = scheduler.block_manager
    finder = runner.prefix_finder
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
        num_shared_prefix_steps=finder.num_steps if finder else 0,
        prompt_tokens_per_second=prompt_rate,
        generated_tokens_per_second=generated_rate,
        gpu_memory_bytes=held_bytes(runner.device),
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
