"""Starts an engine: loads the tokenizer and the weights on all ranks, allocates the KV cache."""

import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.checkpoints.checkpoint import Checkpoint, open_checkpoint
from nanovllm.checkpoints.weights import fill_with_dummy_weights, load_model
from nanovllm.config import MAX_INT32, Config
from nanovllm.engine.kv_layout import (
    allocate_kv_cache,
    attention_layers,
    group_layers,
    limit_model_len,
    longest_sequence,
    token_bytes,
    uses_arenas,
)
from nanovllm.engine.model_runner import CapturedSteps, ModelRunner
from nanovllm.kernels.attention.backend import (
    AttentionBackend,
    AttentionShape,
    select_attention_backend,
)
from nanovllm.kernels.attention.base import ALL_FEATURES
from nanovllm.kernels.fp8 import GROUP
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.sampler import Sampler
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.rope import for_length
from nanovllm.quantization.base import use_batch_invariance, use_quantization
from nanovllm.text.prompts import PromptEncoder, load_encoder
from nanovllm.utils.cuda_vmm import move_parameters
from nanovllm.utils.device import on_device, select_device, select_dtype
from nanovllm.utils.distributed import use_tp_group
from nanovllm.utils.forks import claim_threads
from nanovllm.utils.math import heads_per_rank
from nanovllm.utils.memory import allocated_bytes
from nanovllm.utils.timer import Timer
from nanovllm.utils.tracebacks import clear_frames

if TYPE_CHECKING:
    from nanovllm.engine.shared_prefixes import PrefixFinder

logger = logging.getLogger("nanovllm")

# One engine of a process starts at a time: PyTorch's default dtype and cuBLAS' workspace belong to
# the process, and a GPU's free memory is measured.
STARTING = threading.RLock()


@dataclass(frozen=True, slots=True)
class StartedModel:
    """The result of start-up, from which the engine is built.

    Attributes:
        max_model_len: maximum length of a sequence in tokens, set by the user or the model.
        cache_len: maximum length of a sequence that the KV cache holds.
        eos_token_ids: the tokens that end a sequence.
        eos_token_id: the primary EOS token; None if there are several and the tokenizer has none.
        recommended_sampling: sampling parameters in the checkpoint's generation_config.json.
    """

    model_runner: ModelRunner
    prompt_encoder: PromptEncoder
    max_model_len: int
    cache_len: int
    eos_token_ids: frozenset[int]
    eos_token_id: int | None
    recommended_sampling: dict[str, Any]


def start_up(config: Config) -> StartedModel:
    """Loads the tokenizer, and the model on all ranks.

    Raises:
        ValueError: a checkpoint or a setting that cannot work.
        Exception: see ``start_ranks``.
    """
    checkpoint = open_checkpoint(config.model)
    model_config = checkpoint.config
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    check_split(model_config, config.tensor_parallel_size)
    claim_threads()
    with STARTING, ThreadPoolExecutor(1) as executor:  # importing the tokenizer library is slow
        encoder = executor.submit(load_encoder, config, checkpoint, max_model_len)
        runner = start_ranks(config, checkpoint, max_model_len)
        try:
            start = perf_counter()
            prompt_encoder = encoder.result()
            waited = round(perf_counter() - start, 3)
            runner.startup_seconds["tokenizer, after all else"] = waited
        except BaseException:
            runner.close()
            raise
    eos_token_ids, eos_token_id = checkpoint.eos_token_ids, None
    if len(eos_token_ids) == 1:
        (eos_token_id,) = eos_token_ids
    tokenizer = prompt_encoder.tokenizer
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos_token_id = tokenizer.eos_token_id
        eos_token_ids |= {eos_token_id}
    # Some checkpoints name EOS tokens outside the vocabulary.
    eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < model_config.vocab_size)
    block_size, num_blocks = config.block_size, runner.num_kvcache_blocks
    cache_len = longest_sequence(runner, num_blocks)  # in tokens
    weights = " (weights rounded to FP8)" if rounds_to_fp8(runner) else " (weights in FP8)"
    logger.info(
        "%s on %s in %s%s%s: %d KV blocks of %d tokens, %d running sequences of up to %d tokens "
        "(%s)",
        model_config.architecture,
        runner.device,
        str(runner.dtype).removeprefix("torch."),
        " (KV cache in FP8)" if config.quantizes_kv else "",
        weights if weight_quantization(runner) else "",
        num_blocks,
        block_size,
        runner.max_num_seqs,
        min(max_model_len, cache_len),
        "as many as the KV cache holds"
        if cache_len < max_model_len
        else "max_model_len"
        if max_model_len == config.max_model_len
        else "the model's limit",
    )
    return StartedModel(
        runner,
        prompt_encoder,
        max_model_len,
        cache_len,
        eos_token_ids,
        eos_token_id,
        checkpoint.recommended_sampling,
    )


