"""Runs the largest steps, and compiles kernels, before the first request on a GPU."""

import torch

from nanovllm.engine.batch import Batch, ScheduledSequence
from nanovllm.engine.completion import Completion
from nanovllm.engine.cuda_graphs import (
    MAX_DECODE_SEQS,
    PREFILL_TOKENS,
    StepGraphs,
    decode_sizes,
    graph_sizes,
    skip_middle_layers,
)
from nanovllm.engine.kv_layout import allocate_kv_cache
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sampling_state import SamplingState
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.gemm.cublas import load_kernels
from nanovllm.kernels.gemm.decode_gemm import MAX_ROWS
from nanovllm.quantization.batch_invariant import choose_identical_kernels
from nanovllm.quantization.unquantized import UnquantizedWeight
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.compile_ahead import compiling_only
from nanovllm.utils.device import on_device
from nanovllm.utils.math import cdiv


@torch.inference_mode()
def warmup_model(runner: ModelRunner) -> None:
    """Runs two prefills of ``max_num_batched_tokens``: one with as many sequences as possible, and
    one with the longest sequences, because a backend may use different kernels for them. All
    sequences sample, and share one block."""
    num_tokens, most = runner.config.max_num_batched_tokens, runner.max_num_seqs
    longest = runner.max_model_len
    shares = [num_tokens // most + (i < num_tokens % most) for i in range(most)]
    many = [min(share, longest) for share in shares]
    few = [min(num_tokens - start, longest) for start in range(0, num_tokens, longest)][:most]
    completion = Completion(SamplingState(SamplingParams(), 0, [], runner.model_config.vocab_size))
    for lengths in {tuple(many), tuple(few)}:
        items = []
        for i, length in enumerate(lengths):
            seq = Sequence([0] * length)
            seq.completion = completion
            seq.table_len = cdiv(len(seq), runner.config.block_size)
            seq.block_tables = [[0] * seq.table_len] * len(runner.windows)
            seq.table_row = i
            items.append(ScheduledSequence(seq, 0, len(seq), samples=True))
        batch = Batch.of(items, is_prefill=True, num_groups=len(runner.windows))
        runner.run_step(None, runner.prepare(batch, None))


@on_device
def load_cublas_kernels(runner: ModelRunner) -> None:
    """Loads the kernels of the matmuls in CUDA graphs, so that their capture need not wait."""
    linear = [getattr(module, "linear_weight", None) for module in runner.model.modules()]
    weights = [each.layer.weight for each in linear if type(each) is UnquantizedWeight]
    sizes = decode_sizes(runner.config.max_num_seqs or MAX_DECODE_SEQS)
    # Other kernels serve most matmuls with fewer rows. With more, the result of the LM head, which
    # is among the weights, would take gigabytes.
    row_counts = [*PREFILL_TOKENS, *(size.num_tokens for size in sizes)]
    row_counts = sorted({n for n in row_counts if 64 < n <= 4096})
    torch.cuda.synchronize()  # gives this thread the GPU's context, without which cuBLAS warns
    load_kernels(weights, row_counts)


@torch.inference_mode()
def compile_kernels(runner: ModelRunner) -> None:
    """Compiles the kernels of all steps in parallel, instead of one by one at their first launch.

    The kernels of small steps depend on the size, so all sizes up to MAX_ROWS are compiled. For
    larger decodes, the multiples of 64 are enough, and for larger prefills the powers of two and
    the largest one.
    """
    allocate_kv_cache(runner, 1)
    sizes = graph_sizes(runner) if runner.backend.capturable else []
    if runner.config.batch_invariant:
        choose_identical_kernels(runner.model, {size.num_tokens for size in sizes})
    decodes = [size for size in sizes if not size.is_prefill and size.num_tokens % 64 == 0]
    few = [size for size in sizes if size.num_tokens <= MAX_ROWS]
    prefills = [size for size in sizes if size.is_prefill]
    prefills = [size for size in prefills if size.num_tokens.bit_count() == 1] + prefills[-1:]
    with compiling_only(), skip_middle_layers(runner.model.model):
        warmup_model(runner)
        for _, step in StepGraphs(runner).make_steps([*{*few, *decodes, *prefills, *sizes[-1:]}]):
            step()
