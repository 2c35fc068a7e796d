"""Compiles every kernel for a Hopper GPU, as launched, without one: run as a program.
With the argument ``--few`` in bf16 and in few sizes only.

The interpreter takes Python that the compiler refuses. Here a stand-in for the driver names the
GPU, and every launch stops once its kernel is compiled, down to machine code.
"""

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nanovllm.kernels import fp8, rms_norm, rope, silu_and_mul
from nanovllm.kernels.attention import (
    block_tables,
    decode,
    dequantized_kv,
    hopper_prefill,
    prefill,
    prefix_decode,
    triton_backend,
)
from nanovllm.kernels.attention import invariant as invariant_attention
from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.prefix_schedule import NO_PREFIXES
from nanovllm.kernels.comm import all_reduce
from nanovllm.kernels.fp8 import FP8, Fp8Rows
from nanovllm.kernels.gemm import (
    block_gemm,
    decode_gemm,
    hopper_gemm,
    qkv,
    skinny,
    split_k,
    swiglu,
    tiled,
)
from nanovllm.kernels.gemm import fp8 as fp8_gemm
from nanovllm.kernels.gemm import invariant as invariant_gemm
from nanovllm.kernels.moe import (
    combine,
    gemv,
    grouped,
    hopper_grouped,
    mxfp4,
    mxfp4_gemv,
    route,
    sort,
)
from nanovllm.kernels.moe.experts import ExpertWeights
from nanovllm.kernels.sampling import logprobs, sample, sampled_tokens
from nanovllm.utils import triton_compat
from nanovllm.utils.context import Context

SHARED_MEMORY = 227 << 10
LEAST_SHARED_MEMORY = 99 << 10  # of a GPU with bf16
ALL_SIZES = "--few" not in sys.argv
GEMVS = "_gate_up_kernel", "_down_kernel", "_vector_kernel"
PDL_MODULES = (
    all_reduce,
    block_gemm,
    combine,
    decode,
    decode_gemm,
    fp8,
    gemv,
    grouped,
    hopper_grouped,
    invariant_attention,
    invariant_gemm,
    prefill,
    prefix_decode,
    rms_norm,
    rope,
    route,
    silu_and_mul,
    skinny,
    sort,
    split_k,
    tiled,
)


class Hopper:
    """What the compiler asks of a driver; of another GPU if told its compute capability."""

    def __init__(self, capability: int = 90) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_only(capability: int = 90, memory: int = SHARED_MEMORY) -> list[Any]:
    """From now on kernels are compiled and not launched. Returns the list that they go to.

    Args:
        capability: compute capability of the GPU, 90 for 9.0.
        memory: its shared memory in bytes.
    """
    triton.runtime.driver.set_active(Hopper(capability))
    run, compiled = JITFunction.run, []

    def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel))
        return kernel

    JITFunction.run = compile_kernel
    options = {"PDL": True, "launch_pdl": True} if capability >= 90 else {"PDL": False}
    for module in PDL_MODULES:
        module.pdl_options = lambda x: options  # type: ignore[attr-defined]
    for module in (prefill, grouped, invariant_attention, invariant_gemm):
        module.shared_memory = lambda device: memory  # type: ignore[attr-defined]
    for module in (hopper_prefill, hopper_grouped, swiglu, qkv):
        module.num_multiprocessors = lambda device: 132  # type: ignore[assignment]
    invariant_gemm.is_hopper_or_newer = lambda device: capability >= 90  # type: ignore[assignment]
    return compiled


