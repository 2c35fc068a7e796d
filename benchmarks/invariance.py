"""Batch invariance on a GPU: which kernels and tiles have the same bits, and how long they take.

    python -m benchmarks.invariance --output results.jsonl

Compares the bits of each row's result between batches of different sizes and, for the GEMM and
attention, between tiles. Then measures times against cuBLAS and the default kernels. Prints tables,
and writes each row to ``--output`` as a JSON line. A part that fails is reported, and the others
run. ``--compile-only`` needs no GPU: it compiles the kernels for Hopper, and prints their
registers, spills and shared memory.
"""

import argparse
import json
import re
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.attention import fixed_schedule
from nanovllm.kernels.attention import invariant as attention
from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.triton_backend import TritonAttention
from nanovllm.kernels.gemm import invariant as gemm
from nanovllm.kernels.gemm.invariant import Launch, launch_linear
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.rope import CacheSlots, NewKV, RopeInputs, apply_rope_and_store
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.quantization.unquantized import choose_kernel
from nanovllm.utils.context import Context

DEVICE = "cuda"
# Output and input features of Qwen3-8B, Qwen3-0.6B and their LM heads.
SHAPES = (
    (6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288),
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072),
    (151_936, 1024), (151_936, 4096),
)  # fmt: skip
ROWS = (1, 2, 8, 16, 17, 64, 65, 256, 1000, 4096)
TIMED_ROWS = (1, 16, 64, 128, 256, 1024, 16_384)
LARGEST_OUTPUT = 1 << 29  # elements; larger results are not computed
# Instructions for 16 features of one warp (mma.sync on Hopper too), to compare bits only.
MMA_SYNC_TILE = gemm.Tile(16, 16, 64, 1, 3)
CACHE_BYTES = (
    200 << 20
)  # timed weights and contexts take at least this much, more than the L2 cache
# Query heads, KV heads, head size and features of Qwen3-8B, Qwen3-0.6B, gpt-oss and Gemma.
HEADS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "8B": (32, 8, 128, {}),
    "0.6B": (16, 8, 128, {}),
    "gpt-oss": (64, 8, 64, {"window": 128, "sinks": True}),
    "gemma": (8, 4, 256, {"window": 1024, "softcap": 50.0}),
}
CONTEXT = 5000
MOST_SPILLED = 128  # bytes per thread; so few are spilled outside of the inner loops
BLOCK_SIZE = 128


class Report:
    """Prints results, and appends them to a file as JSON lines."""

    def __init__(self, output: str | None) -> None:
        self.file = open(output, "a") if output else None  # noqa: SIM115
        self.failed = 0

    def row(self, part: str, **values: Any) -> None:
        print("  ".join(f"{name}={value}" for name, value in values.items()), flush=True)
        if self.file:
            self.file.write(json.dumps({"part": part, **values}, default=str) + "\n")
            self.file.flush()

    def run(self, part: Callable[["Report"], None]) -> None:
        start = time.perf_counter()
        print(f"\n== {part.__doc__}", flush=True)
        self.attempt(part)
        print(f"({time.perf_counter() - start:.0f} s)", flush=True)

    def attempt(self, case: Callable[..., None], *arguments: Any) -> None:
        """Runs a case. An exception is a row of the results."""
        try:
            case(self, *arguments)
        except Exception:
            self.failed += 1
            name = f"{case.__name__} {arguments}"
            self.row("errors", case=name, error=traceback.format_exc())


def num_different(a: Tensor, b: Tensor) -> int:
    """Returns the number of rows that differ in some bit."""
    integer = torch.int32 if a.dtype is torch.float32 else torch.int16
    return int((a.view(integer) != b.view(integer)).flatten(1).any(1).sum())