def resolve_max_model_len(max_model_len: int | None, model: ModelConfig) -> int:
    """Returns the maximum length of a sequence, by default the model's number of positions.

    Raises:
        ValueError: ``max_model_len`` exceeds the model's positions.
    """
    if max_model_len is None:
        return min(model.max_position_embeddings, MAX_INT32)
    if max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len={max_model_len} is more than the model's "
            f"{model.max_position_embeddings} positions: lower it, or leave it out"
        )
    return max_model_len


def check_split(model: ModelConfig, num_ranks: int) -> None:
    """Raises ValueError if the model cannot be split evenly over ``num_ranks`` ranks."""
    if uneven := _uneven_size(model, num_ranks):
        possible = max(n for n in range(1, num_ranks) if not _uneven_size(model, n))
        raise ValueError(
            f"tensor_parallel_size={num_ranks} cannot split this model's {uneven} evenly: use "
            f"{possible}"
        )


def _uneven_size(model: ModelConfig, num_ranks: int) -> str | None:
    sizes = [(model.num_attention_heads, "attention heads")]
    sizes += [(layer.mlp.intermediate_size, "MLP columns") for layer in model.layers]
    if num_ranks % model.num_key_value_heads:  # otherwise each rank has a copy of one KV head
        sizes.append((model.num_key_value_heads, "key-value heads"))
    return next((f"{size} {what}" for size, what in sizes if size % num_ranks), None)


def check_vocabulary(size: int) -> None:
    """Raises ValueError if sampling on several GPUs cannot be batch-invariant. Some steps sample
    from each rank's logits, others from the gathered logits. Kernels sum over both in the same
    order if all rows begin at multiples of 16 elements."""
    if size % 16:
        raise ValueError(
            f"batch_invariant=True with several GPUs needs a vocabulary whose size is a multiple "
            f"of 16, and this model has {size} tokens: set tensor_parallel_size=1, or leave "
            f"batch_invariant out"
        )


def attention_features(model: ModelConfig) -> frozenset[str]:
    """Returns the features (window, softcap, sinks) that at least one layer has."""
    layers = model.layers
    return frozenset(n for n in ALL_FEATURES for layer in layers if getattr(layer.attention, n))


def start_ranks(config: Config, checkpoint: Checkpoint, max_model_len: int) -> ModelRunner:
    """Returns rank 0's runner. With several ranks, also starts the worker processes.

    If this raises, the workers have been ended and all memory has been freed, even if the caller
    keeps the exception.

    Raises:
        ValueError: the device or the attention backend is unavailable, or the KV cache does not
            fit.
        WorkerError: a worker could not start.
        Exception: any other error while loading weights or capturing CUDA graphs.
    """
    device = select_device(config.device, 0, config.tensor_parallel_size)
    handled = sys.exception()
    runner_class: type[ModelRunner] = ModelRunner
    if config.tensor_parallel_size > 1:
        from nanovllm.engine.tensor_parallel import MainRunner

        runner_class = MainRunner
    runner = runner_class(config, checkpoint.config, max_model_len, device)
    try:
        start(runner, checkpoint)
    except BaseException as error:
        abandon(runner, error, handled)
        raise
    return runner


