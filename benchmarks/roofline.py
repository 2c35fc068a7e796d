"""The roofline: the least time that a workload can take on a device, from its peak memory bandwidth
and matmul rate.

Prefill is compute-bound: the matmuls of all prompt tokens, and causal attention. In the last layer,
every token needs its key and value, but only a prompt's last token needs the rest. A decode step
reads all weights once, or takes the time of its matmuls if that is longer, and reads the keys and
values of each sequence once, as far as windows reach. Of a mixture's experts it reads those that
some token is routed to, on average over routings that spread tokens evenly. Launches, sampling,
norms and communication count as free.
"""

from collections import Counter
from time import perf_counter

import torch

from benchmarks.workloads import Workload
from nanovllm.kernels.attention.kv_cache import vector_bytes
from nanovllm.models.model_config import MLPSpec, ModelConfig, MoESpec

MXFP4_BYTES = 17 / 32  # a byte of scale for 32 values of 4 bits


def measure_peaks(device: torch.device) -> tuple[float, float]:
    """Measures the peaks of a GPU.

    Returns:
        Bytes/s of a large copy, counting reads and writes, and FLOP/s of an 8192^3 bf16 matmul.
    """
    pair = torch.randint(0, 100, (2, 1 << 29), dtype=torch.int32, device=device)
    bandwidth = pair.nbytes / _seconds(lambda: pair[0].copy_(pair[1]))
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    rate = 2 * 8192**3 / _seconds(lambda: a @ a)
    return bandwidth, rate


def roofline_seconds(
    model: ModelConfig,
    workload: Workload,
    bandwidth: float,
    rate: float,
    itemsize: int = 2,
    quantizes_kv: bool = False,
    has_fp8: bool = False,
) -> float:
    """Returns the least time of a workload, as if all of its sequences ran from the start.

    Args:
        bandwidth: bytes/s.
        rate: FLOP/s.
        itemsize: bytes per element of weights, other than MXFP4's, and of the KV cache.
        quantizes_kv: whether the KV cache is quantised to FP8 instead.
        has_fp8: whether the weights of the layers' matmuls are, with one byte per element. FP8
            matmuls count as twice as fast as ``rate``.
    """
    layer_itemsize, layer_rate = (1, 2 * rate) if has_fp8 else (itemsize, rate)
    # Numbers of parameters.
    kv_proj = 2 * model.hidden_size * model.head_dim * model.num_key_value_heads
    attention_proj = kv_proj + 2 * model.hidden_size * model.head_dim * model.num_attention_heads
    mlps = [layer.mlp for layer in model.layers]
    sizes = [
        mlp.top_k * 3 * model.hidden_size * mlp.intermediate_size + _router_size(model, mlp)
        for mlp in mlps
    ]
    last = attention_proj + sizes[-1]
    layers = len(sizes) * attention_proj + sum(sizes)  # those that compute a token
    head = model.vocab_size * model.hidden_size
    vector = vector_bytes(model.head_dim, itemsize, quantizes_kv)
    kv_bytes = 2 * model.num_key_value_heads * vector  # per layer and token
    windows = Counter(layer.attention.window for layer in model.layers)
    last_window = model.layers[-1].attention.window
    before_last = windows - Counter([last_window])
    attention = 4 * model.num_attention_heads * model.head_dim  # FLOP per query and key

    lens = [len(prompt) for prompt in workload.prompts]
    layer_flops = sum(
        2 * (layers - last) * n + 2 * kv_proj * n + 2 * (last - kv_proj) for n in lens
    )
    flops = sum(
        attention * sum(count * _num_pairs(n, w) for w, count in before_last.items())
        + attention * min(n, last_window or n)
        + 2 * head
        for n in lens
    )
    seconds = layer_flops / layer_rate + flops / rate
    for step in range(1, max(workload.output_lens)):
        contexts = [
            n + step for n, out in zip(lens, workload.output_lens, strict=True) if out > step
        ]
        size = len(contexts)
        weight_bytes = len(sizes) * attention_proj * layer_itemsize + head * itemsize
        for mlp in mlps:
            experts = num_experts_read(mlp, size) * 3 * model.hidden_size * mlp.intermediate_size
            weight_bytes += experts * (MXFP4_BYTES if is_mxfp4(mlp) else layer_itemsize)
            weight_bytes += _router_size(model, mlp) * itemsize
        matmul_seconds = 2 * size * (layers / layer_rate + head / rate)
        weights_seconds = max(weight_bytes / bandwidth, matmul_seconds)
        read = sum(count * sum(min(n, w or n) for n in contexts) for w, count in windows.items())
        seconds += weights_seconds + read * kv_bytes / bandwidth
    return seconds


def _num_pairs(length: int, window: int | None) -> float:
    """Returns the number of pairs of a query and a key that it attends to, in a prompt."""
    window = min(length, window or length)
    return window * length - window * window / 2


def is_mxfp4(mlp: MLPSpec | MoESpec) -> bool:
    return isinstance(mlp, MoESpec) and mlp.mxfp4


def num_experts_read(mlp: MLPSpec | MoESpec, num_tokens: int) -> float:
    """Returns the expected number of distinct experts that ``num_tokens`` tokens are routed to."""
    return mlp.num_experts * (1 - (1 - mlp.top_k / mlp.num_experts) ** num_tokens)


def _router_size(model: ModelConfig, mlp: MLPSpec | MoESpec) -> int:
    return model.hidden_size * mlp.num_experts if mlp.num_experts > 1 else 0


def _seconds(run: object, repeats: int = 10) -> float:
    """Returns the mean time of a call, after a warm-up."""
    for count in (2, repeats):
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(count):
            run()  # type: ignore[operator]
        torch.cuda.synchronize()
    return (perf_counter() - start) / repeats