def make(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def launches(out_features: int, width: int, x: Tensor) -> Iterator[Launch]:
    """Yields all launches that a GEMM may use."""
    is_split = gemm.part_columns(out_features, width) < width
    for tile in gemm.choose_tiles(x, out_features):
        yield Launch(tile, False)
        if is_split:
            yield Launch(tile, True)


def name_of(launch: Launch) -> str:
    tile = launch.tile
    return f"{tile.rows}x{tile.features}{' parallel' if launch.is_parallel else ''}"


def gemm_bits(report: Report) -> None:
    """GEMM: rows whose bits differ from those of the first tile, by number of rows in the batch"""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in SHAPES if dtype is torch.bfloat16 else SHAPES[1:6:2]:
            report.attempt(gemm_bits_of, dtype, *shape)


def gemm_bits_of(report: Report, dtype: torch.dtype, out: int, width: int) -> None:
    most = ROWS[-1] if out < 100_000 else min(ROWS[-1], 1000)
    x, weight = make(most, width, dtype=dtype), make(out, width, dtype=dtype, scale=0.02)
    all_launches = list(launches(out, width, x))
    expected = launch_linear(x, weight, None, None, all_launches[0])
    tiles = {name_of(launch): launch for launch in all_launches}
    if dtype.itemsize == 2:
        tiles["16x16 mma.sync"] = Launch(MMA_SYNC_TILE, gemm.num_parts(out, width) > 1)
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        name: lambda x, launch=launch: launch_linear(x, weight, None, None, launch)
        for name, launch in tiles.items()
    }
    forms["chosen"] = lambda x: gemm.invariant_linear(x, weight, None)
    forms["cuBLAS"] = lambda x: F.linear(x, weight)
    if gemm.num_parts(1, width) == gemm.num_parts(out, width) == 1:
        # With the roles of x and the weight swapped, which would make the epilogue cheaper.
        forms["x as M"] = lambda x: (
            launch_linear(weight, x, None, None, all_launches[0]).t().contiguous()
        )
    for name, form in forms.items():
        is_slow = name in ("16x16 mma.sync", "x as M")
        different = {}
        for rows in ROWS:
            if rows > (min(most, 65) if is_slow else most):
                continue
            parts = slice(0, rows), slice(most - rows, most)
            different[rows] = sum(num_different(form(x[part]), expected[part]) for part in parts)
        detail = str(different) if any(different.values()) else "all equal"
        report.row("gemm_bits", dtype=dtype, shape=(out, width), form=name, result=detail)