def launch_all(
    dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, all_sizes: bool
) -> None:
    """Launches each kernel, in the sizes of many models and batches or in a few."""
    if all_sizes:  # else with the features of gpt-oss alone, which take all branches
        launch_attention(dtype, q_heads, kv_heads, head_dim, AttentionParams(1.0), all_sizes)

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def make(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    cache = KVCache(*(make(4, 128, kv_heads, head_dim) for _ in range(2)))
    angles = torch.zeros(99, head_dim)
    q, k, weight = make(64, q_heads, head_dim), make(64, kv_heads, head_dim), make(head_dim)
    update = block_tables.BlockTableUpdate(ints(1, 8, 4), ints(9))
    block_tables.update_triton(ints(1, 8, 16), update, ints(1, 8, 16))
    slots = rope.CacheSlots(cache, ints(64))
    for norms in ((None, None), (weight, weight)) if all_sizes else ((weight, weight),):
        inputs = rope.RopeInputs(ints(64), angles, *norms, 1e-6)
        rope.apply_rope_and_store_triton(inputs, q, k, k, slots)
    for residual in (None, make(8, 1024)):
        rms_norm.rms_norm_triton(make(8, 1024), make(1024), 1e-6, residual)
    silu_and_mul.silu_and_mul_triton(make(8, 6144))
    # Of models with 0.6B, 8B and 14B parameters: output, input, SwiGLU, bias.
    shapes = [
        (1024, 3072, False, False),
        (4096, 1024, False, True),
        (3072, 1024, True, False),
        (12288, 4096, True, False),
        (4096, 12288, False, False),
        (17408, 5120, True, False),
        (5120, 5120, False, False),
    ]
    if not all_sizes:
        shapes = shapes[2:3]
    elif dtype is not torch.bfloat16:
        shapes = shapes[:3]
    for out, width, silu, has_bias in shapes:
        weight, bias = make(out * (1 + silu), width), make(out * (1 + silu)) if has_bias else None
        for rows in (1, 8, skinny.MAX_ROWS) if all_sizes else (8,):
            if rows <= 8 or width < 4096:  # as nanovllm/quantization/unquantized.py chooses
                skinny.skinny_linear(make(rows, width), weight, bias, silu)
        x = make(1, width)
        skinny.skinny_norm_linear(x, weight, bias, silu, make(width), 1e-6, x)
    if dtype is not torch.float32:
        for out, width in ((4096, 1024), (1024, 2048)) if all_sizes else ((1024, 2048),):
            for num_rows in (32, 64) if all_sizes else (32,):
                for bias in (None, make(out)) if all_sizes else (make(out),):
                    tiled.tile_linear(make(num_rows, width), make(out, width), bias)
    if dtype in hopper_gemm.DTYPES:
        for num_rows in (8, 16, 32, 64, 96, 128, 256) if all_sizes else (8, 96):
            for out, width in ((6144, 4096), (1024, 2048)):  # without and with parts
                x, residual = make(num_rows, width), make(num_rows, out)
                decode_gemm.launch(x, make(out, width), None, residual)
            bias = make(6144) if num_rows == 96 else None
            decode_gemm.launch(
                make(num_rows, 1024), make(6144, 1024), bias, None, True, part_columns=1024
            )
            if dtype is torch.bfloat16:
                for group in (None, fp8.GROUP):
                    rows = fp8.empty_rows(make(num_rows, 2048), 2048, group)
                    scales = torch.zeros(8192 if group is None else (64, 16))
                    weight_8 = Fp8Rows(torch.zeros(8192, 2048, dtype=FP8), scales)
                    decode_gemm.launch(rows, weight_8, make(8192), dtype=dtype)
        if dtype is torch.bfloat16:
            for sizes in block_gemm.STEP_TIMES if all_sizes else ((128, 128),):
                for parts, bias in ((1, make(8192)), (2, None)):
                    tile = block_gemm.Tile(*sizes, parts, 16 // parts)
                    block_gemm.launch(
                        rows, weight_8, bias, make(len(rows.codes), 8192), tile, dtype
                    )
        for is_rounded in (False, True) if all_sizes else (True,):
            swiglu.launch(make(64, 1024), make(6144, 1024), is_rounded)
        if head_dim == qkv.HEAD_DIM:
            x, weights = make(64, 1024), make((q_heads + 2 * kv_heads) * head_dim, 1024)
            for norms in ((None, None), (weight, weight)) if all_sizes else ((weight, weight),):
                inputs = rope.RopeInputs(ints(64), angles, *norms, 1e-6)
                qkv._launch(x, weights, inputs, slots)
        x, experts = make(640, 2048), ExpertWeights(make(8, 1536, 2048), make(8, 2048, 768))
        routing = route.route_triton(make(640, 8), 4, True)
        hopper_grouped.experts_hopper(x, experts, routing, x)
        if dtype is torch.bfloat16:
            weights = (torch.zeros(weight.shape, dtype=FP8) for weight in experts[:2])
            scales = (torch.zeros(8, n // 128, k // 128) for n, k in ((1536, 2048), (2048, 768)))
            fields = dict(zip(("gate_up_scales", "down_scales"), scales, strict=True))
            hopper_grouped.experts_hopper(x, ExpertWeights(*weights, **fields), routing, x)
    launch_invariant_gemms(dtype, all_sizes)
    launch_mixtures(dtype, all_sizes)
    logits, rows = make(8, 151_936), ints(8, sample.ROW_WORDS)
    sample.sample_triton(logits, rows, truncates=True)  # a superset of the other
    sample.sample_shard_triton(make(8, 76_032), rows, 75_904, 76_032)
    sampled_tokens.fill_in_sampled_triton(ints(8), torch.zeros(8, dtype=torch.int64))
    logprobs.top_logprobs_triton(logits, torch.zeros(8, dtype=torch.int64), 5)
    addresses = torch.zeros(2, dtype=torch.int64)
    mail = all_reduce.Mail(0, 2, 512, 4096, addresses, ints(512, 4), ints(1))
    all_reduce.all_reduce(torch.zeros(8, dtype=torch.int64), mail)
    for num_rows in (1, 256):
        x = make(num_rows, 4096)
        all_reduce.all_reduce(x, mail)
        all_reduce.all_reduce_norm(x, mail, x[0], 1e-6, x, x)


def launch_attention(
    dtype: torch.dtype,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    params: AttentionParams,
    all_sizes: bool,
    is_quantized: bool = False,
) -> None:
    """Launches the attention kernels, for batches of several sizes or of one. Norms only add to a
    kernel, so all sizes have them, and a single sequence also has none."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def make(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    cache = KVCache(*(make(4, 128, kv_heads, head_dim) for _ in range(2)))
    if is_quantized:
        cache = quantized_cache(kv_heads, head_dim)
    attention = triton_backend.TritonAttention()
    angles = torch.zeros(99, head_dim)
    sizes = (1, 64, 256) if dtype is torch.bfloat16 else (1, 256)
    sizes = sizes if all_sizes else (64,)
    for num_seqs in sizes:
        lens = np.ones(num_seqs, np.int32)
        qkv = make(num_seqs, q_heads + 2 * kv_heads, head_dim)
        q, k, v = qkv.split((q_heads, kv_heads, kv_heads), dim=1)
        cases: list[Any] = [(params, None)] if all_sizes or not is_quantized else []
        if num_seqs == 64 or (64 not in sizes and num_seqs > 1):  # one kernel for all sizes
            cases.append((params._replace(window=None), NO_PREFIXES))
        for case, prefixes in cases:
            shape = q_heads, kv_heads, head_dim, dtype, is_quantized
            work = attention.split_kv(lens, *shape, case.window, prefixes)
            context = Context(
                slot_mapping=ints(num_seqs),
                block_tables=ints(num_seqs, 16),
                context_lens=ints(num_seqs),
                split_kv_schedule=torch.from_numpy(work),
                max_seqlen_k=1,
            )
            has_both = num_seqs == 1 and not is_quantized
            for weight in (None, make(head_dim)) if has_both else (make(head_dim),):
                inputs = rope.RopeInputs(ints(num_seqs), angles, weight, weight, 1e-6)
                attention.decode(q, cache, context, case, rope.NewKV(inputs, k, v))
    q, k = make(64, q_heads, head_dim), make(64, kv_heads, head_dim)
    bounds = ints(2)
    for tables in (None, ints(1, 16)) if all_sizes and not is_quantized else (ints(1, 16),):
        prefill = Context(
            is_prefill=True,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=64,
            max_seqlen_k=64,
            block_tables=tables,
        )
        attention.prefill(q, k, k, cache, prefill, params)


def launch_hopper_prefill(all_sizes: bool) -> None:
    """Launches the prefill kernel for Hopper: with all features, and for all sizes also without
    them and for other heads."""
    features = AttentionParams(1.0, 128, 50.0, torch.zeros(64))
    cases: list[Any] = [(torch.bfloat16, 32, 8, 128, features)]
    if all_sizes:
        cases += [(torch.float16, 64, 8, 64, AttentionParams(1.0))]
        cases += [(torch.bfloat16, 8, 4, 256, features)]
    bounds = torch.zeros(2, dtype=torch.int32)
    for dtype, q_heads, kv_heads, head_dim, params in cases:
        q, k = (torch.zeros(64, heads, head_dim, dtype=dtype) for heads in (q_heads, kv_heads))
        cache = KVCache(*torch.zeros(2, 4, 256, kv_heads, head_dim, dtype=dtype))
        tables = None if params.window is None else torch.zeros(1, 16, dtype=torch.int32)
        context = Context(
            is_prefill=True, block_tables=tables, cu_seqlens_q=bounds, cu_seqlens_k=bounds
        )
        hopper_prefill.hopper_prefill(q, k, k, cache, context, params)
        quantized = quantized_cache(kv_heads, head_dim)
        context = replace(context, block_tables=torch.zeros(1, 16, dtype=torch.int32), num_keys=64)
        dequantized_kv.dequantized_kv_triton(q, quantized, context)


def launch_invariant_attention(
    dtype: torch.dtype,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    params: AttentionParams,
    is_quantized: bool = False,
) -> None:
    """Launches the kernels of batch-invariant attention: prefills without and with a cache, and a
    decode."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def make(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    cache = KVCache(*(make(4, 128, kv_heads, head_dim) for _ in range(2)))
    if is_quantized:
        cache = quantized_cache(kv_heads, head_dim)
    attention = invariant_attention.InvariantTritonAttention()
    q, k, bounds = make(64, q_heads, head_dim), make(64, kv_heads, head_dim), ints(2)
    for tables in (ints(1, 16),) if is_quantized else (None, ints(1, 16)):
        context = Context(
            is_prefill=True,
            block_tables=tables,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=64,
            max_seqlen_k=64,
        )
        attention.prefill(q, k, k, cache, context, params)
    lens = np.ones(64, np.int32)
    heads = q_heads, kv_heads, head_dim
    schedule = attention.split_kv(lens, *heads, dtype, is_quantized, params.window)
    context = Context(
        block_tables=ints(64, 16),
        context_lens=ints(64),
        split_kv_schedule=torch.from_numpy(schedule),
        max_seqlen_k=1,
    )
    attention.decode(q, cache, context, params)


def launch_invariant_gemms(dtype: torch.dtype, all_sizes: bool) -> None:
    """Launches the batch-invariant GEMM in all its tiles, with parts in parallel and in sequence,
    and without parts."""

    def make(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    tiles = invariant_gemm.choose_tiles(make(1, 1024), 4096)
    if dtype is torch.bfloat16:
        tiles = (invariant_gemm.NARROW_TILE, *tiles)
    chosen = tiles if all_sizes else tiles[-2:]
    if all_sizes and dtype is torch.float16:  # bf16 has the same tiles: the extremes are enough
        chosen = tiles[0], tiles[-1]
    for tile in chosen:
        for out, width, is_parallel in ((4096, 1024, 0), (1024, 4096, 0), (1024, 4096, 1)):
            x, weight, launch = make(8, width), make(out, width), (tile, bool(is_parallel))
            for given in ((None, None), (make(out), make(8, out))):
                if given[0] is None or (all_sizes and tile == chosen[0]):
                    invariant_gemm.launch_linear(x, weight, *given, invariant_gemm.Launch(*launch))
    invariant_gemm.launch_linear(  # whose rows are no multiples of 16 bytes
        make(8, 100), make(60, 100), None, None, invariant_gemm.Launch(tiles[0], False)
    )


def launch_windows(all_sizes: bool) -> None:
    """Launches the attention kernels of gpt-oss and, for all sizes, those of Gemma 2, in one size:
    with a quantised cache, gpt-oss has all sizes."""
    features = AttentionParams(1.0, 128, 50.0, torch.zeros(64))
    launch_attention(torch.bfloat16, 64, 8, 64, features, False)
    launch_invariant_attention(torch.bfloat16, 64, 8, 64, features)
    if all_sizes:
        launch_invariant_attention(torch.bfloat16, 16, 8, 128, AttentionParams(1.0))
        launch_attention(torch.bfloat16, 8, 4, 256, AttentionParams(1.0, 4096, 50.0), False)
        launch_attention(torch.float32, 4, 1, 256, features._replace(sinks=None), False)


def quantized_cache(kv_heads: int, head_dim: int) -> KVCache:
    codes = torch.zeros(2, 4, 128, kv_heads, head_dim, dtype=FP8)
    return KVCache(*codes, torch.zeros(4, 2, kv_heads, 128))


def launch_fp8_linear(all_sizes: bool) -> None:
    """Launches the kernels of a model of 8B parameters with FP8 weights, which GPUs of compute
    capability 8.9 or more have."""

    def rows(num_rows: int, width: int, group: int | None = None) -> Fp8Rows:
        scales = torch.zeros(num_rows if group is None else (num_rows, width // group))
        return Fp8Rows(torch.zeros(num_rows, width, dtype=FP8), scales)

    for dtype in (torch.bfloat16, torch.float16) if all_sizes else (torch.bfloat16,):
        x, gate_up = (torch.zeros(8, width, dtype=dtype) for width in (4096, 24576))
        for group in (None, fp8.GROUP):
            fp8.quantize_rows_triton(x, group)
            rms_norm.fp8_rms_norm_triton(x, x[0], 1e-6, x, group)
            silu_and_mul.fp8_silu_and_mul_triton(gate_up, group=group)
            tensors = [torch.zeros(2048, dtype=t) for t in (torch.int64, torch.int32, torch.int32)]
            mail = all_reduce.Mail(0, 2, 512, 4096, *tensors)
            out = fp8.empty_rows(x, 4096, group)
            all_reduce.all_reduce_norm(x, mail, x[0], 1e-6, x, *out, group)
        for num_rows in (64, 65):
            codes = torch.zeros(4096, 4096, dtype=FP8)
            weight = Fp8Rows(codes, torch.zeros(32, 32))
            fp8_gemm.fp8_tile_linear(rows(num_rows, 4096, fp8.GROUP), weight, None, dtype)
        for scales in (torch.zeros(4096), weight.scales):
            skinny.skinny_norm_linear(x[:1], codes, None, True, x[0], 1e-6, x[:1], scales)
            skinny.skinny_norm_linear(x[:1], codes, None, scales=scales)
        for num_rows in (1, 32, 64) if all_sizes else (32,):
            for out, width in ((24576, 4096), (4096, 12288)) if all_sizes else ((4096, 12288),):
                weight = rows(out, width)
                fp8_gemm.fp8_tile_linear(rows(num_rows, width), weight, weight.scales, dtype)


def launch_quantized(all_sizes: bool) -> None:
    """Launches the kernels that write and read a quantised KV cache, which GPUs of compute
    capability 8.9 or more have."""
    features = AttentionParams(1.0, 128, 50.0, torch.zeros(64))
    shapes: list[Any] = [(torch.bfloat16, 64, 8, 64, features)]
    if all_sizes:
        shapes += [
            (torch.bfloat16, 16, 8, 128, AttentionParams(1.0)),
            (torch.bfloat16, 8, 4, 256, AttentionParams(1.0, 512)),
            (torch.float16, 9, 3, 64, AttentionParams(1.0)),
            (torch.float32, 4, 1, 96, AttentionParams(1.0)),
        ]
    for dtype, q_heads, kv_heads, head_dim, params in shapes:
        has_all_sizes = all_sizes and params is features
        launch_attention(dtype, q_heads, kv_heads, head_dim, params, has_all_sizes, True)
        if dtype is torch.bfloat16:
            launch_invariant_attention(dtype, q_heads, kv_heads, head_dim, params, True)
        q, k = (torch.zeros(64, heads, head_dim, dtype=dtype) for heads in (q_heads, kv_heads))
        slot_mapping = torch.zeros(64, dtype=torch.int32)
        slots = rope.CacheSlots(quantized_cache(kv_heads, head_dim), slot_mapping)
        inputs = rope.RopeInputs(slot_mapping, torch.zeros(99, head_dim))
        rope.apply_rope_and_store_triton(inputs, q, k, k, slots)


def launch_mixtures(dtype: torch.dtype, all_sizes: bool) -> None:
    """Launches the kernels of Qwen3-30B-A3B, with 8 of 128 experts, of gpt-oss-20b, with 4 of 32 in
    MXFP4, and of a narrow Mixtral, with 2 of 8: for one token, a loop over the columns is unrolled,
    and those of the real one take ten seconds to compile. The numbers of tokens are those of all
    tiles: of fp16, which has the tiles of bf16, and of fp32, which has one, two are enough."""
    models = (128, 8, 2048, 768), (32, 4, 2880, 2880), (8, 2, 4096, 3584)
    for num_experts, top_k, hidden, columns in models:
        gate_up, down = (  # one expert's weights are enough to compile
            torch.zeros(1, dtype=dtype).expand(num_experts, 2 * columns, hidden),
            torch.zeros(1, dtype=dtype).expand(num_experts, hidden, columns),
        )
        for tensor in (gate_up, down):
            tensor.is_contiguous = lambda: True  # type: ignore[method-assign]
        sizes: tuple[int, ...] = (1, 16384)
        if all_sizes and dtype is torch.bfloat16:  # Mixtral's add biases to the tiles of Qwen3
            sizes = (1, 801, 16384) if num_experts == 8 else (1, 100, 256, 800, 2048, 16384)
        for num_tokens in sizes:
            x = torch.zeros(num_tokens, hidden, dtype=dtype)
            logits = torch.zeros(num_tokens, num_experts, dtype=dtype)
            routing = route.route_triton(logits, top_k, True)
            experts = ExpertWeights(gate_up, down)
            if num_experts == 8:  # with all arguments
                biases = gate_up[..., 0].contiguous(), down[..., 0].contiguous()
                experts = ExpertWeights(gate_up, down, *biases, 7.0, 1.7)
            if num_experts == 32:
                groups = [
                    (num_experts, mxfp4.num_groups(weight.size(2)), weight.size(1))
                    for weight in (gate_up, down)
                ]
                packed = [
                    torch.zeros(1, dtype=kind).expand(*shape, *rest)
                    for kind, rest in ((torch.int16, (32,)), (torch.int32, ()))
                    for shape in groups
                ]
                for tensor in packed:
                    tensor.is_contiguous = lambda: True  # type: ignore[method-assign]
                biases = gate_up[..., 0].contiguous(), down[..., 0].contiguous()
                experts = ExpertWeights(*packed[:2], *biases, 7.0, 1.7, *packed[2:])
            for_few = gemv.experts_gemv if num_experts != 32 else mxfp4_gemv.experts_gemv_mxfp4
            (for_few if num_tokens == 1 else grouped.experts_grouped)(x, experts, routing, x)
        if not all_sizes and num_experts == 32:
            break


def launch_fp8_mixtures(all_sizes: bool, has_fp8: bool = True) -> None:
    """Launches the kernels of Qwen3-30B-A3B with FP8 weights, with scales of rows and of blocks;
    Mixtral has the same tiles. ``has_fp8`` is whether the GPU has FP8 matmuls."""
    codes = torch.zeros(1, dtype=FP8 if has_fp8 else torch.uint8)
    num_experts, top_k, hidden, columns = 128, 8, 2048, 768
    shapes = (2 * columns, hidden), (hidden, columns)
    weights = [codes.expand(num_experts, *shape) for shape in shapes]
    for tensor in weights:
        tensor.is_contiguous = lambda: True  # type: ignore[method-assign]
    for group in (1, fp8.GROUP):
        scales = [torch.zeros(num_experts, n // group, k // group or 1) for n, k in shapes]
        if group == 1:
            scales = [scale[..., 0].contiguous() for scale in scales]
        fields = dict(zip(("gate_up_scales", "down_scales"), scales, strict=True))
        experts = ExpertWeights(*weights, **fields)
        has_all_sizes = all_sizes and group > 1
        for num_tokens in (1, 100, 256, 800, 2048, 16384) if has_all_sizes else (1, 256, 16384):
            x = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16)
            logits = torch.zeros(num_tokens, num_experts, dtype=torch.bfloat16)
            routing = route.route_triton(logits, top_k, True)
            compute = gemv.experts_gemv if num_tokens == 1 else grouped.experts_grouped
            compute(x, experts, routing, x)


if __name__ == "__main__":
    assert triton_compat.HAS_TRITON
    kernels = compile_only()
    with ThreadPoolExecutor() as executor, triton.AsyncCompileMode(executor):
        launch_all(torch.bfloat16, 16, 8, 128, ALL_SIZES)
        num_in_bf16 = len(kernels)
        launch_windows(ALL_SIZES)
        launch_quantized(ALL_SIZES)
        launch_fp8_linear(ALL_SIZES)
        launch_fp8_mixtures(ALL_SIZES)
        launch_hopper_prefill(ALL_SIZES)
        if ALL_SIZES:
            # Of the other dtypes a few sizes: their kernels have the same Python.
            for dtype, *shape in ((torch.float16, 9, 3, 64), (torch.float32, 4, 1, 96)):
                launch_all(dtype, *shape, False)
                launch_attention(dtype, *shape, AttentionParams(1.0), False)
    done = [(n, k.result() if hasattr(k, "result") else k) for n, k in kernels]
    roomy = (  # on GPUs that have as much
        "hopper_prefill_kernel",
        "swiglu_kernel",
        "qkv_kernel",
        "hopper_grouped_kernel",
        "block_grouped_kernel",
        "decode_gemm_kernel",
        "block_gemm_kernel",
        "_prefill_kernel",
        "_tile_kernel",
        "_grouped_kernel",
        "_linear_kernel",
        "_invariant_decode_kernel",
    )
    too_large = [
        name
        for name, kernel in done
        if kernel.metadata.shared > (SHARED_MEMORY if name in roomy else LEAST_SHARED_MEMORY)
    ]
    assert not too_large, f"more shared memory than there is: {too_large}"
    # With x or scales in shared memory, as with FP8 weights, their unrolled loops would have dozens
    # of barriers.
    in_bf16 = [(n, k) for n, k in done[:num_in_bf16] if n in GEMVS]
    barriers = [(n, k.asm["ptx"].count("bar.sync")) for n, k in in_bf16]
    assert barriers and all(count <= 12 for _, count in barriers), barriers
    wgmma = [n for n, k in done if n == "_decode_kernel" and "wgmma" in k.asm["ptx"]]
    assert not wgmma, "MIN_WGMMA_COLUMNS is not what this Triton does"
    print(len(kernels), "launches of", len({name for name, _ in kernels}), "kernels")
