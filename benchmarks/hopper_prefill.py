"""Checks and times tiles of the prefill kernel for Hopper: on a Hopper GPU

    python -m benchmarks.hopper_prefill --output FILE [TILE ...]

Each tile has a process of its own, which is killed if it hangs. The processes compile in parallel
and take turns with the GPU: a tile that is right is timed at once. Results are appended to FILE as
they come. Rates are in TFLOP/s, counted for the keys that causal attention needs, and include the
schedule. The Triton kernel and PyTorch's FlashAttention are timed in the same way.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanovllm.kernels.attention import hopper_prefill
from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.hopper_prefill import ROWS, Tile
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.prefill import prefill_attention
from nanovllm.utils.compile_ahead import compiling_only
from nanovllm.utils.context import Context

TILES = (  # head_dim and sizes, the most promising first
    (128, Tile(2, 128, 2, 1)),
    (128, Tile(2, 128, 2, 2)),
    (64, Tile(2, 128, 4, 2)),
    (256, Tile(2, 64, 2, 1)),
    (128, Tile(2, 128, 3, 1)),
    (128, Tile(2, 128, 2, 2, ping_pong=False)),
    (64, Tile(2, 128, 4, 1)),
    (256, Tile(2, 32, 3, 2)),
    (64, Tile(3, 64, 4, 2)),
    (128, Tile(3, 64, 3, 2)),
    (64, Tile(2, 128, 2, 2, ping_pong=False)),
    (256, Tile(2, 64, 2, 1, ping_pong=False)),
    (128, Tile(2, 64, 4, 2)),
    (64, Tile(3, 64, 4, 2, ping_pong=False)),
    (256, Tile(2, 32, 4, 1)),
)
HEADS = {64: ((64, 8),), 128: ((32, 8), (16, 8)), 256: ((8, 4),)}  # query and KV heads
SHAPES = ((16, 1024), (4, 3900), (1, 8192), (1, 30000))  # prompts and their length
PAGED_SHAPES = ((4, 3900), (1, 30000))
PAGE_SIZE = 128
NUM_PROCESSES, PROCESS_SECONDS, GPU_SECONDS = 6, 100, 30
TIMING_MS = 8


class Case(NamedTuple):
    """A batch: new tokens and context length of each sequence, heads, page size or 0 for keys that
    are not paged, and whether the layer has a window, a softcap and sinks."""

    lens: tuple[tuple[int, int], ...]
    q_heads: int
    kv_heads: int
    page_size: int = 0
    has_features: bool = False


class Inputs(NamedTuple):
    """The arguments of a prefill, and the sequences' keys and values one after another."""

    args: tuple[Tensor, Tensor, Tensor, KVCache, Context, AttentionParams]
    k: Tensor
    v: Tensor


def tile_name(head_dim: int, tile: Tile) -> str:
    sizes = f"{head_dim}-{tile.num_consumers}x{ROWS}x{tile.num_keys}"
    free = "" if tile.ping_pong else "-free"
    return f"d{sizes}-q{tile.num_q_stages}-kv{tile.num_stages}{free}"


def cases_to_check(head_dim: int) -> Iterator[Case]:
    """Few kernels, because compiling takes most of the time."""
    for heads in HEADS[head_dim]:
        yield Case(((1, 1),), *heads)
        yield Case(((128, 128), (1, 1), (0, 0), (129, 129), (64, 64), (333, 333)), *heads)
        yield Case(((4097, 4097), (1024, 1024), (5, 5)), *heads)
        yield Case(((200, 200),) * 60, *heads)
        yield Case(((600, 600), (3, 512), (256, 1300), (1000, 3000)), *heads, PAGE_SIZE)
    yield Case(((1500, 1500), (40, 1100), (130, 901)), *HEADS[head_dim][0], 16, True)


