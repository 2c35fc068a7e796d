"""Prefill attention for Hopper in Gluon: a prototype's launcher, check and benchmark.

python -m benchmarks.gluon_prefill --output FILE     checks and times every tile, on a GPU
python -m benchmarks.gluon_prefill --compile-only    compiles every tile, without a GPU
"""

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benchmarks.gluon_kernel import LOG2_E, MANY, ROWS, Sizes, prefill_kernel


class Tile(NamedTuple):
    """Sizes of the kernel for one head size.

    Attributes:
        head_dim: size of a head.
        num_consumers: consumers, of 64 rows of queries each.
        num_keys: BLOCK_N, keys per tile.
        num_stages: tiles of keys, and of values, in shared memory; at most 4.
        num_q_stages: 1, or 2 for tiles of queries of this and of the next item in shared memory.
        ping_pong: whether the consumers take turns with the tensor cores.
        named_barriers: whether consumers tell the producer by named barriers, instead of mbarriers,
            that they have read a tile.
    """

    head_dim: int
    num_consumers: int
    num_keys: int
    num_stages: int
    num_q_stages: int = 2
    ping_pong: bool = True
    named_barriers: bool = True

    @property
    def name(self) -> str:
        turns = ("" if self.ping_pong else "-free") + ("" if self.named_barriers else "-mbar")
        sizes = f"d{self.head_dim}-{self.num_consumers}x{ROWS}x{self.num_keys}"
        return f"{sizes}-q{self.num_q_stages}-kv{self.num_stages}{turns}"


TILES = (
    Tile(128, 2, 128, 2),
    Tile(128, 2, 128, 2, named_barriers=False),
    Tile(128, 2, 128, 2, ping_pong=False),
    Tile(128, 2, 128, 2, num_q_stages=1),
    Tile(128, 2, 128, 3, num_q_stages=1),
    Tile(128, 2, 64, 4),
    Tile(128, 3, 64, 3),
    Tile(64, 3, 64, 4),
    Tile(64, 3, 64, 4, ping_pong=False),
    Tile(64, 2, 128, 4),
    Tile(256, 2, 64, 2, num_q_stages=1),
    Tile(256, 2, 32, 2),
)


