"""Where a step's time goes: how busy the GPU is, with which kernels, and what the host does."""

import re
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.workloads import Workload
from nanovllm import LLM, SamplingParams

# Steps to run first, and to time and to record: of decodes, after the prompts that fit at once have
# been computed; or of a workload of nothing but prefills.
DECODES = 20, 50
PREFILLS = 4, 10
NUM_KERNELS = 20


def profile_steps(llm: LLM, workload: Workload, temperature: float, trace: Path) -> dict[str, Any]:
    """Runs the workload's first steps after its first wave of prefills (these themselves, if there
    is nothing else), writes a trace of them that chrome://tracing shows, and says in microseconds
    per step where the time went.

    Of several ranks, rank 0's. Shares of the GPU's time are of its busy time; recording costs
    the host some, so its own time is that of as many steps before, without.

    Raises:
        ValueError: the model is not on a GPU, or the workload is too short.
    """
    if llm.model_runner.device.type != "cuda":
        raise ValueError("only steps on a GPU can be profiled")
    llm.reset_prefix_cache()
    for prompt, length in zip(workload.prompts, workload.output_lens, strict=True):
        params = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=length)
        llm.add_request(prompt, params)
    decodes = max(workload.output_lens) > 1
    num_warm, num_steps = DECODES if decodes else PREFILLS
    while decodes and llm.scheduler.waiting:
        llm.step()
    for _ in range(num_warm):
        llm.step()
    waited = _watch_waiting(llm)
    start = perf_counter()
    for _ in range(num_steps):
        llm.step()
    seconds = perf_counter() - start
    host_seconds = seconds - sum(waited)
    del llm.model_runner.wait
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            llm.step()
        torch.cuda.synchronize()
    if llm.is_finished():
        raise ValueError("the workload ends before so many steps: more prompts or longer outputs")
    for request_id in list(llm._requests):
        llm.abort_request(request_id)
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    events = [e for e in profiler.events() or [] if e.device_type == DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        name = re.sub(r"<.*|\(.*", "", event.name)[:60]
        times[name] += event.time_range.end - event.time_range.start
        counts[name] += 1
    return {
        "step_us": round(seconds / num_steps * 1e6, 1),
        "host_us_per_step": round(host_seconds / num_steps * 1e6, 1),
        "gpu_busy_share": round(busy / (end - spans[0][0]), 4),
        "gpu_busy_us_per_step": round(busy / num_steps, 1),
        "kernels_per_step": round(len(events) / num_steps, 1),
        "kernels": [
            {
                "name": name,
                "per_step": round(counts[name] / num_steps, 2),
                "mean_us": round(time / counts[name], 2),
                "share": round(time / sum(times.values()), 4),
            }
            for name, time in times.most_common(NUM_KERNELS)
        ],
    }


def _watch_waiting(llm: LLM) -> list[float]:
    """Collects how long each step's results are waited for, until ``wait`` is deleted again."""
    waited: list[float] = []
    wait = llm.model_runner.wait

    def watching(step: Any) -> Any:
        start = perf_counter()
        output = wait(step)
        waited.append(perf_counter() - start)
        return output

    llm.model_runner.wait = watching  # type: ignore[method-assign]
    return waited