class Batch:
    """Sequences in a paged KV cache with shuffled blocks; ``copies`` of the cache, so that repeated
    calls do not find it in the L2 cache."""

    def __init__(self, model: str, lens: list[int], dtype: torch.dtype, copies: int = 1) -> None:
        self.q_heads, self.kv_heads, self.head_dim, features = HEADS[model]
        self.lens, self.dtype = lens, dtype
        if features.get("sinks"):
            features = features | {"sinks": torch.randn(self.q_heads, device=DEVICE)}
        self.params = AttentionParams(self.head_dim**-0.5, **features)
        counts = [-(-n // BLOCK_SIZE) for n in lens]
        order = torch.randperm(sum(counts), dtype=torch.int32)
        self.tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
        for i, blocks in enumerate(order.split(counts)):
            self.tables[i, : len(blocks)] = blocks
        self.tables = self.tables.to(DEVICE)
        shape = sum(counts), BLOCK_SIZE, self.kv_heads, self.head_dim
        self.caches = [
            KVCache(make(*shape, dtype=dtype), make(*shape, dtype=dtype)) for _ in range(copies)
        ]
        self.cache = self.caches[0]
        self.angles = torch.rand(max(lens), self.head_dim, device=DEVICE)

    def qkv(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.q_heads, self.kv_heads, self.kv_heads
        packed = make(num_tokens, sum(heads), self.head_dim, dtype=self.dtype)
        return packed.split(heads, dim=1)  # type: ignore[return-value]

    def store(self, k: Tensor, v: Tensor) -> None:
        """Stores the keys and values of the first sequence."""
        for new, cache in ((k, self.cache.k), (v, self.cache.v)):
            for i, rows in enumerate(new.split(BLOCK_SIZE)):
                cache[self.tables[0, i], : len(rows)] = rows

    def prefill(self, backend: Any, q: Tensor, k: Tensor, v: Tensor, new: list[int], paged: bool):
        def bounds(lens: list[int]) -> Tensor:
            return torch.tensor([0, *lens]).cumsum(0).int().to(DEVICE)

        context = Context(
            is_prefill=True,
            block_tables=self.tables if paged else None,
            cu_seqlens_q=bounds(new),
            cu_seqlens_k=bounds(self.lens),
            max_seqlen_q=max(new),
            max_seqlen_k=max(self.lens),
        )
        return backend.prefill(q, k, v, self.cache, context, self.params)

    def decode_context(self, backend: Any) -> Context:
        """Also for sequences that all share the blocks of the first one."""
        lens = np.array(self.lens, np.int32)
        heads = self.q_heads, self.kv_heads, self.head_dim
        schedule = backend.split_kv(lens, *heads, self.dtype, False, self.params.window)
        pages = (torch.from_numpy(lens) - 1).to(DEVICE).long()
        tables = self.tables if len(self.tables) == len(lens) else self.tables[:1]
        tables = tables.expand(len(lens), -1)
        block = tables.gather(1, pages[:, None] // BLOCK_SIZE)[:, 0]
        return Context(
            slot_mapping=(block * BLOCK_SIZE + pages % BLOCK_SIZE).int(),
            block_tables=tables.contiguous(),
            context_lens=torch.from_numpy(lens).to(DEVICE),
            split_kv_schedule=torch.from_numpy(schedule).to(DEVICE),
            max_seqlen_k=max(self.lens),
        )


def attention_bits(report: Report) -> None:
    """Attention: rows whose bits differ from those of one prefill of 5,000 tokens"""
    for model in HEADS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            report.attempt(attention_bits_of, model, dtype)


def attention_bits_of(report: Report, model: str, dtype: torch.dtype) -> None:
    backend = attention.InvariantTritonAttention()
    batch = Batch(model, [CONTEXT], dtype)
    q, k, v = (x.contiguous() for x in batch.qkv(CONTEXT))
    batch.store(k, v)
    expected = batch.prefill(backend, q, k, v, [CONTEXT], paged=False)

    def compare(form: str, found: Tensor, rows: Any) -> None:
        result = num_different(found, expected[rows])
        report.row(
            "attention_bits", model=model, dtype=dtype, form=form,
            rows=len(found), different=result,
        )  # fmt: skip

    compare("paged", batch.prefill(backend, q, k, v, [CONTEXT], paged=True), slice(None))
    for size in (s for s in (1, 7, 64, 255, 256, 513, 2048) if s <= CONTEXT):
        ends = range(size, CONTEXT + 1, max(size, CONTEXT // 20))
        chunks, rows = [], []
        for end in ends:
            batch.lens = [end]
            own = slice(end - size, end)
            chunks.append(batch.prefill(backend, q[own], k, v, [size], paged=True))
            rows += range(end - size, end)
        compare(f"chunks of {size}", torch.cat(chunks), rows)
    edges = [n for s in (16, 64, 256, 512, 1024, 4096) for n in (s - 1, s, s + 1) if n < CONTEXT]
    for lens in ([*edges, CONTEXT], list(range(1, CONTEXT, 9)), [CONTEXT], [CONTEXT // 7], [1]):
        batch.lens = lens
        context = batch.decode_context(backend)
        rows = [n - 1 for n in lens]
        found = backend.decode(q[rows], batch.cache, context, batch.params)
        compare(f"decode of {len(lens)}", found, rows)
        with patch.object(fixed_schedule, "EXTRA_ROWS", 3):
            context = batch.decode_context(backend)
            found = backend.decode(q[rows], batch.cache, context, batch.params)
        compare(f"decode of {len(lens)}, splits in sequence", found, rows)
    if dtype is torch.float32:
        return
    # Other tiles, which may replace the only one if their bits are the same.
    batch.lens = [CONTEXT]
    keys = attention.choose_tile(1, batch.head_dim, dtype, 227 << 10).num_keys
    for tile in (attention.Tile(128, keys, 8, 2), attention.Tile(16, keys, 1, 2)):
        with patch.object(attention, "choose_tile", lambda *_, tile=tile: tile):
            found = batch.prefill(backend, q, k, v, [CONTEXT], paged=True)
        compare(f"{tile.num_rows} rows, {tile.num_warps} warps", found, slice(None))


def other_bits(report: Report) -> None:
    """Other kernels: rows whose bits differ from those of a batch of 1,000 rows"""
    batch = Batch("0.6B", [1000], torch.bfloat16)
    x, residual, wide = make(1000, 4096), make(1000, 4096), make(1000, 6144)
    weight, q_weight = make(4096), make(128)
    q, k, v = batch.qkv(1000)
    positions = torch.arange(1000, dtype=torch.int32, device=DEVICE)

    def rope(rows: slice) -> Tensor:
        inputs = RopeInputs(positions[rows], batch.angles, q_weight, q_weight, 1e-6)
        slots = CacheSlots(batch.cache, positions[rows])
        return torch.cat(apply_rope_and_store(inputs, q[rows], k[rows], v[rows], slots), 1)

    forms: dict[str, Callable[[slice], Tensor]] = {
        "rms_norm": lambda rows: rms_norm(x[rows], weight, 1e-6)[0],
        "rms_norm of a sum": lambda rows: rms_norm(x[rows], weight, 1e-6, residual[rows])[0],
        "silu_and_mul": lambda rows: silu_and_mul(wide[rows]),
        "rope": rope,
    }
    for name, form in forms.items():
        expected = form(slice(None))
        counts = {
            n: num_different(form(slice(1000 - n, 1000)), expected[1000 - n :]) for n in ROWS[:-2]
        }
        report.row("other_bits", kernel=name, different=counts)


def microseconds(calls: list[Callable[[], Any]], repeats: int = 0) -> float:
    """Returns the mean time of the calls, replayed in a CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = 1
    while True:  # at least 10 ms
        graph.replay()
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        if start.elapsed_time(end) > 10 or count >= 100:
            return start.elapsed_time(end) * 1000 / count / len(calls)
        count *= 4


def gemm_times(report: Report) -> None:
    """GEMM: microseconds in CUDA graphs; "best" is the fastest of all tiles"""
    for out, width in SHAPES:
        copies = min(40, max(1, CACHE_BYTES // (out * width * 2)))
        weights = [make(out, width, scale=0.02) for _ in range(copies)]
        for rows in TIMED_ROWS:
            if rows * out <= LARGEST_OUTPUT:
                report.attempt(gemm_times_of, rows, weights if rows <= 1024 else weights[:1])


def gemm_times_of(report: Report, rows: int, weights: list[Tensor]) -> None:
    out, width = weights[0].shape
    x = make(rows, width)

    def timed(form: Callable[..., Any], *more: Any) -> float:
        return microseconds([lambda w=w: form(x, w, None, *more) for w in weights])

    times = {
        name_of(launch): timed(launch_linear, None, launch)
        for launch in launches(out, width, x)
        if rows * out * launch.is_parallel * gemm.num_parts(out, width) <= gemm.MAX_PARTS_NUMEL
        and launch.tile.rows <= 4 * max(rows, 16)
        and rows <= 128 * launch.tile.rows
    }
    chosen = name_of(
        gemm.choose_launch(
            rows, out, width, gemm.choose_tiles(x, out), gemm.num_multiprocessors(x.device)
        )
    )
    cublas, ours = timed(F.linear), timed(gemm.invariant_linear)
    best = min(times, key=times.__getitem__)
    report.row(
        "gemm_times",
        shape=(out, width),
        rows=rows,
        cublas=round(cublas, 1),
        default=round(timed(choose_kernel("matmul", x, weights[0], None)), 1),
        ours=round(ours, 1),
        ratio=round(ours / cublas, 2),
        chosen=chosen,
        best=best,
        best_ratio=round(times[best] / cublas, 2),
        tflops=round(2e-6 * rows * out * width / ours),
        gb_per_s=round((out * width + rows * (out + width)) * 2e-3 / ours),
        all={name: round(us, 1) for name, us in times.items()},
    )


def attention_times(report: Report) -> None:
    """Attention, of decodes with RoPE and the store of new keys: microseconds in CUDA graphs"""
    for model, lens in (
        ("8B", [600] * 256), ("0.6B", [600] * 256), ("0.6B", [300] * 256), ("8B", [600] * 16),
        ("8B", [600]), ("8B", [4000] * 16), ("8B", [30_000]), ("8B", [30_000, *[500] * 63]),
    ):  # fmt: skip
        report.attempt(decode_times_of, model, lens)
    for model, lens in (
        ("8B", [1024] * 16), ("8B", [8192]), ("0.6B", [1024] * 16), ("0.6B", [8192]),
        ("gpt-oss", [1024] * 16), ("gemma", [1024] * 16),
    ):  # fmt: skip
        for paged in (False, True):
            report.attempt(prefill_times_of, model, lens, paged)


def decode_times_of(report: Report, model: str, lens: list[int]) -> None:
    copies = max(1, CACHE_BYTES // (sum(lens) * 4096))
    batch = Batch(model, lens, torch.bfloat16, min(20, copies))
    q, k, v = batch.qkv(len(lens))
    positions = torch.tensor(lens, dtype=torch.int32, device=DEVICE) - 1
    weight = make(batch.head_dim)
    rope = RopeInputs(positions, batch.angles, weight, weight, 1e-6)
    default, ours = TritonAttention(), attention.InvariantTritonAttention()
    contexts = [batch.decode_context(backend) for backend in (default, ours)]

    def decode_default(cache: KVCache) -> None:
        default.decode(q, cache, contexts[0], batch.params, NewKV(rope, k, v))

    def decode_ours(cache: KVCache) -> None:
        assert contexts[1].slot_mapping is not None
        slots = CacheSlots(cache, contexts[1].slot_mapping)
        turned, _ = apply_rope_and_store(rope, q, k, v, slots)
        ours.decode(turned, cache, contexts[1], batch.params)

    times = [
        microseconds([lambda form=form, cache=cache: form(cache) for cache in batch.caches])
        for form in (decode_default, decode_ours)
    ]
    report_times(report, f"decode {model}, {len(lens)} of {min(lens)} to {max(lens)}", times)


def prefill_times_of(report: Report, model: str, lens: list[int], paged: bool) -> None:
    batch = Batch(model, lens, torch.bfloat16)
    q, k, v = batch.qkv(sum(lens))
    times = [
        microseconds([prefill_call(batch, backend, q, k, v, paged)])
        for backend in (TritonAttention(), attention.InvariantTritonAttention())
    ]
    flops = 2 * batch.q_heads * batch.head_dim * sum(n * n for n in lens)
    name = f"prefill {model}, {len(lens)} of {max(lens)}{', paged' if paged else ''}"
    report_times(report, name, times, causal_tflops=round(flops / times[1] / 1e6))


def prefill_call(batch: Batch, backend: Any, q: Tensor, k: Tensor, v: Tensor, paged: bool) -> Any:
    """Returns a call of a prefill without copies to the GPU, which graphs cannot capture."""
    recorded: dict[str, Any] = {}

    class Recorder:
        def prefill(self, *arguments: Any) -> None:
            recorded["arguments"] = arguments

    batch.prefill(Recorder(), q, k, v, batch.lens, paged)
    return lambda: backend.prefill(*recorded["arguments"])


def report_times(report: Report, name: str, times: list[float], **more: Any) -> None:
    default, ours = times
    ratio = round(ours / default, 2)
    report.row(
        "attention_times", case=name, default=round(default, 1), ours=round(ours, 1),
        ratio=ratio, **more,
    )  # fmt: skip


def compile_kernels(report: Report) -> None:
    """Registers, spilled bytes and shared memory, compiled for Hopper"""
    from tests.kernels import compile_for_hopper

    compiled = compile_for_hopper.compile_only()
    gemm.is_hopper_or_newer = lambda device: True  # type: ignore[assignment]
    gemm.shared_memory = attention.shared_memory = lambda device: (  # type: ignore[attr-defined]
        compile_for_hopper.SHARED_MEMORY
    )
    seen = 0

    def print_new(name: str) -> None:
        nonlocal seen
        for kernel_name, kernel in compiled[seen:]:
            registers, spilled = resources(kernel)
            report.row(
                "compile", kernel=kernel_name.strip("_"), form=name, registers=registers,
                spilled=spilled, shared=kernel.metadata.shared,
            )  # fmt: skip
            report.failed += spilled > MOST_SPILLED
        seen = len(compiled)

    for dtype in (torch.bfloat16, torch.float32):
        for out, width in ((4096, 1024), (1024, 4096)):
            x, weight = torch.zeros(300, width, dtype=dtype), torch.zeros(out, width, dtype=dtype)
            for launch in launches(out, width, x):
                launch_linear(x, weight, None, None, launch)
                print_new(f"{str(dtype)[6:]} {out}x{width} {name_of(launch)}")
        launch_linear(
            x, weight, weight[:, 0].contiguous(), torch.zeros(300, out, dtype=dtype), launch
        )
        print_new(f"{str(dtype)[6:]} {name_of(launch)}, bias and residual")
    for model, (q_heads, kv_heads, head_dim, features) in HEADS.items():
        sinks = {"sinks": torch.zeros(q_heads)} if features.get("sinks") else {}
        case = AttentionParams(1.0, **(features | sinks))
        compile_for_hopper.launch_invariant_attention(
            torch.bfloat16, q_heads, kv_heads, head_dim, case
        )
        print_new(model)


def resources(kernel: Any) -> tuple[int, int]:
    """Returns the registers per thread and the bytes of stack, where spilled registers go."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        tool = knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "-res-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", help="file to append JSON lines to")
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--parts", nargs="*", help="names of functions to run; default: all")
    arguments = parser.parse_args()
    report = Report(arguments.output)
    parts = [gemm_bits, attention_bits, other_bits, gemm_times, attention_times]
    if arguments.parts:
        parts = [part for part in parts if part.__name__ in arguments.parts]
    if arguments.compile_only:
        parts = [compile_kernels]
    else:
        torch.manual_seed(0)
        device = torch.cuda.get_device_name()
        report.row(
            "device",
            device=device,
            torch=torch.__version__,
            capability=torch.cuda.get_device_capability(),
        )
    for part in parts:
        report.run(part)
    return report.failed


if __name__ == "__main__":
    raise SystemExit(main())