def make_inputs(case: Case, head_dim: int) -> Inputs:
    """Makes random inputs, in bf16, with NaN in slots of the cache that no query may read."""
    generator = torch.Generator("cuda").manual_seed(0)

    def make(rows: int, heads: int) -> Tensor:
        size = rows, heads, head_dim
        return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

    new, lens = zip(*case.lens, strict=True)
    q, k, v = make(sum(new), case.q_heads), *(make(sum(lens), case.kv_heads) for _ in range(2))
    bounds = [torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (new, lens)]
    size, tables = case.page_size or PAGE_SIZE, None
    num_pages = [-(-n // size) for n in lens]
    cache = KVCache(k[:0], v[:0])  # not read
    if case.page_size:
        shape = sum(num_pages) + 1, size, case.kv_heads, head_dim
        cache = KVCache(*(k.new_full(shape, torch.nan) for _ in range(2)))
        pages = 1 + torch.randperm(sum(num_pages)).int()
        tables = torch.zeros(len(lens), max(num_pages), dtype=torch.int32)
        slots = []
        for i, (of_sequence, n) in enumerate(zip(pages.split(num_pages), lens, strict=True)):
            tables[i, : len(of_sequence)] = of_sequence
            position = torch.arange(n)
            slots.append(of_sequence[position // size] * size + position % size)
        for stored, x in zip(cache[:2], (k, v), strict=True):
            stored.flatten(0, 1)[torch.cat(slots).long().cuda()] = x
        tables = tables.cuda()
    context = Context(
        is_prefill=True,
        block_tables=tables,
        cu_seqlens_q=bounds[0],
        cu_seqlens_k=bounds[1],
        max_seqlen_q=max(new),
        max_seqlen_k=max(lens),
    )
    params = AttentionParams(head_dim**-0.5)
    if case.has_features:
        sinks = torch.randn(case.q_heads, generator=generator, device="cuda")
        params = params._replace(window=300, softcap=2.0, sinks=sinks)
    return Inputs((q, k, v, cache, context, params), k, v)


def reference(case: Case, x: Inputs, dtype: torch.dtype) -> Tensor:
    """Attention in PyTorch, with matmuls of ``dtype``."""
    params, group, outs = x.args[5], case.q_heads // case.kv_heads, []
    starts = accumulate(case.lens, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0))
    for (q_start, k_start), (len_q, len_k) in zip(starts, case.lens, strict=False):
        q = x.args[0][q_start : q_start + len_q].transpose(0, 1).to(dtype)
        k, v = (
            t[k_start : k_start + len_k].repeat_interleave(group, 1).transpose(0, 1).to(dtype)
            for t in (x.k, x.v)
        )
        scores = (q @ k.transpose(1, 2)).float() * params.scale
        if params.softcap:
            scores = params.softcap * (scores / params.softcap).tanh()
        age = torch.arange(len_k - len_q, len_k, device="cuda")[:, None]
        age = age - torch.arange(len_k, device="cuda")
        scores.masked_fill_((age < 0) | (age >= (params.window or len_k)), -torch.inf)
        if params.sinks is not None:
            sinks = params.sinks[:, None, None].expand(-1, len_q, 1)
            scores = torch.cat((scores, sinks), 2)
        weights = scores.softmax(2)[..., :len_k].to(dtype)
        outs.append((weights @ v).transpose(0, 1).float())
    return torch.cat(outs)


def check(case: Case, head_dim: int) -> str:
    """Compares with PyTorch in fp32. The largest error must be at most twice that of PyTorch in
    bf16. Returns what is wrong, or an empty string."""
    x = make_inputs(case, head_dim)
    out = hopper_prefill.hopper_prefill(*x.args)
    expected = reference(case, x, torch.float32)
    error = (out.float() - expected).abs()
    bound = 2 * (reference(case, x, torch.bfloat16) - expected).abs().max() + 1e-3
    wrong = ~(error <= bound)  # so that NaN is wrong
    if not wrong.any():
        return ""
    rows, heads = wrong.any(2).nonzero().unbind(1)
    return (
        f"error {error.max():.4f}, at most {bound:.4f} expected; {len(rows)} of "
        f"{wrong[..., 0].numel()} rows wrong, the first ones (row, head): "
        f"{list(zip(rows.tolist(), heads.tolist(), strict=True))[:8]}: {case}"
    )


def cases_to_time(head_dim: int) -> Iterator[tuple[str, Case]]:
    for q_heads, kv_heads in HEADS[head_dim]:
        for page_size, shapes in ((0, SHAPES), (PAGE_SIZE, PAGED_SHAPES)):
            for num_seqs, length in shapes:
                lens = ((length, length),) * num_seqs
                paged = " paged" if page_size else ""
                name = f"d{head_dim} {q_heads}/{kv_heads} {num_seqs}x{length}{paged}"
                yield name, Case(lens, q_heads, kv_heads, page_size)


def rate(function: Callable[[], Any], case: Case, head_dim: int) -> float:
    """Returns TFLOP/s."""
    flops = sum(2 * case.q_heads * head_dim * n * (n + 1) for n, _ in case.lens)
    return flops / triton.testing.do_bench_cudagraph(function, rep=TIMING_MS) / 1e9


def host_time(function: Callable[[], Any]) -> float:
    """Returns how many microseconds the host needs for a call."""
    function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        function()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / 50 * 1e6


def flash_attention(x: Inputs, num_seqs: int) -> Callable[[], Tensor]:
    q, k, v = (t.unflatten(0, (num_seqs, -1)).transpose(1, 2) for t in (x.args[0], x.k, x.v))

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


@contextmanager
def gpu_turn() -> Iterator[None]:
    """Waits until no other process checks or times, and then ends this process if it hangs."""
    torch.zeros(1, device="cuda")  # initialises CUDA before
    path = Path(tempfile.gettempdir()) / "hopper_prefill.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        def end() -> None:
            print(f"took more than {GPU_SECONDS} s on the GPU", flush=True)
            os._exit(1)

        timer = threading.Timer(GPU_SECONDS, end)
        timer.start()
        yield
        timer.cancel()


def compile_for(prefill: Callable[..., Any], head_dim: int, cases: Iterable[Case]) -> None:
    """Compiles a prefill's kernels for all cases, in parallel."""
    with compiling_only():
        for case in {case._replace(lens=((1, 1),)) for case in cases}:
            prefill(*make_inputs(case, head_dim).args)


def run_tile(head_dim: int, tile: Tile) -> None:
    """Checks a tile in all cases, and times it if all are right. Prints JSON lines."""
    hopper_prefill.TILES[head_dim] = tile
    timed = [case for _, case in cases_to_time(head_dim)]
    compile_for(hopper_prefill.hopper_prefill, head_dim, (*cases_to_check(head_dim), *timed))
    with gpu_turn():
        problems = [p for case in cases_to_check(head_dim) if (p := check(case, head_dim))]
        if problems:
            print(json.dumps({"wrong": problems}), flush=True)
            return
        print(json.dumps({"right": True}), flush=True)
        short = make_inputs(Case(((1, 1),), *HEADS[head_dim][0]), head_dim)
        time_us = host_time(partial(hopper_prefill.hopper_prefill, *short.args))
        print(json.dumps({"host microseconds": time_us}), flush=True)
        for name, case in cases_to_time(head_dim):
            x = make_inputs(case, head_dim)
            kernel = partial(hopper_prefill.hopper_prefill, *x.args)
            print(json.dumps({name: rate(kernel, case, head_dim)}), flush=True)


def run_others() -> None:
    """Times the Triton kernel and PyTorch's FlashAttention."""
    for head_dim in HEADS:
        compile_for(prefill_attention, head_dim, (case for _, case in cases_to_time(head_dim)))
    with gpu_turn():
        for head_dim in HEADS:
            short = make_inputs(Case(((1, 1),), *HEADS[head_dim][0]), head_dim)
            time_us = host_time(partial(prefill_attention, *short.args))
            print(json.dumps({"host microseconds": {"triton": time_us}}), flush=True)
            for name, case in cases_to_time(head_dim):
                x = make_inputs(case, head_dim)
                kernels = {"triton": partial(prefill_attention, *x.args)}
                if not case.page_size:
                    kernels["torch"] = flash_attention(x, len(case.lens))
                rates = {key: rate(kernel, case, head_dim) for key, kernel in kernels.items()}
                print(json.dumps({name: rates}), flush=True)


def run_child(name: str) -> Iterator[str]:
    """Yields the lines that a process for this tile prints."""
    command = [sys.executable, "-m", "benchmarks.hopper_prefill", "--child", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    timer = threading.Timer(PROCESS_SECONDS, process.kill)
    timer.start()
    assert process.stdout is not None
    yield from process.stdout
    timer.cancel()
    if process.wait() != 0:
        yield f"exit code {process.returncode}\n"


def main() -> None:
    tiles = {tile_name(head_dim, tile): (head_dim, tile) for head_dim, tile in TILES}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tiles", nargs="*", help="names of tiles; all by default")
    parser.add_argument("--output", type=Path, help="file that results are appended to")
    parser.add_argument("--child", help="run this tile, or 'others', in this process")
    options = parser.parse_args()
    if options.child:
        run_others() if options.child == "others" else run_tile(*tiles[options.child])
        return
    others: dict[str, dict[str, float]] = {}
    lock = threading.Lock()

    def report(name: str) -> None:
        for line in run_child(name):
            try:
                (key, value), *_ = json.loads(line).items()
            except (ValueError, AttributeError):
                text = f"{name}: {line.rstrip()}"
            else:
                if name == "others":
                    others[key] = value
                rates = others.get(key, {})
                known = "  ".join(f"{kernel} {r:.0f}" for kernel, r in rates.items())
                own = f"{value:.0f}" if isinstance(value, float) else value
                text = f"{name:24} {key:24} {'' if name == 'others' else own}  {known}"
            with lock:
                print(text, flush=True)
                if options.output:
                    with options.output.open("a") as file:
                        file.write(text + "\n")

    names = ["others", *(options.tiles or tiles)]
    with ThreadPoolExecutor(NUM_PROCESSES) as executor:
        list(executor.map(report, names))


if __name__ == "__main__":
    main()