def abandon(runner: ModelRunner, error: BaseException, handled: BaseException | None) -> None:
    """Frees everything after a failed start. Also clears the frames in the error's traceback. They
    refer to the model, and notebooks keep the last exception. An exception that the caller was
    handling when the start began keeps its frames."""
    try:
        runner.abort(error)
    finally:
        clear_frames(error, handled)
        if runner.device.type == "cuda":
            from nanovllm.kernels.gemm.cublas import free_workspaces

            with suppress(RuntimeError):  # a GPU that has failed fails again
                free_workspaces()
        with suppress(RuntimeError):
            runner.close()


@on_device
def start(runner: ModelRunner, checkpoint: Checkpoint) -> None:
    """Loads the model, allocates the KV cache and captures CUDA graphs. Runs on every rank."""
    config, model_config, device = runner.config, runner.model_config, runner.device
    timed = Timer(runner.startup_seconds, device)
    on_gpu = device.type == "cuda"
    runner.dtype = select_dtype(config.dtype, device, model_config.dtype)
    bytes_before = allocated_bytes(device) if on_gpu else 0
    timed("device")
    if config.batch_invariant and config.tensor_parallel_size > 1 and on_gpu:
        check_vocabulary(model_config.vocab_size)
    with ThreadPoolExecutor(2) as executor:
        backend = executor.submit(choose_backend, runner)  # mostly waits for compilers
        runner.join_ranks()
        timed("ranks")
        groups = group_layers([layer.attention.window for layer in model_config.layers])
        runner.kv_groups, runner.windows = (*groups.keys(),), (*groups.values(),)
        num_blocks = config.num_kvcache_blocks
        if num_blocks == -1:
            from nanovllm.engine.kv_cache import max_num_blocks

            num_blocks = max_num_blocks(runner)
        limit_model_len(runner, num_blocks)  # also limits the length of the rotary embedding table
        runner.model = build_model(runner)
        if uses_arenas(runner):
            move_parameters(runner.model, device)
        timed("model without weights")
        cublas = None
        if on_gpu and not config.enforce_eager:
            from nanovllm.engine.warmup import load_cublas_kernels

            cublas = executor.submit(load_cublas_kernels, runner)
        if backend.done():  # an error that needs no compiler: before the weights are read
            backend.result()
        load_weights(runner, checkpoint)
        timed("weights")
        runner.backend = backend.result()
        if cublas is not None:
            cublas.result()
        runner.barrier()
        timed("attention backend, after the weights")
    for layer in attention_layers(runner.model):
        layer.backend = runner.backend
    if runner.backend.shares_prefixes and None in runner.windows:
        runner.prefix_finder = make_prefix_finder(runner)
    runner.sampler = make_sampler(runner.model.lm_head)
    runner.graphs = CapturedSteps()
    if on_gpu and config.max_num_seqs is None:
        from nanovllm.engine.kv_cache import choose_num_seqs

        num_seqs = choose_num_seqs(runner, allocated_bytes(device) - bytes_before)
        runner.max_num_seqs = runner.tp.min(num_seqs, device)
    runner.sampled_tokens = torch.zeros(runner.max_num_seqs, dtype=torch.int64, device=device)
    if on_gpu:
        from nanovllm.engine.warmup import compile_kernels

        compile_kernels(runner)  # after loading: they depend on the packed weights
    timed("kernels")
    if on_gpu or config.num_kvcache_blocks == -1:
        from nanovllm.engine.kv_cache import measure_kv_cache

        num_blocks = measure_kv_cache(runner, bytes_before, timed)
    num_blocks = runner.tp.min(num_blocks, device)
    limit_model_len(runner, num_blocks)
    allocate_kv_cache(runner, num_blocks)
    timed("KV cache")
    if on_gpu:
        from nanovllm.engine.cuda_graphs import capture_cudagraph

        capture_cudagraph(runner)
    runner.barrier()
    timed("CUDA graphs")


@on_device
def choose_backend(runner: ModelRunner) -> AttentionBackend:
    config, model = runner.config, runner.model_config
    shape = AttentionShape(
        model.num_attention_heads // config.tensor_parallel_size,
        heads_per_rank(model.num_key_value_heads, config.tensor_parallel_size),
        model.head_dim,
        config.block_size,
        runner.dtype,
        runner.device,
        attention_features(model),
        config.quantizes_kv,
    )
    return select_attention_backend(config.attention_backend, shape, config.batch_invariant)


