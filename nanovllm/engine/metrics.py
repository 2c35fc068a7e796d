"""Figures of a running engine: its state, and the throughput of its last seconds."""

import logging
from time import perf_counter

import torch

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step_loop import AppliedStep
from nanovllm.outputs import EngineMetrics
from nanovllm.utils.memory import held_bytes

logger = logging.getLogger("nanovllm")
WINDOW_SECONDS = 5.0


class Metrics:
    """Counts tokens, and tokens per second over the last full window, or the current one if there
    is none. Logs the figures at the end of each window.

    Attributes:
        num_generated_tokens: since the engine was made.
    """

    def __init__(self, scheduler: Scheduler, device: torch.device) -> None:
        self._scheduler = scheduler
        self._device = device
        self.num_generated_tokens = 0
        self.restart()

    def restart(self) -> None:
        """Starts a new window; the time before it does not count."""
        self._start = perf_counter()
        self._tokens = [0, 0]  # prefilled, generated
        self._full: tuple[float, float] | None = None

    def add(self, step: AppliedStep) -> None:
        """Counts a step."""
        num_prefilled, num_generated = step.num_prefilled, len(step.sampled)
        self.num_generated_tokens += num_generated
        self._tokens = [self._tokens[0] + num_prefilled, self._tokens[1] + num_generated]
        if perf_counter() - self._start >= WINDOW_SECONDS:
            rates = self._rates()
            self.restart()
            self._full = rates
            self._log()

    def rates(self) -> tuple[float, float]:
        """Returns the tokens prefilled and the tokens generated per second."""
        return self._full or self._rates()

    def read(self) -> EngineMetrics:
        """Returns all figures."""
        scheduler, blocks = self._scheduler, self._scheduler.block_manager
        prompt_rate, generated_rate = self.rates()
        return EngineMetrics(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=len(blocks.used_block_ids) / len(blocks.blocks),
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            prefix_cache_hit_rate=scheduler.num_cached_prompt_tokens
            / max(1, scheduler.num_prompt_tokens),
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens_per_second=prompt_rate,
            generated_tokens_per_second=generated_rate,
            gpu_memory_bytes=held_bytes(self._device),
        )

    def _log(self) -> None:
        now = self.read()
        logger.info(
            "running %d, waiting %d, KV cache %.0f%%, prefix hits %.0f%%, preemptions %d, "
            "prefill %.0f tok/s, decode %.0f tok/s",
            now.num_running,
            now.num_waiting,
            100 * now.kv_cache_usage,
            100 * now.prefix_cache_hit_rate,
            now.num_preemptions,
            now.prompt_tokens_per_second,
            now.generated_tokens_per_second,
        )

    def _rates(self) -> tuple[float, float]:
        seconds = max(perf_counter() - self._start, 1e-9)
        return self._tokens[0] / seconds, self._tokens[1] / seconds
