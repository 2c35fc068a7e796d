"""Profiles engine steps: GPU utilisation, time per kernel, and host time."""

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

# Warm-up steps and measured steps. In a workload with decode steps they follow the prefills of the
# first batch.
DECODES = 20, 50
PREFILLS = 4, 10
NUM_KERNELS = 20


def profile_steps(llm: LLM, workload: Workload, temperature: float, trace: Path) -> dict[str, Any]:
    """Profiles decode steps after the first batch's prefills, or prefill steps if the workload has
    no decode steps.

    The profiler slows the host. So step and host times are measured first, without it, and GPU
    times then, in further steps. Only rank 0 is profiled.

    Args:
        trace: file for the trace, which chrome://tracing can show.

    Returns:
        Microseconds per step, and for each kernel its share of the GPU's busy time.

    Raises:
        ValueError: the model is not on a GPU, or the workload is too short.
    """
    if llm.model_runner.device.type != "cuda":
        raise ValueError("only steps on a GPU can be profiled")
    llm.reset_prefix_cache()
    for prompt, length in zip(workload.prompts, workload.output_lens, strict=True):
        params = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=length)
        llm.add_request(prompt, params)
    has_decodes = max(workload.output_lens) > 1
    num_warm, num_steps = DECODES if has_decodes else PREFILLS
    while has_decodes and llm.scheduler.waiting:
        llm.step()
    for _ in range(num_warm):
        llm.step()
    wait_seconds = _record_waits(llm)
    start = perf_counter()
    for _ in range(num_steps):
        llm.step()
    seconds = perf_counter() - start
    host_seconds = seconds - sum(wait_seconds)
    del llm.model_runner.wait
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            llm.step()
        torch.cuda.synchronize()
    if llm.is_finished():
        count = num_warm + 2 * num_steps
        raise ValueError(f"the workload has under {count} steps: use more or longer outputs")
    for request_id in list(llm.requests):
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


def _record_waits(llm: LLM) -> list[float]:
    """Patches ``wait`` of the model runner to record how long each call takes. Deleting the
    attribute removes the patch."""
    wait_seconds: list[float] = []
    wait = llm.model_runner.wait

    def timed_wait(step: Any) -> Any:
        start = perf_counter()
        output = wait(step)
        wait_seconds.append(perf_counter() - start)
        return output

    llm.model_runner.wait = timed_wait  # type: ignore[method-assign]
    return wait_seconds