def make_prefix_finder(runner: ModelRunner) -> "PrefixFinder":
    from nanovllm.engine.shared_prefixes import PrefixFinder

    block_size, group = runner.config.block_size, runner.windows.index(None)
    return PrefixFinder(block_size, group, token_bytes(runner))


def build_model(runner: ModelRunner) -> DecoderForCausalLM:
    """Builds the model on this rank's device, in the runner's dtype. Its weights are not loaded."""
    length = runner.config.max_model_len or runner.model_config.max_position_embeddings
    config = for_length(runner.model_config, length)
    method = weight_quantization(runner)
    if method and rounds_to_fp8(runner):
        logger.info(
            "%s weights are rounded to FP8 as they are loaded, and take as much memory and time as "
            "unquantised ones",
            "with batch_invariant=True," if runner.config.batch_invariant else "on a CPU,",
        )
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(runner.dtype)
    try:
        with (
            torch.device(runner.device),
            use_tp_group(runner.tp),
            use_batch_invariance(runner.config.batch_invariant),
            use_quantization({"quant_method": method} if method else None),
        ):
            model = DecoderForCausalLM(config, runner.max_model_len).eval()
    finally:
        torch.set_default_dtype(default_dtype)
    return model


def rounds_to_fp8(runner: ModelRunner) -> bool:
    """Whether FP8 weights are only rounded to FP8, and stored in the model's dtype."""
    return runner.device.type == "cpu" or runner.config.batch_invariant


def weight_quantization(runner: ModelRunner) -> str | None:
    """Returns the quantisation of linear layers and experts, the user's or the checkpoint's; None
    for none. With ``rounds_to_fp8``, weights are only rounded to it."""
    config, model = runner.config, runner.model_config
    if model.quantization is None:
        return config.quantization
    if rounds_to_fp8(runner):
        return None
    num_ranks, head_dim = config.tensor_parallel_size, model.head_dim
    key_columns = heads_per_rank(model.num_key_value_heads, num_ranks) * head_dim
    sizes = [model.hidden_size, model.num_attention_heads * head_dim, key_columns * num_ranks]
    sizes += [layer.mlp.intermediate_size for layer in model.layers]
    has_blocks = model.quantization == "fp8_groups"
    if has_blocks and (_moves_rows(model) or any(size % (GROUP * num_ranks) for size in sizes)):
        return config.quantization
    return model.quantization


def _moves_rows(model: ModelConfig) -> bool:
    """Returns whether rows of a weight are loaded in another order than a checkpoint's, and may
    then be in another block of GROUP rows."""
    if any(getattr(layer.mlp, "interleaved", False) for layer in model.layers):
        return True
    ropes = [layer.attention.rope for layer in model.layers]
    reorders = any(rope is not None and rope.head_order(model.head_dim) for rope in ropes)
    return reorders and GROUP % model.head_dim != 0


def keeps_fp8(runner: ModelRunner, checkpoint: Checkpoint) -> bool:
    """Returns whether weights are stored as in the checkpoint, in FP8."""
    kept = checkpoint.config.quantization
    return bool(kept) and kept == weight_quantization(runner) and not rounds_to_fp8(runner)


def make_sampler(head: ParallelLMHead) -> Sampler:
    """Returns the sampler for logits of ``head``, which may be split over several ranks."""
    if head.tp.size == 1:
        return Sampler()
    from nanovllm.layers.parallel_sampler import ParallelSampler

    return ParallelSampler(head)


@torch.inference_mode()
def load_weights(runner: ModelRunner, checkpoint: Checkpoint) -> None:
    if runner.config.load_format == "dummy":
        fill_with_dummy_weights(runner.model, runner.config.seed)
    else:
        tensors = checkpoint.tensors(runner.device, keeps_fp8(runner, checkpoint))
        load_model(runner.model, tensors, runner.tp.rank == 0)
    for module in runner.model.modules():
        if isinstance(module, (LinearBase, ParallelLMHead)):
            module.linear_weight.pack()
