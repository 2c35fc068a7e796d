"""The least time a workload can take on a device: bytes over bandwidth, or operations over rate.

Prefill is bound by arithmetic: every prompt token through every matrix, and causal attention; but
in the last layer, of all but the last one only the key and the value are needed.
Each decode step reads all weights once (or multiplies by them, whichever takes longer at its
batch size) and every sequence's keys and values once. Launches, sampling, norms and
communication are free here.
"""

from time import perf_counter

import torch

from benchmarks.workloads import Workload
from nanovllm.models.model_config import ModelConfig


def measure_ceilings(device: torch.device) -> tuple[float, float]:
    """(bytes/s of a large copy, counting reads and writes; FLOP/s of an 8192^3 bf16 product)."""
    pair = torch.randint(0, 100, (2, 1 << 29), dtype=torch.int32, device=device)
    bandwidth = pair.nbytes / _seconds(lambda: pair[0].copy_(pair[1]))
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    rate = 2 * 8192**3 / _seconds(lambda: a @ a)
    return bandwidth, rate


def floor_seconds(
    model: ModelConfig, workload: Workload, bandwidth: float, rate: float, itemsize: int = 2
) -> float:
    """Seconds for the workload with all of its sequences resident from the start."""
    kv = 2 * model.hidden_size * model.head_dim * model.num_key_value_heads
    layer = kv + 2 * model.hidden_size * model.head_dim * model.num_attention_heads
    layer += 3 * model.hidden_size * model.layers[0].mlp.intermediate_size
    head = model.vocab_size * model.hidden_size
    layers = model.num_hidden_layers * layer
    kv_bytes = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * itemsize
    attention = 4 * model.num_attention_heads * model.head_dim  # of a query and a key
    all_but_last = model.num_hidden_layers - 1

    lens = [len(prompt) for prompt in workload.prompts]
    flops = sum(
        all_but_last * (2 * layer * n + attention * n * n / 2)
        + (2 * kv * n + 2 * (layer - kv) + attention * n)
        + 2 * head
        for n in lens
    )
    seconds = flops / rate
    for step in range(1, max(workload.output_lens)):
        contexts = [
            n + step for n, out in zip(lens, workload.output_lens, strict=True) if out > step
        ]
        weights = max(
            (layers + head) * itemsize / bandwidth, 2 * (layers + head) * len(contexts) / rate
        )
        seconds += weights + sum(contexts) * kv_bytes / bandwidth
    return seconds


def _seconds(run: object, repeats: int = 10) -> float:
    """Mean time of one call, after a warm-up."""
    for count in (2, repeats):
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(count):
            run()  # type: ignore[operator]
        torch.cuda.synchronize()
    return (perf_counter() - start) / repeats