def schedule(
    lens_q: list[int], lens_k: list[int], num_rows: int, window: int = 0, paged: bool = False
) -> np.ndarray:
    """Cuts the queries of each sequence into tiles, those that attend to the most keys first.

    A model's layers share the result, so it is made once per step, on the host.

    Args:
        lens_q, lens_k: new tokens and context length of each sequence.
        num_rows: rows of queries per tile.
        window: keys that a token attends to; 0 for all.
        paged: whether keys are found through a block table.

    Returns:
        int32 [num_tiles, 4]: of each tile the first row of queries; the row of the sequence's first
        key, or the row of its block table; the first query's position; and the number of queries.
    """
    q, k = np.array(lens_q), np.array(lens_k)
    counts = -(-q // num_rows)
    seq = np.repeat(np.arange(len(q)), counts)
    offset = (np.arange(len(seq)) - np.repeat(counts.cumsum() - counts, counts)) * num_rows
    rows = np.minimum(q[seq] - offset, num_rows)
    position = (k - q)[seq] + offset
    start = seq if paged else (k.cumsum() - k)[seq]
    tiles = np.stack(((q.cumsum() - q)[seq] + offset, start, position, rows), axis=1)
    num_keys = position + rows - (np.maximum(position + 1 - window, 0) if window else 0)
    return tiles[np.argsort(-num_keys, kind="stable")].astype(np.int32)


def ragged_descriptor(x: Tensor, num_rows: int) -> TensorDescriptor:
    """Describes the rows of x, [N, heads, head_dim], to the TMA, in boxes of ``num_rows`` rows of a
    head. A box at (MANY, start + size, MANY - size + row, column) begins at row ``start + row``.
    Its rows from ``start + size`` on are out of bounds: they are read as zeros and not written.
    Addresses wrap around at 2^64, where the strides let the constants cancel. Triton's
    tools/ragged_tma.py has this idea.
    """
    stride, width = x.stride(0), x.size(1) * x.size(2)
    assert x.stride()[1:] == (x.size(2), 1)
    return TensorDescriptor(
        x,
        [0x7FFF0000, 0x7FFF0000, MANY, width],
        [(1 << 34) - stride, stride, stride, 1],
        [1, 1, num_rows, x.size(2)],
        NVMMASharedLayout(128, 16, 4),
    )


class Case(NamedTuple):
    """A batch, and the parameters of a layer: ``len_q`` and ``len_k`` of each sequence, heads, and
    the window, softcap, sinks and page size, if any."""

    lens: tuple[tuple[int, int], ...]
    q_heads: int = 4
    kv_heads: int = 2
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    page_size: int = 0


class Inputs(NamedTuple):
    """The tensors of a case. k and v are [rows, kv_heads, head_dim], pages one after another."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: Tensor | None
    sinks: Tensor | None


def prefill(tile: Tile, case: Case, x: Inputs, tiles: Tensor, out: Tensor) -> Any:
    """Launches the kernel, or only compiles it if the inputs are not on a GPU. Returns it.

    Args:
        tile: sizes of the kernel.
        case: what ``tiles`` and ``x`` were made for.
        x: inputs in bf16.
        tiles: the result of ``schedule``.
        out: [N, q_heads, head_dim], the result.
    """
    box = tile.num_keys
    if case.page_size:  # a box is in one page
        box = min(box, case.page_size & -case.page_size)
    programs = len(tiles) * case.q_heads
    if x.q.is_cuda:
        properties = torch.cuda.get_device_properties(x.q.device)
        programs = min(programs, properties.multi_processor_count)
        launch = prefill_kernel[(programs,)]
    else:
        launch = partial(prefill_kernel.warmup, grid=(programs,))
    args = (
        ragged_descriptor(x.q, ROWS),
        ragged_descriptor(x.k, box),
        ragged_descriptor(x.v, box),
        ragged_descriptor(out, ROWS),
        tiles,
        len(tiles) * case.q_heads,
        x.tables,
        0 if x.tables is None else x.tables.stride(0),
        x.sinks,
        tile.head_dim**-0.5 * LOG2_E,
        Sizes(
            tile.num_consumers,
            tile.num_stages,
            tile.num_keys,
            tile.head_dim,
            case.q_heads,
            case.q_heads // case.kv_heads,
            case.page_size,
            box,
            case.window,
            case.softcap * LOG2_E,
            tile.num_q_stages,
            tile.ping_pong,
            tile.named_barriers,
        ),
    )
    return launch(*args, num_warps=4)


CHECKS = (
    Case(((1, 1),)),
    Case(((128, 128), (1, 1), (129, 129), (64, 64), (333, 333))),
    Case(((1000, 1000), (2, 1500), (77, 840)), q_heads=8, kv_heads=1),
    Case(((4097, 4097), (1024, 1024), (5, 5)), q_heads=16, kv_heads=8),
    Case(((700, 700), (130, 901)), window=128, softcap=50.0, sinks=True),
    Case(((1500, 1500), (40, 1100)), window=300, page_size=16),
    Case(((600, 600), (3, 512), (256, 1300)), page_size=256),
)
NUM_TIMINGS = 3
CHECK_SECONDS, TIME_SECONDS, NUM_CHECKS = 120, 90, 4
TIMED = ("1x8192", "8x2048", "16x1024", "1x30000")
TIMED_HEADS = {64: ((32, 8),), 128: ((16, 8), (32, 8)), 256: ((8, 4),)}


def make_inputs(case: Case, head_dim: int, device: str) -> tuple[Inputs, Inputs]:
    """Makes random inputs, with NaN in all keys and values that no query may read: after the last
    sequence, and in unused slots of the cache. Also returns the inputs without pages."""
    generator = torch.Generator(device).manual_seed(0)

    def make(rows: int, heads: int) -> Tensor:
        size = rows, heads, head_dim
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    lens_q, lens_k = zip(*case.lens, strict=True)
    q = make(sum(lens_q), case.q_heads)
    sinks = None
    if case.sinks:
        sinks = torch.randn(case.q_heads, generator=generator, device=device)
    keys = [make(sum(lens_k), case.kv_heads) for _ in range(2)]
    flat = Inputs(q, *keys, None, sinks)
    unused, tables = 256, None
    slots = torch.arange(sum(lens_k))
    if size := case.page_size:
        num_pages = [-(-n // size) for n in lens_k]
        unused = sum(num_pages) * size + size - sum(lens_k)
        pages = 1 + torch.randperm(sum(num_pages)).int()
        tables = torch.zeros(len(lens_k), max(num_pages) + 1, dtype=torch.int32)
        parts = []
        for i, (of_sequence, n) in enumerate(zip(pages.split(num_pages), lens_k, strict=True)):
            tables[i, : len(of_sequence)] = of_sequence
            position = torch.arange(n)
            parts.append(of_sequence[position // size] * size + position % size)
            if case.window:  # entries of pages that all windows have left
                tables[i, : max(n - case.lens[i][0] + 1 - case.window, 0) // size] = 1 << 30
        slots = torch.cat(parts).long()
    stored = []
    for key in keys:
        cache = key.new_full((sum(lens_k) + unused, *key.shape[1:]), torch.nan)
        cache[slots.to(device)] = key
        stored.append(cache)
    return Inputs(flat.q, *stored, None if tables is None else tables.to(device), flat.sinks), flat


def reference(case: Case, x: Inputs, dtype: torch.dtype) -> Tensor:
    """Attention in PyTorch, of inputs that are not paged, with matmuls of ``dtype``."""
    group, outs = case.q_heads // case.kv_heads, []
    starts = accumulate(case.lens, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0))
    for (q_start, k_start), (len_q, len_k) in zip(starts, case.lens, strict=False):
        q = x.q[q_start : q_start + len_q].transpose(0, 1).to(dtype)
        k, v = (
            t[k_start : k_start + len_k].repeat_interleave(group, 1).transpose(0, 1).to(dtype)
            for t in (x.k, x.v)
        )
        scores = (q @ k.transpose(1, 2)).float() * q.size(2) ** -0.5
        if case.softcap:
            scores = case.softcap * (scores / case.softcap).tanh()
        age = torch.arange(len_k - len_q, len_k, device=q.device)[:, None]
        age = age - torch.arange(len_k, device=q.device)
        hidden = (age < 0) | (age >= case.window) if case.window else age < 0
        scores.masked_fill_(hidden, -torch.inf)
        if x.sinks is not None:
            sinks = x.sinks[:, None, None].expand(-1, len_q, 1)
            scores = torch.cat((scores, sinks), 2)
        weights = scores.softmax(2)[..., :len_k].to(dtype)
        outs.append((weights @ v).transpose(0, 1).float())
    return torch.cat(outs)


def check(tile: Tile, case: Case, device: str = "cuda") -> str:
    """Compares with PyTorch in fp32. The largest error must be at most twice that of PyTorch in
    bf16. Returns what is wrong, or an empty string."""
    x, flat = make_inputs(case, tile.head_dim, device)
    num_rows = tile.num_consumers * ROWS
    lens_q, lens_k = (list(lens) for lens in zip(*case.lens, strict=True))
    tiles = schedule(lens_q, lens_k, num_rows, case.window, bool(case.page_size))
    canvas = torch.full((len(x.q) + num_rows, *x.q.shape[1:]), 7.0, dtype=x.q.dtype, device=device)
    out = canvas[: len(x.q)]
    prefill(tile, case, x, torch.from_numpy(tiles).to(device), out)
    expected = reference(case, flat, torch.float32)
    error = (out.float() - expected).abs()
    bound = 2 * (reference(case, flat, torch.bfloat16) - expected).abs().max() + 1e-3
    wrong = ~(error <= bound)  # so that NaN is wrong
    if wrong.any():
        rows, heads = wrong.any(2).nonzero().unbind(1)
        return (
            f"error {error.max():.4f}, at most {bound:.4f} expected; {len(rows)} of "
            f"{wrong[..., 0].numel()} rows wrong, the first ones (row, head): "
            f"{list(zip(rows.tolist(), heads.tolist(), strict=True))[:8]}"
        )
    return "" if (canvas[len(x.q) :] == 7).all() else "wrote after the last row"


def measure(tile: Tile) -> None:
    """Times the kernel and nanovllm's Triton kernel in turn, and prints TFLOP/s of both."""
    from nanovllm.kernels.attention.base import AttentionParams
    from nanovllm.kernels.attention.kv_cache import KVCache
    from nanovllm.kernels.attention.prefill import prefill_attention
    from nanovllm.utils.context import Context

    for q_heads, kv_heads in TIMED_HEADS[tile.head_dim]:
        for batch in TIMED:
            num_seqs, length = map(int, batch.split("x"))
            case = Case(((length, length),) * num_seqs, q_heads, kv_heads)
            x, _ = make_inputs(case, tile.head_dim, "cuda")
            lens = [length] * num_seqs
            tiles = torch.from_numpy(schedule(lens, lens, tile.num_consumers * ROWS)).cuda()
            bounds = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * length
            context = Context(True, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
            params = AttentionParams(tile.head_dim**-0.5)
            cache = KVCache(x.k[:, None], x.v[:, None])  # not read
            k, v = x.k[: len(x.q)], x.v[: len(x.q)]
            out = torch.empty_like(x.q)
            kernels = (
                partial(prefill, tile, case, x, tiles, out),
                partial(prefill_attention, x.q, k, v, cache, context, params),
            )
            times: tuple[list[float], ...] = ([], [])
            for _ in range(NUM_TIMINGS):
                for kernel, of_kernel in zip(kernels, times, strict=True):
                    of_kernel.append(triton.testing.do_bench_cudagraph(kernel, rep=20))
            flops = 2 * q_heads * tile.head_dim * num_seqs * length * (length + 1)
            rates = [flops / np.median(of_kernel) / 1e9 for of_kernel in times]
            print(
                f"{tile.name:24} {q_heads:2}/{kv_heads} {batch:8} "
                f"gluon {rates[0]:4.0f}  triton {rates[1]:4.0f} TFLOP/s",
                flush=True,
            )


def compile_all() -> None:
    """Compiles every tile for a Hopper GPU, without one, and prints what the machine code has."""
    from triton.backends.compiler import GPUTarget

    class Hopper:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    triton.runtime.driver.set_active(Hopper())
    print("tile, features: registers at launch, bytes of stack, KiB of shared memory; instructions")
    for tile in TILES:
        for case in (Case(((1, 1),)), *CHECKS[-3:]):
            x, _ = make_inputs(case, tile.head_dim, "cpu")
            tiles = torch.zeros(1, 4, dtype=torch.int32)
            kernel = prefill(tile, case, x, tiles, torch.empty_like(x.q))
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(kernel.asm["cubin"])
                file.flush()
                usage, sass = (
                    subprocess.run(
                        [triton.knobs.nvidia.cuobjdump.path, option, file.name],
                        capture_output=True,
                        text=True,
                        check=True,
                    ).stdout
                    for option in ("-res-usage", "-sass")
                )
            registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
            names = ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "MUFU.EX2", "STL", "LDL")
            counts = "  ".join(f"{name} {sass.count(f' {name}')}" for name in names)
            features = f"window {case.window} softcap {case.softcap:.0f} page {case.page_size}"
            shared = kernel.metadata.shared / 1024
            print(f"{tile.name:24} {features}: {registers} {stack} {shared:.1f}; {counts}")


def run_child(stage: str, tile: Tile, timeout: int) -> tuple[bool, str]:
    """Runs one stage for one tile in a process that is killed if it hangs. Returns whether it
    succeeded, and its output."""
    command = [sys.executable, "-m", "benchmarks.gluon_prefill", "--stage", stage, tile.name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            output, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:  # the driver may still wait for the kernel
            output = ""
        return False, f"{output}{tile.name}: {stage} killed after {timeout} s\n"
    return process.returncode == 0, output


def check_tile(tile: Tile) -> bool:
    """Checks one tile in all cases, prints the results, and returns whether all are right."""
    passed = True
    for case in CHECKS:
        problem = check(tile, case)
        passed &= not problem
        print(f"{tile.name:24} {problem or 'right'}: {case}", flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tiles", nargs="*", help="names of tiles; all by default")
    parser.add_argument("--output", type=Path, help="file that results are appended to")
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--stage", choices=("check", "time"), help="in this process, of one tile")
    options = parser.parse_args()
    if options.compile_only:
        compile_all()
        return
    tiles = [tile for tile in TILES if not options.tiles or tile.name in options.tiles]
    if options.stage == "check":
        sys.exit(not check_tile(tiles[0]))
    if options.stage == "time":
        measure(tiles[0])
        return

    def report(text: str) -> None:
        print(text, end="", flush=True)
        if options.output:
            with options.output.open("a") as file:
                file.write(text)

    right = []
    with ThreadPoolExecutor(NUM_CHECKS) as executor:  # compiling takes most of the time
        results = executor.map(lambda tile: run_child("check", tile, CHECK_SECONDS), tiles)
        for tile, (passed, output) in zip(tiles, results, strict=True):
            report(output)
            if passed:
                right.append(tile)
    for tile in right:
        report(run_child("time", tile, TIME_SECONDS)[1])


if __name__ == "__main__":
    main()
